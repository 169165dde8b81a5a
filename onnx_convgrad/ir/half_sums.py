"""Sums of float16 per channel as matrix products, which add up in float32 at the speed of memory.

A target with `fast_halves` computes them so: sums of x with a vector of ones, and sums of x y as the diagonals of products
of few rows of x with the same rows of y, whose other entries cost less than the passes that they save. Sums of P entries
are scaled by 1 / sqrt(P): if the signs are random they have the magnitude of one entry, as far as possible from both ends
of the narrow range.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter, static_dims


def sums_halves(e: Emitter, x: ir.Value) -> bool:
    """Whether `channel_sum` takes x: float16 of known positive sizes behind the channels, on a target made for it."""
    sizes = static_dims(x)
    return (
        e.target.fast_halves
        and x.dtype == ir.DataType.FLOAT16
        and sizes is not None
        and len(sizes) > 2
        and all(sizes[1:])
    )


def channel_sum(e: Emitter, x: ir.Value, *, mean: bool = False) -> ir.Value:
    """The sum of x [N, C, ...] over all axes but the channels, or the mean: [C], in float32."""
    points = _rows(x)[1]
    share = 2.0 ** -round(math.log2(points) / 2)
    ones = e.const(np.full((points, 1), share), x.dtype or ir.DataType.FLOAT16)
    return _over_samples(e, e.matmul(e.reshape(x, [-1, points]), ones), x, share, mean=mean)


def multiplies_rows(e: Emitter, x: ir.Value) -> bool:
    """Whether products of rows are the fastest way to sums of products: `channel_sum` takes x, and its rows are long."""
    if not sums_halves(e, x):
        return False
    channels, points = _rows(x)
    return points >= _LONG_ROW and points % _WORD == 0 and _side(channels) >= min(channels, _NARROWEST)


def channel_products(e: Emitter, x: ir.Value, y: ir.Value, *, mean: bool = False) -> ir.Value:
    """The sum of x y, both [N, C, ...], over all axes but the channels, or the mean: [C], in float32.

    For a mean the sums of P entries are scaled by 1 / P, since it may be one of squares.
    """
    if not multiplies_rows(e, x):
        return channel_sum(e, e.mul(x, y), mean=mean)
    channels, points = _rows(x)
    share = 2.0 ** -round(math.log2(points) / (1 if mean else 2))
    side = _side(channels)
    left, right = (e.reshape(v, [-1, side, points]) for v in (x, y))
    product = e.matmul(e.mul(left, share), e.swap_last(right))  # the runtime fuses the factor and the transposition
    diagonal = e.const(np.arange(side) * (side + 1))
    each = e.gather(e.reshape(product, [-1, side * side]), diagonal, axis=1)
    return _over_samples(e, each, x, share, mean=mean)


_LONG_ROW = 128
"""Smallest number of points of an image for which products of rows are faster than a pass and a product with ones.

On an H100, in float16, microseconds of both for a batch of 64: 64 channels of 56 x 56 10 and 40, 512 of 7 x 7 31 and 8.
"""

_WORD = 4
"""Number that must divide the length of a row: the kernels for other rows are slow."""

_SIDE = 64
"""Most rows of a product: with more, it waits for its multiplications instead of memory.

For a batch of 64 images of 56 x 56, an H100 takes 9.5 microseconds for 64 channels and 50 for 256 channels in one product.
"""

_NARROWEST = 16
"""Fewest rows of a product if there are more channels: the tiles of a GPU hold as many."""


def _rows(x: ir.Value) -> tuple[int, int]:
    """Channels and points per channel."""
    _, channels, *sizes = (d or 1 for d in static_dims(x) or ())
    return channels, math.prod(sizes)


def _side(channels: int) -> int:
    """The largest divisor of the number of channels up to `_SIDE`."""
    return max(d for d in range(1, _SIDE + 1) if channels % d == 0)


def _over_samples(e: Emitter, each: ir.Value, x: ir.Value, share: float, *, mean: bool) -> ir.Value:
    """The sum or mean over the samples and points of x, of `share` times the sum of each row."""
    channels, points = _rows(x)
    rows = e.reshape(e.cast(each, ir.DataType.FLOAT), [-1, channels])
    total = e.reduce("ReduceMean" if mean else "ReduceSum", rows, [0], keepdims=False)
    return e.mul(total, 1 / (share * points) if mean else 1 / share)
