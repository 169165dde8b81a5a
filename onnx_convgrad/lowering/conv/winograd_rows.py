"""Winograd's minimal filtering along the first spatial axis, and a plain Conv along the others.

Filtering all axes (`winograd`) saves most multiplications, but reorders both operands twice: on processors whose cores share
no cache, waiting for values that other cores wrote takes as long as the products do. Along the first axis alone the samples
stay in place, so that each core continues with the values that it wrote itself::

    X[n, p, c, tile, ..] = sum over r of B[p, r] x[n, c, step tile + r, ..]       a Conv of [n, 1, c, rows, ..]
    Y[n, p] = Conv of X[n, p] with sum over k of G[p, k] w[.., k, ..]             one Conv, the points as groups
    y[n, o, step tile + r, ..] = sum over p of A[r, p] Y[n, p, o, tile, ..]       one product

with `m + k - 1` points for the `m k` multiplications of m rows and k taps, and rounding errors of a single axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir import geometry
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.ir.samples import cut_samples, filled, with_samples
from onnx_convgrad.lowering.conv.both_ways import Images
from onnx_convgrad.lowering.conv.kernels import plain_conv, reverse_taps
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    not_empty,
    static_groups,
    static_kernel,
    static_sizes,
    unit_stride,
)
from onnx_convgrad.lowering.conv.winograd import declare
from onnx_convgrad.lowering.conv.winograd_axes import MOST, TiledAxis, Triple, matrices, tiled
from onnx_convgrad.lowering.table import Query, Requirement, needs

# -- requirements ------------------------------------------------------------------------------------------------------


other_axes = needs(lambda s: s.rank > 1, "there is one axis, along which a runtime copies single elements")


def filtered_axis(q: Query) -> str | None:
    """The first axis has taps to save, next to each other."""
    taps, stride, dilation = q.spec.kernel[0] or 1, q.spec.strides[0], q.spec.dilations[0]
    if taps == 1:
        return "the kernel has one row"
    if taps >= MOST:
        return f"a kernel of {taps} rows needs more than {MOST} points"
    return None if stride == dilation == 1 else f"the stride and dilation of the rows are {stride} and {dilation}"


def rows_padded(backward: bool) -> Requirement:
    """No rows are cut off: the Conv that cuts tiles also pads them."""

    def requirement(q: Query) -> str | None:
        win = q.spec.back_window if backward else q.spec.window
        begin, end = win.begin[0], win.end[0]
        return None if min(begin, end) >= 0 else f"the rows are padded by {begin} and {end}, which cuts some off"

    return requirement


REQUIRES = [not_empty, conv_kernel, static_kernel, static_sizes, static_groups, other_axes, filtered_axis]

# -- the convolution ---------------------------------------------------------------------------------------------------


def _axes(spec: ConvSpec, *, backward: bool) -> tuple[geometry.Axis, ...]:
    return spec.back_axes if backward else spec.axes


def _cut(spec: ConvSpec, most: int, *, backward: bool) -> list[TiledAxis]:
    first = _axes(spec, backward=backward)[0]
    return [tiled(first.y, first.kernel, 1, most)]


def _forms(spec: ConvSpec, most: int, *, backward: bool) -> list[Triple]:
    return [matrices(axis.tile, axis.taps) for axis in _cut(spec, most, backward=backward)]


def _filtered(e: Emitter, n: Call, spec: ConvSpec, most: int, *, backward: bool) -> ir.Value:
    """The convolution, of dY with the reversed kernel for dX, its first axis cut into tiles."""
    images = Images(e, n, spec, backward)
    win = spec.back_window if backward else spec.window
    first, *inner = _axes(spec, backward=backward)
    (batch, channels, *_), features = images.have, images.want[1]
    width_read, width = math.prod(at.x for at in inner), math.prod(at.y for at in inner)
    w = reverse_taps(e, images.w, spec) if backward else images.w
    (axis,) = _cut(spec, most, backward=backward)
    a, g, b = matrices(axis.tile, axis.taps)
    points, rows = b.shape
    count = -(-first.y // axis.tile)
    samples = filled(e, batch)
    w = _kernel(e, w, g, features, e.size_div(channels, win.group), [at.kernel for at in inner])
    x = e.reshape(with_samples(e, images.v, images.have), [samples, 1, channels, first.x, width_read])
    begin = win.begin[0]
    end = (count - 1) * axis.tile + rows - first.x - begin
    tiles = Window((1, axis.tile, 1), (1, 1, 1), (0, begin, 0), (0, end, 0), 1)
    x = plain_conv(e, x, e.const(b.reshape(points, 1, 1, rows, 1), x.dtype), tiles)

    along = Window(
        (1, *win.strides[1:]), (1, *win.dilations[1:]), (0, *win.begin[1:]), (0, *win.end[1:]), points * win.group
    )
    x = e.reshape(x, [samples, e.size_mul(points, channels), count, *(at.x for at in inner)])
    y = plain_conv(e, x, w, along)

    lines = e.size_mul(features, count)
    y = e.matmul(e.const(a, y.dtype), e.reshape(y, [samples, points, e.size_mul(lines, width)]))
    y = e.transpose(e.reshape(y, [samples, axis.tile, lines, width]), [0, 2, 1, 3])
    y = e.reshape(y, [samples, features, count * axis.tile, *(at.y for at in inner)])
    if count * axis.tile > first.y:
        y = e.slice(y, [0], [first.y], [2])
    return biased(e, cut_samples(e, y, batch), images.bias, spec.rank)


def _kernel(e: Emitter, w: ir.Value, g: np.ndarray, features: Dim, channels: Dim, along: Sequence[int]) -> ir.Value:
    """w [O, C / g, k, *along] by G [points, k] along its first axis: [points O, C / g, 1, *along]."""
    points, taps = g.shape
    flat = e.reshape(w, [e.size_mul(features, channels), taps, math.prod(along)])
    flat = e.reshape(e.transpose(flat, [1, 0, 2]), [taps, e.size_mul(features, channels, *along)])
    return e.reshape(e.matmul(e.const(g, w.dtype), flat), [e.size_mul(points, features), channels, 1, *along])


for _op_type, _backward in (("Conv", False), ("ConvInputGrad", True)):
    declare(
        _op_type,
        "winograd_rows",
        "along the first axis alone",
        partial(_filtered, backward=_backward),
        partial(_cut, backward=_backward),
        partial(_forms, backward=_backward),
        [*REQUIRES, *([unit_stride] if _backward else []), rows_padded(_backward)],
    )
