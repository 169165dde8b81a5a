"""Winograd's minimal filtering along the first spatial axis, and a plain Conv along the others.

Filtering all axes (`conv_winograd`) saves most multiplications, and moves both operands twice into another order: on
processors whose cores share no cache, waiting for what other cores wrote takes as long as the products do. Along the first
axis alone the samples stay where they are, so that each core goes on with what it wrote itself::

    X[n, p, c, tile, ..] = sum over r of B[p, r] x[n, c, step tile + r, ..]       a Conv of [n, 1, c, rows, ..]
    Y[n, p] = Conv of X[n, p] with sum over k of G[p, k] w[.., k, ..]             one Conv, the points as groups
    y[n, o, step tile + r, ..] = sum over p of A[r, p] Y[n, p, o, tile, ..]       one product

with `m + k - 1` points for the `m k` multiplications of m rows and k taps, and rounding errors of a single axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import Window, biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.samples import filled, may_be_empty, with_samples
from onnx_convgrad.lowering.conv.kernels import back_padding, plain_conv, turned
from onnx_convgrad.lowering.conv.shared import (
    conv_kernel,
    features_of,
    not_empty,
    static_groups,
    static_kernel,
    static_sizes,
    unit_stride,
    window,
    x_dims,
    y_dims,
)
from onnx_convgrad.lowering.conv.winograd import declare
from onnx_convgrad.lowering.conv.winograd_axes import MOST, Axis, matrices, tiled
from onnx_convgrad.lowering.table import Query

# -- requirements ------------------------------------------------------------------------------------------------------


def several_axes(q: Query) -> str | None:
    return None if q.spec.rank > 1 else "there is one axis, along which a runtime copies single elements"


def filtered_axis(q: Query) -> str | None:
    """The first axis has taps to save, next to each other."""
    taps, stride, dilation = q.spec.kernel[0] or 1, q.spec.strides[0], q.spec.dilations[0]
    if taps == 1:
        return "the kernel has one row"
    if taps >= MOST:
        return f"a kernel of {taps} rows needs more than {MOST} points"
    return None if stride == dilation == 1 else f"the stride and dilation of the rows are {stride} and {dilation}"


def rows_padded(q: Query) -> str | None:
    return _padded(q.spec.begin[0], q.spec.end[0])


def rows_padded_back(q: Query) -> str | None:
    begin, end = back_padding(q.spec)
    return _padded(begin[0], end[0])


def _padded(begin: int, end: int) -> str | None:
    return None if min(begin, end) >= 0 else f"the rows are padded by {begin} and {end}, which cuts some off"


REQUIRES = [not_empty, conv_kernel, static_kernel, static_sizes, static_groups, several_axes, filtered_axis]

# -- the convolution ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a value [N, C, *rows]."""

    channels: Dim
    rows: Sequence[int]

    @property
    def other(self) -> int:
        """Points along all axes but the first."""
        return math.prod(self.rows[1:])


def filtered(
    e: Emitter,
    x: ir.Value,
    w: ir.Value,
    batch: Dim,
    read: Sizes,
    written: Sizes,
    kernel: Sequence[int],
    win: Window,
    axis: Axis,
) -> ir.Value:
    """The convolution of x [N, C, *rows] with w [O, C / g, *kernel], its first axis cut into tiles."""
    a, g, b = matrices(axis.tile, axis.taps)
    points, rows = b.shape
    count = -(-written.rows[0] // axis.tile)
    n = filled(e, batch)
    w = _kernel(e, w, g, written.channels, e.size_div(read.channels, win.group), kernel[1:])
    x = e.reshape(
        with_samples(e, x, [batch, read.channels, *read.rows]), [n, 1, read.channels, read.rows[0], read.other]
    )
    begin = win.begin[0]
    end = (count - 1) * axis.tile + rows - read.rows[0] - begin
    tiles = Window((1, axis.tile, 1), (1, 1, 1), (0, begin, 0), (0, end, 0), 1)
    x = plain_conv(e, x, e.const(b.reshape(points, 1, 1, rows, 1), x.dtype), tiles)

    along = Window(
        (1, *win.strides[1:]), (1, *win.dilations[1:]), (0, *win.begin[1:]), (0, *win.end[1:]), points * win.group
    )
    x = e.reshape(x, [n, e.size_mul(points, read.channels), count, *read.rows[1:]])
    y = plain_conv(e, x, w, along)

    lines = e.size_mul(written.channels, count)
    y = e.matmul(e.const(a, y.dtype), e.reshape(y, [n, points, e.size_mul(lines, written.other)]))
    y = e.transpose(e.reshape(y, [n, axis.tile, lines, written.other]), [0, 2, 1, 3])
    y = e.reshape(y, [n, written.channels, count * axis.tile, *written.rows[1:]])
    if count * axis.tile > written.rows[0]:
        y = e.slice(y, [0], [written.rows[0]], [2])
    return e.slice(y, [0], [batch], [0]) if may_be_empty(e, batch) else y


def _kernel(e: Emitter, w: ir.Value, g: np.ndarray, features: Dim, channels: Dim, along: Sequence[int]) -> ir.Value:
    """w [O, C / g, k, *along] by G [points, k] along its first axis: [points O, C / g, 1, *along]."""
    points, taps = g.shape
    flat = e.reshape(w, [e.size_mul(features, channels), taps, math.prod(along)])
    flat = e.reshape(e.transpose(flat, [1, 0, 2]), [taps, e.size_mul(features, channels, *along)])
    return e.reshape(e.matmul(e.const(g, w.dtype), flat), [e.size_mul(points, features), channels, 1, *along])


def forward(e: Emitter, n: Call, spec: ConvSpec, most: int) -> ir.Value:
    x, w = n["X"], n["W"]
    batch, channels = x_dims(e, x, spec)[:2]
    read, written = Sizes(channels, _known(spec.x)), Sizes(features_of(e, w, spec), _known(spec.y))
    y = filtered(e, x, w, batch, read, written, _known(spec.kernel), window(spec), _axis(spec.y, spec, most))
    return biased(e, y, n.get("B"), spec.rank)


def input_grad(e: Emitter, n: Call, spec: ConvSpec, most: int) -> ir.Value:
    """The convolution of dY with the kernel turned around."""
    dy = n["dY"]
    batch, features = y_dims(e, dy, spec)[:2]
    read, written = Sizes(features, _known(spec.y)), Sizes(x_dims(e, n["X_like"], spec)[1], _known(spec.x))
    back = window(spec).padded(*back_padding(spec))
    w = turned(e, n["W"], spec)
    return filtered(e, dy, w, batch, read, written, _known(spec.kernel), back, _axis(spec.x, spec, most))


def _known(sizes: Sequence[int | None]) -> list[int]:
    return [size or 0 for size in sizes]


def _axis(sizes: Sequence[int | None], spec: ConvSpec, most: int) -> Axis:
    return tiled(sizes[0], spec.kernel[0] or 1, 1, most)


# -- the lowerings -----------------------------------------------------------------------------------------------------


_WHERE = "along the first axis alone"

declare(
    "Conv", "winograd_rows", _WHERE, forward, lambda spec, most: [_axis(spec.y, spec, most)], [*REQUIRES, rows_padded]
)
declare(
    "ConvInputGrad",
    "winograd_rows",
    _WHERE,
    input_grad,
    lambda spec, most: [_axis(spec.x, spec, most)],
    [*REQUIRES, unit_stride, rows_padded_back],
)
