"""The convolution layers that the layer benchmark measures: of known networks, and others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnx_convgrad.bench.layer import ConvLayer

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A convolution and the heading of its table."""

    group: str
    layer: ConvLayer

    @property
    def classes(self) -> list[str]:
        """The classes of the layer in the means below the table."""
        layer, classes = self.layer, []
        if set(layer.w[2:]) == {1}:
            classes.append("1x1")
        if layer.groups > 1:
            classes.append("depthwise" if layer.groups == layer.x[1] else "grouped")
        if max(layer.dilations) > 1:
            classes.append("dilated")
        if max(layer.strides) > 1:
            classes.append("transposed" if layer.transposed else "strided")
        return classes or ["plain"]


def layer(
    group: str,
    x: Sizes,
    features: int,
    kernel: int | Sizes,
    stride: int | Sizes = 1,
    pad: int | Sizes | None = None,
    dilation: int = 1,
    groups: int = 1,
    *,
    transposed: bool = False,
) -> Case:
    """A layer; a number stands for all axes, and padding keeps the size at stride 1 by default."""
    rank = len(x) - 2

    def each(value: int | Sizes) -> Sizes:
        return (value,) * rank if isinstance(value, int) else value

    if pad is None:
        pad = tuple(dilation * (k - 1) // 2 for k in each(kernel))
    lead = (x[1], features) if transposed else (features, x[1])
    w = (lead[0], lead[1] // groups, *each(kernel))
    return Case(group, ConvLayer(x, w, each(stride), each(dilation), each(pad), each(pad), groups, transposed))


def square(group: str, n: int, c: int, size: int, *rest: Any, **more: Any) -> Case:
    return layer(group, (n, c, size, size), *rest, **more)


# N, C, H = W, O, kernel, stride, pad, dilation, groups: layers of ResNet, MobileNet, ResNeXt, ConvNeXt and dilated nets.
STUDY = [
    *((16, 3, 112, 32, 7, 2, 3, 1, 1), (16, 64, 56, 64, 1, 1, 0, 1, 1), (16, 256, 28, 512, 1, 2, 0, 1, 1)),
    *((16, 1024, 14, 256, 1, 1, 0, 1, 1), (16, 64, 56, 64, 3, 1, 1, 1, 1), (16, 128, 28, 128, 3, 1, 1, 1, 1)),
    *((16, 256, 14, 256, 3, 1, 1, 1, 1), (16, 512, 7, 512, 3, 1, 1, 1, 1), (16, 128, 56, 128, 3, 2, 1, 1, 1)),
    *((16, 64, 28, 64, 3, 1, 2, 2, 1), (16, 128, 28, 128, 3, 1, 1, 1, 32), (16, 96, 56, 96, 3, 1, 1, 1, 96)),
    *((16, 144, 56, 144, 3, 2, 1, 1, 144), (16, 384, 14, 384, 3, 1, 1, 1, 384), (16, 192, 14, 192, 5, 1, 2, 1, 192)),
    (16, 96, 28, 96, 7, 1, 3, 1, 96),
]

LAYERS = [
    *(square("study", *row) for row in STUDY),
    # One spatial axis: speech, electrocardiograms, WaveNet, depthwise speech nets.
    layer("1-D", (16, 1, 16000), 64, 80, 4, 38),
    layer("1-D", (16, 12, 4096), 64, 17, 1),
    layer("1-D", (16, 64, 4096), 128, 17, 4),
    layer("1-D", (16, 128, 1024), 128, 3, 1),
    layer("1-D", (16, 256, 256), 256, 9, 1),
    layer("1-D", (8, 64, 4000), 128, 2, 1, 0, 8),
    layer("1-D", (16, 256, 400), 256, 33, 1, None, 1, 256),
    layer("1-D", (16, 512, 250), 512, 1, 1),
    layer("1-D", (8, 512, 2000), 512, 3, 2),
    # Three: video and medical volumes.
    layer("3-D", (2, 3, 8, 112, 112), 64, (3, 7, 7), (1, 2, 2)),
    layer("3-D", (2, 64, 8, 28, 28), 64, 3, 1),
    layer("3-D", (2, 64, 8, 28, 28), 128, 3, 2),
    layer("3-D", (2, 256, 4, 14, 14), 256, 3, 1),
    layer("3-D", (2, 64, 8, 28, 28), 144, (1, 3, 3), 1),
    layer("3-D", (2, 144, 8, 28, 28), 64, (3, 1, 1), 1),
    layer("3-D", (2, 128, 8, 28, 28), 256, 1, 1),
    layer("3-D", (2, 108, 8, 28, 28), 108, 3, 1, None, 1, 108),
    layer("3-D", (1, 16, 32, 32, 32), 16, 3, 1),
    # Small batches.
    square("batch 1-4", 1, 64, 56, 64, 3),
    square("batch 1-4", 1, 256, 14, 256, 3),
    square("batch 1-4", 1, 512, 7, 512, 3),
    square("batch 1-4", 2, 128, 28, 128, 3),
    square("batch 1-4", 1, 3, 224, 64, 7, 2),
    square("batch 1-4", 4, 256, 56, 64, 1),
    square("batch 1-4", 1, 1024, 14, 2048, 1, 2),
    square("batch 1-4", 1, 144, 56, 144, 3, 1, None, 1, 144),
    square("batch 1-4", 2, 960, 7, 960, 5, 1, None, 1, 960),
    square("batch 1-4", 4, 256, 28, 256, 3, 2),
    # Large images.
    square("large images", 1, 32, 512, 32, 3),
    square("large images", 2, 64, 256, 64, 3),
    square("large images", 1, 3, 512, 64, 3),
    square("large images", 1, 64, 256, 128, 3, 2),
    square("large images", 1, 256, 128, 256, 3),
    square("large images", 1, 256, 64, 256, 3, 1, None, 6),
    square("large images", 1, 32, 512, 32, 3, 1, None, 1, 32),
    square("large images", 1, 64, 512, 3, 9),
    square("large images", 1, 128, 256, 64, 1),
    # Other kernels: Inception's and asymmetric ones, AlexNet's, even ones.
    square("kernels", 16, 48, 35, 64, 5),
    square("kernels", 16, 64, 27, 192, 5),
    square("kernels", 16, 3, 224, 64, 11, 4, 2),
    layer("kernels", (16, 128, 17, 17), 128, (1, 7)),
    layer("kernels", (16, 128, 17, 17), 192, (7, 1)),
    layer("kernels", (16, 384, 8, 8), 384, (1, 3)),
    layer("kernels", (16, 96, 20, 50), 96, 3),
    layer("kernels", (8, 64, 33, 97), 96, (3, 5), (2, 1), (1, 2)),
    square("kernels", 16, 64, 32, 64, 4, 2, 1),
    square("kernels", 16, 3, 32, 32, 3),
    square("kernels", 16, 192, 35, 320, 3, 2, 0),
    # Groups: ResNeXt, RegNet, ShuffleNet.
    square("groups", 8, 256, 28, 256, 3, 1, None, 1, 32),
    square("groups", 8, 512, 14, 512, 3, 1, None, 1, 32),
    square("groups", 8, 256, 56, 256, 3, 2, None, 1, 32),
    square("groups", 16, 240, 28, 240, 1, 1, None, 1, 3),
    square("groups", 8, 192, 28, 192, 3, 1, None, 1, 4),
    # Depthwise: MobileNet, EfficientNet, ConvNeXt.
    square("depthwise", 8, 32, 112, 32, 3, 1, None, 1, 32),
    square("depthwise", 16, 192, 28, 192, 3, 1, None, 1, 192),
    square("depthwise", 8, 96, 112, 96, 3, 2, None, 1, 96),
    square("depthwise", 16, 576, 14, 576, 3, 2, None, 1, 576),
    square("depthwise", 16, 960, 7, 960, 3, 1, None, 1, 960),
    square("depthwise", 8, 144, 56, 144, 5, 2, None, 1, 144),
    square("depthwise", 8, 240, 28, 240, 5, 1, None, 1, 240),
    square("depthwise", 16, 672, 14, 672, 5, 1, None, 1, 672),
    square("depthwise", 8, 96, 56, 96, 7, 1, None, 1, 96),
    square("depthwise", 8, 384, 14, 384, 7, 1, None, 1, 384),
    square("depthwise", 8, 64, 56, 128, 3, 1, None, 1, 64),
    # Dilated: DeepLab.
    square("dilated", 4, 256, 28, 256, 3, 1, None, 2),
    *(square("dilated", 4, 512, 28, 256, 3, 1, None, rate) for rate in (12, 24, 36)),
    square("dilated", 2, 64, 65, 64, 3, 1, None, 4),
    square("dilated", 4, 256, 33, 256, 3, 1, None, 2, 256),
    # Patches: stems of vision transformers, and what goes down in ConvNeXt.
    square("patches", 8, 3, 224, 96, 4, 4, 0),
    square("patches", 8, 3, 224, 384, 16, 16, 0),
    square("patches", 8, 96, 56, 192, 2, 2, 0),
    square("patches", 8, 384, 14, 768, 2, 2, 0),
    # Transposed: U-Net, generators, autoencoders.
    square("transposed", 4, 256, 16, 128, 2, 2, 0, transposed=True),
    square("transposed", 4, 64, 64, 32, 2, 2, 0, transposed=True),
    square("transposed", 8, 256, 8, 128, 4, 2, 1, transposed=True),
    square("transposed", 8, 64, 32, 3, 4, 2, 1, transposed=True),
    layer("transposed", (2, 64, 8, 16, 16), 32, 2, 2, 0, transposed=True),
    # Plain 3x3 and 1x1 that the study lacks: VGG, DenseNet, wide and narrow.
    square("plain", 8, 128, 56, 32, 3),
    square("plain", 8, 64, 112, 128, 3),
    square("plain", 16, 512, 14, 512, 3),
    square("plain", 8, 3, 224, 64, 3),
    square("plain", 8, 3, 224, 32, 3, 2),
    square("plain", 8, 3, 224, 64, 7, 2),
    square("plain", 32, 16, 32, 16, 3),
    square("plain", 16, 64, 56, 256, 1),
    square("plain", 16, 24, 56, 144, 1),
    square("plain", 16, 960, 7, 160, 1),
    square("plain", 16, 2048, 7, 512, 1),
    square("plain", 8, 256, 56, 512, 1, 2),
    square("plain", 8, 64, 56, 128, 3, 2),
    square("plain", 16, 256, 14, 512, 3, 2),
]

GROUPS = list(dict.fromkeys(case.group for case in LAYERS))
