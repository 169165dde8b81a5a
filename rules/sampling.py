"""Interpolation at positions that are data: GridSample, AffineGrid, which computes such positions, and DeformConv.

GridSample and DeformConv are expanded to one gather of the taps around each position, with one weight per tap, a product
over the axes. The walk derives the gradients of any order: a scatter for X, and the product rule over the weights for the
positions.

As in PyTorch, a point at the border of the image, or beyond it, does not move what it reads with border and reflection
padding: its slope is 0. Taps outside of the image read an element 0 that is appended to the image. A mask would multiply
the weights of infinite coordinates, which are NaN, and the NaN would reach the gradient of X.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import having, mix, notation
from onnx_convgrad.autodiff.registry import expansion, linear
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import biased, window
from onnx_convgrad.ir.emit import Dim, Emitter, known

_CUBIC = -0.75
"""The parameter a of cubic convolution."""

Tap = tuple[ir.Value, ir.Value | None]
"""Indices on one axis, int64 [N, 1, P], and their weights; `None` stands for 1."""


def _averaged(n: Call) -> Mapping[str, str]:
    """Weights of cubic interpolation may be negative."""
    return {} if n.string("mode", "linear") in ("cubic", "bicubic") else {"X": "rising"}


@expansion(
    "GridSample",
    wrt=("X", "grid"),
    factors=notation("n c *s, n *p k -> n c *p", s=mix("samples along"), k=mix("reads coordinates along")),
    affine=("X",),
    monotone=_averaged,
)
def grid_sample(e: Emitter, n: Call) -> ir.Value:
    """y[n, c, p] = sum over t of w_t(grid[n, p]) x[n, c, i_t(grid[n, p])]."""
    x, grid = n["X"], n["grid"]
    same = None in (x.dtype, grid.dtype) or x.dtype == grid.dtype
    require(same, "its data and its grid have different dtypes.", "Cast one of them to the dtype of the other.")
    cubic = n.string("mode", "linear") in ("cubic", "bicubic")  # defined for two axes only
    rank = 2 if cubic else e.rank(x if x.shape is not None else grid) - 2
    sizes = [e.dim(x, 2 + axis) for axis in range(rank)]
    points = [e.dim(grid, 1 + axis) for axis in range(rank)]
    count = e.size_mul(*points)
    batch, channels = e.dim(x, 0), e.dim(x, 1)
    taps = []
    for axis in range(rank):  # the last coordinate of the grid is that of the first spatial axis
        column = e.op("Gather", grid, e.const(np.int64(rank - 1 - axis)), axis=rank + 1)
        at = _denormalize(e, n, e.wide(e.reshape(column, [batch, 1, count])), sizes[axis])
        taps.append(_taps_at(e, n, at, sizes[axis]))
    zeros = n.string("padding_mode", "zeros") == "zeros"
    flat = e.reshape(x, [batch, channels, e.size_mul(*sizes)])
    values = _interpolated(e, flat, sizes, taps, count, zeros=zeros)
    return e.typed(e.reshape(values, [batch, channels, *points]), n.y)


def _interpolated(
    e: Emitter, flat: ir.Value, sizes: Sequence[Dim], taps: Sequence[Sequence[Tap]], count: Dim, *, zeros: bool
) -> ir.Value:
    """The values of images [N, C, prod(sizes)] at `count` points: `[N, C, count]`. `taps` lists the taps of each axis.

    With `zeros`, taps may lie outside of the image, where it is 0.
    """
    batch, channels = e.dim(flat, 0), e.dim(flat, 1)
    end = e.size_mul(*sizes)
    places, weights = [], []
    for combination in itertools.product(*taps):
        place, weight = combination[0]
        for (index, factor), size in zip(combination[1:], sizes[1:], strict=True):
            place = e.op("Add", e.op("Mul", place, e.vector([size])), index)
            weight = factor if weight is None else weight if factor is None else e.mul(weight, factor)
        if zeros:
            inside = [_inside(e, index, size) for (index, _), size in zip(combination, sizes, strict=True)]
            place = e.op("Where", reduce(partial(e.op, "And"), inside), place, e.vector([end]))
        places.append(place)
        weights.append(weight)
    if zeros:
        flat = e.pad(flat, [0], [1], [2])
    every = e.op("Expand", e.concat(places, 2), e.vector([batch, channels, e.size_mul(count, len(places))]))
    values = e.op("GatherElements", flat, every, axis=2)
    kept = [w for w in weights if w is not None]
    if kept:
        values = e.mul(values, e.cast_like(e.concat(kept, 2), values))
    if len(places) > 1:
        values = e.reduce_sum(e.reshape(values, [batch, channels, len(places), count]), [2], keepdims=False)
    return values


def _inside(e: Emitter, index: ir.Value, size: Dim) -> ir.Value:
    return e.op("And", e.compare("GreaterOrEqual", index, e.ints([0])), e.compare("Less", index, e.vector([size])))


def _taps_at(e: Emitter, n: Call, at: ir.Value, size: Dim) -> list[Tap]:
    """The taps on an axis of that `size` for points at the fractional indices `at`."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(name := n.string("mode", "linear"), name)
    if mode == "nearest":
        return [(e.cast(_moved_inside(e, n, e.op("Round", at), size), ir.DataType.INT64), None)]
    if mode == "linear":
        at = _moved_inside(e, n, at, size)
    base = e.op("Floor", at)
    part = e.sub(at, base)
    if mode == "linear":
        first = e.cast(base, ir.DataType.INT64)
        second = e.op("Add", first, e.ints([1]))
        if n.string("padding_mode", "zeros") != "zeros":  # its weight is 0 at the last element
            second = e.op("Min", second, e.vector([e.size_sub(size, 1)]))
        return [(first, e.sub(1, part)), (second, part)]
    rest = e.sub(1, part)
    weights = {-1: _far(e, e.add(part, 1)), 0: _near(e, part), 1: _near(e, rest), 2: _far(e, e.add(rest, 1))}
    return [
        (e.cast(_moved_inside(e, n, e.add(base, k), size), ir.DataType.INT64), weight) for k, weight in weights.items()
    ]


def _denormalize(e: Emitter, n: Call, coordinate: ir.Value, size: Dim) -> ir.Value:
    """[-1, 1] onto [0, L - 1] with `align_corners`, else onto [-1/2, L - 1/2]."""
    length = e.size_as(size, coordinate)
    shifted = e.add(coordinate, 1)
    if n.int("align_corners", 0):
        return e.mul(e.div(shifted, 2), e.sub(length, 1))
    return e.div(e.sub(e.mul(shifted, length), 1), 2)


def _near(e: Emitter, t: ir.Value) -> ir.Value:
    """Cubic convolution (Keys 1981) for a distance t <= 1: ((a + 2) t - (a + 3)) t^2 + 1."""
    return e.add(e.mul(e.mul(e.sub(e.mul(t, _CUBIC + 2), _CUBIC + 3), t), t), 1)


def _far(e: Emitter, t: ir.Value) -> ir.Value:
    """Cubic convolution for 1 <= t <= 2: ((a t - 5 a) t + 8 a) t - 4 a."""
    inner = e.mul(e.sub(e.mul(t, _CUBIC), 5 * _CUBIC), t)
    return e.sub(e.mul(e.add(inner, 8 * _CUBIC), t), 4 * _CUBIC)


def _moved_inside(e: Emitter, n: Call, at: ir.Value, size: Dim) -> ir.Value:
    """Move fractional indices into the axis according to `padding_mode`; zero padding leaves them where they are.

    Those that are moved to the first or last element, or are there, get no derivative. NaN becomes 0.
    """
    mode = n.string("padding_mode", "zeros")
    if mode == "zeros":
        return at
    last = e.sub(e.size_as(size, at), 1)
    if mode == "reflection":
        shift = 0.0 if n.int("align_corners", 0) else 0.5  # reflected at -shift and at last + shift
        period = e.mul(e.add(last, 2 * shift), 2)
        distance = e.op("Abs", e.add(at, shift))
        ahead = e.sub(distance, e.mul(e.op("Floor", e.div(distance, period)), period))
        at = e.sub(e.op("Min", ahead, e.sub(period, ahead)), shift)
    beyond = e.compare("Greater", at, 0)
    inner = e.op("And", beyond, e.compare("Less", at, last))
    return e.where(inner, at, e.where(beyond, last, 0))


_POINTS = notation("n k j -> n *p k", p=mix("makes points along"), j=mix("transforms along"))


@linear("AffineGrid", wrt="theta", factors=having(_POINTS, counts_all=True))
def affine_grid_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[n, p, k] = sum over j of theta[n, k, j] b[p, j]: dtheta[n, k, j] = sum over p of g[n, p, k] b[p, j].

    b[p] = (x, y, 1), where (x, y) is the result of the operator for theta = identity.
    """
    theta, gy, size = n["theta"], g["grid"], n["size"]
    rank = known(theta.shape[1]) if theta.shape is not None else None
    rank = rank or e.rank(gy) - 2
    one = e.const(np.eye(rank, rank + 1)[None], theta.dtype)
    inner = e.op("Slice", size, e.ints([1]), e.ints([rank + 2]), e.ints([0]))
    single = e.op("Concat", e.ints([1]), inner, axis=0)
    places = e.op("AffineGrid", one, single, align_corners=n.int("align_corners", 0))
    positions = e.op("Reshape", places, e.ints([-1, rank]))
    homogeneous = e.op("Pad", positions, e.ints([0, 0, 0, 1]), e.scalar(1, theta))
    rows = e.op("Reshape", gy, e.vector([e.dim(theta, 0), -1, rank]), allowzero=None)
    return e.typed(e.matmul(e.op("Transpose", rows, perm=[0, 2, 1]), homogeneous), theta)


# -- DeformConv --------------------------------------------------------------------------------------------------------


_MIXED = dict.fromkeys("ckdmst", mix("convolves along"))


@expansion(
    "DeformConv",
    wrt=("X", "W", "offset", "B", "mask"),
    parameters=("W", "B"),
    affine=("X B", "W B", "mask B"),
    factors=notation("n c *s, o k *t, n d *p, o, n m *p -> n o *p", broadcasts=False, **_MIXED),
)
def deform_conv(e: Emitter, n: Call) -> ir.Value:
    """y[n, o, p] = b[o] + sum over c, k of w[o, c, k] m[n, k, p] x[n, c, s p + d k - b + offset[n, k, p]].

    Dai et al. 2017, arXiv:1703.06211; with a mask Zhu et al. 2018, arXiv:1811.11168.
    """
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
        places.append(_taps_at(e, n, at, sizes[axis]))
    flat = e.reshape(x, [images, e.size_div(e.dim(x, 1), shares), e.size_mul(*sizes)])
    pixels = _interpolated(e, flat, sizes, places, reads, zeros=True)
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
    along = [-1 if a == axis else 1 for a in range(rank)]
    if isinstance(size, int) and taps * size <= _LISTED:
        return e.const(steps + (np.arange(size) * stride).reshape(along), like.dtype)
    ramp = e.reshape(e.cast(e.arange(size), like.dtype or ir.DataType.FLOAT), along)
    return e.add(e.mul(ramp, stride), e.const(steps, like.dtype))
