"""Sums of float16 per channel as products with a vector of ones, which add up in float32 at the speed of memory.

A target with `fast_halves` computes them so. The entries of the vector are 1 / sqrt(P) for sums of P entries: sums of
entries of random signs then have the magnitude of one entry, as far as possible from both ends of the narrow range.
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


def channel_sum(e: Emitter, x: ir.Value, factor: float = 1) -> ir.Value:
    """The sum of x [N, C, ...] over all axes but the channels, times a factor: [C], in float32."""
    _, channels, *sizes = (d or 1 for d in static_dims(x) or ())
    points = math.prod(sizes)
    share = 2.0 ** -round(math.log2(points) / 2)
    ones = e.const(np.full((points, 1), share), x.dtype or ir.DataType.FLOAT16)
    each = e.matmul(e.reshape(x, [-1, points]), ones)
    rows = e.reshape(e.cast(each, ir.DataType.FLOAT), [-1, channels])
    return e.mul(e.reduce_sum(rows, [0], keepdims=False), factor / share)


def channel_mean(e: Emitter, x: ir.Value) -> ir.Value:
    """The mean of x [N, C, ...] over all axes but the channels: [C], in float32."""
    batch, _, *sizes = e.dims(x)
    count = e.size_mul(batch, *sizes)
    if isinstance(count, int):
        return channel_sum(e, x, 1 / max(count, 1))
    total = channel_sum(e, x)
    return e.div(total, e.size_as(count, total))
