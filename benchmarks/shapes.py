"""The convolution layers that the layer benchmark measures: layers of known networks, and random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onnx_convgrad.ir.geometry import ConvSpec, Window

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A convolution and the heading of its table."""

    group: str
    layer: ConvSpec

    @property
    def classes(self) -> list[str]:
        """The classes of the layer in the means below the table."""
        layer, classes = self.layer, []
        if layer.taps == 1:
            classes.append("1x1")
        if layer.groups > 1:
            classes.append("depthwise" if layer.depthwise else "grouped")
        if max(layer.dilations) > 1:
            classes.append("dilated")
        if max(layer.strides) > 1:
            classes.append("transposed" if layer.transposed else "strided")
        return classes or ["plain"]


def _case(
    group: str,
    x: Sizes,
    features: int,
    kernel: int | Sizes,
    stride: int | Sizes = 1,
    pad: int | Sizes | None = None,
    dilation: int = 1,
    groups: int = 1,
) -> Case:
    """A layer; a number stands for all axes, and padding keeps the size at stride 1 by default."""
    rank = len(x) - 2
    transposed = group == "transposed"

    def each(value: int | Sizes) -> Sizes:
        return (value,) * rank if isinstance(value, int) else value

    if pad is None:
        pad = tuple(dilation * (k - 1) // 2 for k in each(kernel))
    first, second = (x[1], features) if transposed else (features, x[1])
    w = (first, second // groups, *each(kernel))
    win = Window(each(stride), each(dilation), each(pad), each(pad), groups)
    return Case(group, ConvSpec.layer(x, w, win, transposed=transposed))


# By group: the shape of x, or N, C and H = W; then O, kernel, stride, pad, dilation, groups.
# fmt: off
GROUPS: dict[str, list[tuple[Any, ...]]] = {
    "study": [  # ResNet, MobileNet, ResNeXt, ConvNeXt and dilated networks
        (16, 3, 112, 32, 7, 2, 3, 1, 1), (16, 64, 56, 64, 1, 1, 0, 1, 1), (16, 256, 28, 512, 1, 2, 0, 1, 1),
        (16, 1024, 14, 256, 1, 1, 0, 1, 1), (16, 64, 56, 64, 3, 1, 1, 1, 1), (16, 128, 28, 128, 3, 1, 1, 1, 1),
        (16, 256, 14, 256, 3, 1, 1, 1, 1), (16, 512, 7, 512, 3, 1, 1, 1, 1), (16, 128, 56, 128, 3, 2, 1, 1, 1),
        (16, 64, 28, 64, 3, 1, 2, 2, 1), (16, 128, 28, 128, 3, 1, 1, 1, 32), (16, 96, 56, 96, 3, 1, 1, 1, 96),
        (16, 144, 56, 144, 3, 2, 1, 1, 144), (16, 384, 14, 384, 3, 1, 1, 1, 384), (16, 192, 14, 192, 5, 1, 2, 1, 192),
        (16, 96, 28, 96, 7, 1, 3, 1, 96),
    ],
    "1-D": [  # speech, electrocardiograms, WaveNet, depthwise speech networks
        ((16, 1, 16000), 64, 80, 4, 38), ((16, 12, 4096), 64, 17, 1), ((16, 64, 4096), 128, 17, 4),
        ((16, 128, 1024), 128, 3, 1), ((16, 256, 256), 256, 9, 1), ((8, 64, 4000), 128, 2, 1, 0, 8),
        ((16, 256, 400), 256, 33, 1, None, 1, 256), ((16, 512, 250), 512, 1, 1), ((8, 512, 2000), 512, 3, 2),
    ],
    "3-D": [  # video and medical volumes
        ((2, 3, 8, 112, 112), 64, (3, 7, 7), (1, 2, 2)), ((2, 64, 8, 28, 28), 64, 3, 1),
        ((2, 64, 8, 28, 28), 128, 3, 2), ((2, 256, 4, 14, 14), 256, 3, 1), ((2, 64, 8, 28, 28), 144, (1, 3, 3), 1),
        ((2, 144, 8, 28, 28), 64, (3, 1, 1), 1), ((2, 128, 8, 28, 28), 256, 1, 1),
        ((2, 108, 8, 28, 28), 108, 3, 1, None, 1, 108), ((1, 16, 32, 32, 32), 16, 3, 1),
    ],
    "batch 1-4": [
        (1, 64, 56, 64, 3), (1, 256, 14, 256, 3), (1, 512, 7, 512, 3), (2, 128, 28, 128, 3), (1, 3, 224, 64, 7, 2),
        (4, 256, 56, 64, 1), (1, 1024, 14, 2048, 1, 2), (1, 144, 56, 144, 3, 1, None, 1, 144),
        (2, 960, 7, 960, 5, 1, None, 1, 960), (4, 256, 28, 256, 3, 2),
    ],
    "large images": [
        (1, 32, 512, 32, 3), (2, 64, 256, 64, 3), (1, 3, 512, 64, 3), (1, 64, 256, 128, 3, 2), (1, 256, 128, 256, 3),
        (1, 256, 64, 256, 3, 1, None, 6), (1, 32, 512, 32, 3, 1, None, 1, 32), (1, 64, 512, 3, 9),
        (1, 128, 256, 64, 1),
    ],
    "kernels": [  # Inception's and asymmetric ones, AlexNet's, even ones
        (16, 48, 35, 64, 5), (16, 64, 27, 192, 5), (16, 3, 224, 64, 11, 4, 2), ((16, 128, 17, 17), 128, (1, 7)),
        ((16, 128, 17, 17), 192, (7, 1)), ((16, 384, 8, 8), 384, (1, 3)), ((16, 96, 20, 50), 96, 3),
        ((8, 64, 33, 97), 96, (3, 5), (2, 1), (1, 2)), (16, 64, 32, 64, 4, 2, 1), (16, 3, 32, 32, 3),
        (16, 192, 35, 320, 3, 2, 0),
    ],
    "groups": [  # ResNeXt, RegNet, ShuffleNet
        (8, 256, 28, 256, 3, 1, None, 1, 32), (8, 512, 14, 512, 3, 1, None, 1, 32),
        (8, 256, 56, 256, 3, 2, None, 1, 32), (16, 240, 28, 240, 1, 1, None, 1, 3),
        (8, 192, 28, 192, 3, 1, None, 1, 4),
    ],
    "depthwise": [  # MobileNet, EfficientNet, ConvNeXt
        (8, 32, 112, 32, 3, 1, None, 1, 32), (16, 192, 28, 192, 3, 1, None, 1, 192),
        (8, 96, 112, 96, 3, 2, None, 1, 96), (16, 576, 14, 576, 3, 2, None, 1, 576),
        (16, 960, 7, 960, 3, 1, None, 1, 960), (8, 144, 56, 144, 5, 2, None, 1, 144),
        (8, 240, 28, 240, 5, 1, None, 1, 240), (16, 672, 14, 672, 5, 1, None, 1, 672),
        (8, 96, 56, 96, 7, 1, None, 1, 96), (8, 384, 14, 384, 7, 1, None, 1, 384),
        (8, 64, 56, 128, 3, 1, None, 1, 64),
    ],
    "dilated": [  # DeepLab
        (4, 256, 28, 256, 3, 1, None, 2), (4, 512, 28, 256, 3, 1, None, 12), (4, 512, 28, 256, 3, 1, None, 24),
        (4, 512, 28, 256, 3, 1, None, 36), (2, 64, 65, 64, 3, 1, None, 4), (4, 256, 33, 256, 3, 1, None, 2, 256),
    ],
    "patches": [  # stems of vision transformers, downsampling in ConvNeXt
        (8, 3, 224, 96, 4, 4, 0), (8, 3, 224, 384, 16, 16, 0), (8, 96, 56, 192, 2, 2, 0), (8, 384, 14, 768, 2, 2, 0),
    ],
    "transposed": [  # U-Net, generators, autoencoders
        (4, 256, 16, 128, 2, 2, 0), (4, 64, 64, 32, 2, 2, 0), (8, 256, 8, 128, 4, 2, 1), (8, 64, 32, 3, 4, 2, 1),
        ((2, 64, 8, 16, 16), 32, 2, 2, 0),
    ],
    "plain": [  # plain 3x3 and 1x1 that the study lacks: VGG, DenseNet, wide and narrow
        (8, 128, 56, 32, 3), (8, 64, 112, 128, 3), (16, 512, 14, 512, 3), (8, 3, 224, 64, 3), (8, 3, 224, 32, 3, 2),
        (8, 3, 224, 64, 7, 2), (32, 16, 32, 16, 3), (16, 64, 56, 256, 1), (16, 24, 56, 144, 1), (16, 960, 7, 160, 1),
        (16, 2048, 7, 512, 1), (8, 256, 56, 512, 1, 2), (8, 64, 56, 128, 3, 2), (16, 256, 14, 512, 3, 2),
    ],
}

# fmt: on

LAYERS = [
    _case(group, *row) if isinstance(row[0], tuple) else _case(group, (*row[:3], row[2]), *row[3:])
    for group, rows in GROUPS.items()
    for row in rows
]


# -- random layers -----------------------------------------------------------------------------------------------------

CHANNELS = (1, 3, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512)
FEATURES = (8, 16, 20, 24, 32, 48, 64, 96, 128, 160, 256, 384, 512)
SIZES = {
    1: (100, 250, 512, 1000, 2000, 4096, 16000),
    2: (7, 9, 13, 14, 17, 20, 28, 32, 35, 40, 56, 64, 80, 112, 128, 160),
    3: (4, 7, 8, 12, 16, 20, 24, 32),
}
"""Sizes of the axes of signals, images and volumes, by rank."""

MULTIPLICATIONS = range(2_000_000, 1_500_000_000)
LARGEST = 30_000_000
"""The most elements of an input or output."""


def random_layers(count: int, seed: int) -> list[Case]:
    """Draw `count` layers of all kinds; reproducible by `seed`."""
    drawn = _drawn(random.Random(seed))
    return [Case("random", next(drawn)) for _ in range(count)]


def _drawn(rng: random.Random) -> Iterator[ConvSpec]:
    while True:
        rank = rng.choice((1, 2, 2, 2, 2, 3))
        batch, channels, features = rng.choice((1, 2, 4, 8, 16, 32)), rng.choice(CHANNELS), rng.choice(FEATURES)
        kernel = _each(rng, rank, (1, 2, 3, 3, 3, 4, 5, 7), 0.7)
        if rank == 1 and rng.random() < 0.5:
            kernel = (rng.choice((9, 15, 16, 25, 31, 64)),)
        stride = rng.choice((1, 1, 1, 2, 2, 3, 4))
        dilation = rng.choice((1, 1, 1, 1, 2, 3)) if stride == 1 else 1
        size = _each(rng, rank, SIZES[rank], 0.7)
        pads = tuple(dilation * (k - 1) // 2 for k in kernel) if rng.random() < 0.8 else (0,) * rank
        kind, groups = rng.random(), 1
        if kind < 0.15 and channels > 3:
            groups, features = channels, channels * rng.choice((1, 1, 1, 2))
        elif kind < 0.3:
            groups = rng.choice((2, 3, 4, 8, 16, 32))
        transposed = groups == dilation == 1 and rng.random() < 0.12
        if channels % groups or features % groups:
            continue
        inner, outer = (features, channels) if transposed else (channels, features)
        x, w = (batch, channels, *size), (outer, inner // groups, *kernel)
        try:
            win = Window((stride,) * rank, (dilation,) * rank, pads, pads, groups)
            layer = ConvSpec.layer(x, w, win, transposed=transposed)
        except ValueError:  # the kernel does not fit
            continue
        most = max(math.prod(layer.shape(name)) for name in ("input", "output"))
        if layer.multiplications in MULTIPLICATIONS and most < LARGEST:
            yield layer


def _each(rng: random.Random, rank: int, options: tuple[int, ...], alike: float) -> tuple[int, ...]:
    """Draw a size for every axis; with probability `alike` the same for all."""
    drawn = tuple(rng.choice(options) for _ in range(rank))
    return (drawn[0],) * rank if rng.random() < alike else drawn
