"""Draw random convolution layers from sizes that occur in networks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from benchmarks.shapes import Case
from onnx_convgrad.bench.layer import ConvLayer

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


def _drawn(rng: random.Random) -> Iterator[ConvLayer]:
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
        layer = ConvLayer(x, w, (stride,) * rank, (dilation,) * rank, pads, pads, groups, transposed)
        if min(layer.y) < 1:
            continue
        points = math.prod(layer.x[2:] if transposed else layer.y[2:])
        if batch * points * math.prod(w) in MULTIPLICATIONS and max(map(math.prod, (layer.x, layer.y))) < LARGEST:
            yield layer


def _each(rng: random.Random, rank: int, options: tuple[int, ...], alike: float) -> tuple[int, ...]:
    """Draw a size for every axis; with probability `alike` the same for all."""
    drawn = tuple(rng.choice(options) for _ in range(rank))
    return (drawn[0],) * rank if rng.random() < alike else drawn
