"""The networks that are measured, each with its batch, and how one becomes an ONNX model."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx
import torch
from torch import Tensor, nn

import benchmarks.further_architectures as further
import benchmarks.other_architectures as other
from benchmarks.architectures import (
    UNet,
    basic_block,
    bottleneck,
    convnext_tiny,
    densenet121,
    ecg_resnet,
    efficientnet_b0,
    mnist_cnn,
    mobilenet_v2,
    mobilenet_v3,
    resnet,
    resnet18_3d,
    resnet20,
)


@dataclass(frozen=True)
class Network:
    """A network with the batch that it is measured at.

    `per_pixel` tells that every pixel has a class, in images so many times `enlarged`.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: int
    sample: tuple[int, ...]
    classes: int = 1000
    per_pixel: bool = False
    enlarged: int = 1

    def module(self) -> nn.Module:
        """The network in training mode, with the same weights each time."""
        torch.manual_seed(0)
        return self.build().train()

    def data(self, batch: int = 0, size: int = 0) -> tuple[Tensor, Tensor]:
        """A batch of noise, and classes to go with it; `batch` and image `size` replace the usual ones."""
        sample = self.sample if not size else (self.sample[0], *[size] * (len(self.sample) - 1))
        generator = torch.Generator().manual_seed(1)
        x = torch.randn((batch or self.batch, *sample), generator=generator)
        shape = (len(x), *(self.enlarged * size for size in sample[1:] if self.per_pixel))
        return x, torch.randint(self.classes, shape, generator=generator)


IMAGE = (3, 224, 224)
NETWORKS = {
    "resnet18": Network("ResNet-18", partial(resnet, basic_block, [2, 2, 2, 2], 1), 16, IMAGE),
    "resnet50": Network("ResNet-50", partial(resnet, bottleneck, [3, 4, 6, 3], 4), 8, IMAGE),
    "mobilenet_v2": Network("MobileNetV2", mobilenet_v2, 16, IMAGE),
    "mobilenet_v3": Network("MobileNetV3-Large", mobilenet_v3, 16, IMAGE),
    "efficientnet_b0": Network("EfficientNet-B0", efficientnet_b0, 8, IMAGE),
    "densenet121": Network("DenseNet-121", densenet121, 8, IMAGE),
    "convnext_tiny": Network("ConvNeXt-Tiny", convnext_tiny, 8, IMAGE),
    "unet": Network("U-Net", UNet, 4, (3, 128, 128), 21, per_pixel=True),
    "resnet18_3d": Network("3-D ResNet-18", resnet18_3d, 4, (3, 8, 64, 64), 400),
    "ecg_resnet": Network("1-D ResNet (ECG)", ecg_resnet, 16, (12, 4096), 6),
    "resnet20": Network("ResNet-20", resnet20, 64, (3, 32, 32), 10),
    "mnist_cnn": Network("MNIST CNN", mnist_cnn, 64, (1, 28, 28), 10),
}
OTHERS = {
    "alexnet": Network("AlexNet", other.alexnet, 32, IMAGE),
    "vgg11": Network("VGG-11", other.vgg11, 8, IMAGE),
    "dqn": Network("DQN", other.dqn, 32, (4, 84, 84), 18),
    "squeezenet": Network("SqueezeNet 1.1", other.squeezenet, 16, IMAGE),
    "googlenet": Network("GoogLeNet", other.googlenet, 8, IMAGE),
    "resnext50": Network("ResNeXt-50 32x4d", other.resnext50, 8, IMAGE),
    "shufflenet": Network("ShuffleNet V2", other.shufflenet, 16, IMAGE),
    "convmixer": Network("ConvMixer-256/8", other.convmixer, 8, IMAGE),
    "wide_resnet": Network("WRN-16-4", other.wide_resnet, 32, (3, 32, 32), 10),
    "deeplab": Network("DeepLab V3", other.deeplab, 2, (3, 256, 256), 21, per_pixel=True),
    "edsr": Network("EDSR", other.edsr, 4, (3, 48, 48), 21, per_pixel=True, enlarged=2),
    "nnunet_3d": Network("3-D nnU-Net", other.nnunet_3d, 1, (1, 48, 48, 48), 3, per_pixel=True),
    "diffusion_unet": Network("diffusion U-Net", other.diffusion_unet, 4, (3, 64, 64), 8, per_pixel=True),
    "autoencoder": Network("DCGAN autoencoder", other.autoencoder, 16, (3, 64, 64), 16, per_pixel=True),
    "csp_darknet": Network("CSPDarknet", other.csp_darknet, 8, IMAGE),
    "tcn": Network("TCN", other.tcn, 16, (8, 1024), 10),
    "m5": Network("M5 (audio)", other.m5, 16, (1, 16000), 35),
    "eegnet": Network("EEGNet", other.eegnet, 32, (1, 64, 512), 4),
    "conv_vit": Network("ViT, convolutional stem", other.conv_vit, 8, IMAGE),
    "mobilenet_v1": Network("MobileNet", further.mobilenet_v1, 16, IMAGE),
    "ghostnet": Network("GhostNet", further.ghostnet, 16, IMAGE),
    "inception_v3": Network("Inception V3", further.inception_v3, 8, (3, 149, 149)),
    "r2plus1d": Network("R(2+1)D", further.r2plus1d, 2, (3, 8, 56, 56), 400),
    "regnet_x": Network("RegNetX-400MF", further.regnet_x, 8, IMAGE),
    "efficientnet_v2": Network("EfficientNetV2", further.efficientnet_v2, 8, (3, 160, 160)),
    "poolformer": Network("PoolFormer", further.poolformer, 4, IMAGE),
    "convnext_v2": Network("ConvNeXt V2", further.convnext_v2, 8, IMAGE),
    "srgan": Network("SRGAN", further.srgan, 4, (3, 48, 48), 8, per_pixel=True, enlarged=2),
    "hrnet": Network("HRNet", further.HRNet, 4, (3, 128, 128), 19, per_pixel=True),
    "wavenet": Network("WaveNet", further.wavenet, 4, (1, 4096), 64, per_pixel=True),
    "tasnet": Network("Conv-TasNet", further.tasnet, 2, (1, 16000), 64, per_pixel=True),
    "pointnet": Network("PointNet", further.pointnet, 16, (3, 1024), 40),
    "lenet": Network("LeNet-5", further.lenet, 64, (1, 28, 28), 10),
}
"""On which the lowerings were not tuned."""

DEEPER = {
    "resnet34": Network("ResNet-34", partial(resnet, basic_block, [3, 4, 6, 3], 1), 8, IMAGE),
    "resnet101": Network("ResNet-101", partial(resnet, bottleneck, [3, 4, 23, 3], 4), 8, IMAGE),
}
"""For scaling alone."""


def network(name: str) -> Network:
    return {**NETWORKS, **OTHERS, **DEEPER}[name]


def export(module: nn.Module, x: Tensor, *, dynamic_batch: bool = False) -> onnx.ModelProto:
    """The module as ONNX, `x -> y`, in its present mode.

    The older exporter keeps batch normalization a node of its own in training mode; the newer one does not.
    """
    training = module.training
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    buffer: Any = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (x,),
            buffer,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}} if dynamic_batch else None,
            opset_version=17,
            dynamo=False,
            training=mode,
            do_constant_folding=not training,
        )
    return onnx.load_from_string(buffer.getvalue())
