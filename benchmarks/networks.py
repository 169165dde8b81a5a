"""The networks that are measured, each with its batch, and their export to ONNX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import onnx
import torch
from torch import Tensor, nn

from tests.support import families
from tests.support.zoo import branches, images, recurrent, residual, separable, signals, stacks, tokens, transformers


@dataclass(frozen=True)
class Network:
    """A network and the size of the batch to measure.

    `per_pixel`: the output has a class for every pixel of the image, `enlarged` times; `steps`: for so many steps.
    `words`: the sample is a text of so many different tokens, and the output has a row of classes for each token.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: int
    sample: tuple[int, ...]
    classes: int = 1000
    per_pixel: bool = False
    enlarged: int = 1
    steps: int = 0
    words: int = 0

    def module(self) -> nn.Module:
        """The network in training mode, with the same weights each time."""
        torch.manual_seed(0)
        return self.build().train()

    def data(
        self, batch: int = 0, size: int = 0, *, sample: tuple[int, ...] = (), seed: int = 1
    ) -> tuple[Tensor, Tensor]:
        """A random batch, and classes for it; `batch` and image `size`, or `sample`, replace the usual ones."""
        sample = sample or (self.sample if not size else (self.sample[0], *[size] * (len(self.sample) - 1)))
        generator = torch.Generator().manual_seed(seed)
        if self.words:
            x = torch.randint(self.words, (batch or self.batch, *sample), generator=generator)
            return x, torch.randint(self.classes, (x.numel(),), generator=generator)
        x = torch.randn((batch or self.batch, *sample), generator=generator)
        shape = (len(x), *(self.enlarged * size for size in sample[1:] if self.per_pixel))
        shape = (len(x), self.steps) if self.steps else shape
        return x, torch.randint(self.classes, shape, generator=generator)


IMAGE = (3, 224, 224)
NETWORKS = {
    "resnet18": Network("ResNet-18", partial(residual.resnet, 2, 2, 2, 2), 16, IMAGE),
    "resnet50": Network("ResNet-50", partial(residual.deep_resnet, 3, 4, 6, 3), 8, IMAGE),
    "mobilenet_v2": Network("MobileNetV2", separable.mobilenet_v2, 16, IMAGE),
    "mobilenet_v3": Network("MobileNetV3-Large", separable.mobilenet_v3, 16, IMAGE),
    "efficientnet_b0": Network("EfficientNet-B0", separable.efficientnet_b0, 8, IMAGE),
    "densenet121": Network("DenseNet-121", branches.densenet121, 8, IMAGE),
    "convnext_tiny": Network("ConvNeXt-Tiny", tokens.convnext_tiny, 8, IMAGE),
    "unet": Network("U-Net", images.unet, 4, (3, 128, 128), 21, per_pixel=True),
    "resnet18_3d": Network("3-D ResNet-18", residual.resnet18_3d, 4, (3, 8, 64, 64), 400),
    "ecg_resnet": Network("1-D ResNet (ECG)", residual.ecg_resnet, 16, (12, 4096), 6),
    "resnet20": Network("ResNet-20", residual.resnet20, 64, (3, 32, 32), 10),
    "mnist_cnn": Network("MNIST CNN", partial(stacks.small_cnn, 28, 32, 128), 64, (1, 28, 28), 10),
}
OTHERS = {
    "resnet101": Network("ResNet-101", residual.resnet101, 4, IMAGE),
    "alexnet": Network("AlexNet", stacks.alexnet, 32, IMAGE),
    "vgg11": Network("VGG-11", stacks.vgg11, 8, IMAGE),
    "dqn": Network("DQN", stacks.dqn, 32, (4, 84, 84), 18),
    "squeezenet": Network("SqueezeNet 1.1", branches.squeezenet, 16, IMAGE),
    "googlenet": Network("GoogLeNet", branches.googlenet, 8, IMAGE),
    "resnext50": Network("ResNeXt-50 32x4d", residual.resnext50, 8, IMAGE),
    "shufflenet": Network("ShuffleNet V2", separable.shufflenet, 16, IMAGE),
    "convmixer": Network("ConvMixer-256/8", separable.convmixer, 8, IMAGE),
    "wide_resnet": Network("WRN-16-4", residual.wide_resnet, 32, (3, 32, 32), 10),
    "deeplab": Network("DeepLab V3", images.deeplab, 2, (3, 256, 256), 21, per_pixel=True),
    "edsr": Network("EDSR", images.edsr, 4, (3, 48, 48), 21, per_pixel=True, enlarged=2),
    "nnunet_3d": Network("3-D nnU-Net", images.nnunet_3d, 1, (1, 48, 48, 48), 3, per_pixel=True),
    "diffusion_unet": Network("diffusion U-Net", images.diffusion_unet, 4, (3, 64, 64), 8, per_pixel=True),
    "autoencoder": Network("DCGAN autoencoder", images.autoencoder, 16, (3, 64, 64), 16, per_pixel=True),
    "csp_darknet": Network("CSPDarknet", branches.csp_darknet, 8, IMAGE),
    "tcn": Network("TCN", signals.tcn, 16, (8, 1024), 10),
    "m5": Network("M5 (audio)", signals.m5, 16, (1, 16000), 35),
    "eegnet": Network("EEGNet", signals.eegnet, 32, (1, 64, 512), 4),
    "conv_vit": Network("ViT, convolutional stem", tokens.conv_vit, 8, IMAGE),
    "mobilenet_v1": Network("MobileNet", separable.mobilenet_v1, 16, IMAGE),
    "ghostnet": Network("GhostNet", separable.ghostnet, 16, IMAGE),
    "inception_v3": Network("Inception V3", branches.inception_v3, 8, (3, 149, 149)),
    "r2plus1d": Network("R(2+1)D", residual.r2plus1d, 2, (3, 8, 56, 56), 400),
    "regnet_x": Network("RegNetX-400MF", residual.regnet_x, 8, IMAGE),
    "efficientnet_v2": Network("EfficientNetV2", separable.efficientnet_v2, 8, (3, 160, 160)),
    "poolformer": Network("PoolFormer", tokens.poolformer, 4, IMAGE),
    "convnext_v2": Network("ConvNeXt V2", tokens.convnext_v2, 8, IMAGE),
    "srgan": Network("SRGAN", images.srgan, 4, (3, 48, 48), 8, per_pixel=True, enlarged=2),
    "hrnet": Network("HRNet", images.HRNet, 4, (3, 128, 128), 19, per_pixel=True),
    "wavenet": Network("WaveNet", signals.wavenet, 4, (1, 4096), 64, per_pixel=True),
    "tasnet": Network("Conv-TasNet", signals.tasnet, 2, (1, 16000), 64, per_pixel=True),
    "pointnet": Network("PointNet", signals.pointnet, 16, (3, 1024), 40),
    "crnn": Network("CRNN (text lines)", recurrent.Crnn, 16, (1, 32, 256), 37, steps=65),
    "vit": Network("ViT-S/16", transformers.vit, 8, IMAGE),
    "swin": Network("Swin-T", transformers.swin, 4, IMAGE),
    "gpt": Network("GPT, 6 layers", transformers.Gpt, 8, (256,), 5000, words=5000),
    "whisper": Network("Whisper encoder, tiny", transformers.whisper_encoder, 4, (80, 1000), 100),
    "lenet": Network("LeNet-5", stacks.lenet, 64, (1, 28, 28), 10),
}
"""The networks on which the lowerings were not tuned."""


def network(name: str) -> Network:
    return {**NETWORKS, **OTHERS}[name]


def export(module: nn.Module, x: Tensor, *, dynamic_batch: bool = False) -> onnx.ModelProto:
    """Export the module, `x -> y`, in its present mode.

    By the older exporter: it keeps BatchNormalization nodes in training mode; the newer one does not.
    """
    return families.export(module, x, dynamo=False, training=module.training, dynamic_batch=dynamic_batch, opset=17)
