"""Deformable convolution (Dai et al. 2017, arXiv:1703.06211; with a mask Zhu et al. 2018, arXiv:1811.11168).

    y[n, o, p] = sum over c, k of w[o, c, k] m[n, k, p] x[n, c, s p + d k - b + offset[n, k, p]]

with x interpolated linearly between its pixels, and zero outside. The expansion gathers the pixels of all taps k and
windows p, as GridSample does, and multiplies them by the weight in one matrix product.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import mix, notation
from onnx_convgrad.autodiff.registry import expansion
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import biased, window
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.rules.grid_sample import interpolated, taps_at

_CONVOLVES = mix("convolves along")


@expansion(
    "DeformConv",
    wrt=("X", "W", "offset", "B", "mask"),
    parameters=("W", "B"),
    affine=("X B", "W B", "mask B"),
    factors=notation(
        "n c *s, o k *t, n d *p, o, n m *p -> n o *p",
        broadcasts=False,
        **dict.fromkeys("ckdmst", _CONVOLVES),
    ),
)
def deform_conv(e: Emitter, n: Call) -> ir.Value:
    """y[n, o, p] = sum over c, k of w[o, c, k] pixels[n, c, k, p] + b[o]."""
    x, w, offset = n["X"], n["W"], n["offset"]
    kernel = _kernel(e, n)
    taps, groups = math.prod(kernel), n.int("group", 1)
    batch, channels, filters = e.dim(x, 0), e.dim(x, 1), e.dim(w, 0)
    points = [e.dim(offset, 2 + axis) for axis in range(len(kernel))]
    columns = [batch, groups, e.size_mul(e.size_div(channels, groups), taps), e.size_mul(*points)]
    pixels = e.reshape(_pixels(e, n, kernel, points), columns)
    weight = e.reshape(w, [1, groups, e.size_div(filters, groups), e.size_mul(e.dim(w, 1), taps)])
    y = e.reshape(e.matmul(weight, pixels), [batch, filters, *points])
    return e.typed(biased(e, y, n.get("B"), len(kernel)), n.y)


def _pixels(e: Emitter, n: Call, kernel: list[int], points: list[Dim]) -> ir.Value:
    """m x for all taps of all windows: `[batch * offset groups, channels / offset groups, taps * points]`."""
    x, offset, mask = n["X"], n["offset"], n.get("mask")
    rank, taps, shares = len(kernel), math.prod(kernel), n.int("offset_group", 1)
    sizes = [e.dim(x, 2 + axis) for axis in range(rank)]
    images, reads = e.size_mul(e.dim(x, 0), shares), e.size_mul(taps, *points)
    moved = e.reshape(e.wide(offset), [images, taps, rank, *points])
    places = []
    for axis in range(rank):
        shift = e.op("Gather", moved, e.const(np.int64(axis)), axis=2)
        at = e.reshape(e.add(shift, _window(e, n, axis, kernel, points, moved)), [images, 1, reads])
        places.append(taps_at(e, n, at, sizes[axis]))
    flat = e.reshape(x, [images, e.size_div(e.dim(x, 1), shares), e.size_mul(*sizes)])
    pixels = interpolated(e, flat, sizes, places, reads, zeros=True)
    return pixels if mask is None else e.mul(pixels, e.reshape(mask, [images, 1, reads]))


def _kernel(e: Emitter, n: Call) -> list[int]:
    declared = n.ints("kernel_shape")
    sizes = declared if declared is not None else [e.dim(n["W"], axis) for axis in range(2, e.rank(n["W"]))]
    kernel = [size for size in sizes if isinstance(size, int)]
    require(len(kernel) == len(sizes), "the shape of its kernel is not known while building.")
    return kernel


_LISTED = 2**22
"""Most positions of taps that one constant holds."""


def _window(e: Emitter, n: Call, axis: int, kernel: list[int], points: list[Dim], like: ir.Value) -> ir.Value:
    """Positions of the taps on one axis without offsets, to be broadcast to `[taps, *points]`."""
    rank = len(kernel)
    win = window(n, rank)
    stride, dilation, begin = win.strides[axis], win.dilations[axis], win.begin[axis]
    taps = math.prod(kernel)
    e.check_bytes(8 * taps * rank, f"The offsets of {taps:,} taps")
    steps = np.indices(kernel)[axis].reshape(-1, *[1] * rank) * dilation - begin
    size = points[axis]
    if isinstance(size, int) and taps * size <= _LISTED:
        starts = (np.arange(size) * stride).reshape([-1 if a == axis else 1 for a in range(rank)])
        return e.const(steps + starts, like.dtype)
    ramp = e.reshape(
        e.cast(e.arange(size), like.dtype or ir.DataType.FLOAT), [-1 if a == axis else 1 for a in range(rank)]
    )
    return e.add(e.mul(ramp, stride), e.const(steps, like.dtype))
