"""The weight gradient of depthwise convolutions, as dot products of shifted rows that overlap in memory.

Per channel, dw[t] = sum over n, p of x[n, s p + d t - b] dy[n, p]: a correlation at a few lags. With padding in place, a
shift in several dimensions is a shift of the flattened rows, so each lag is a dot product of two long vectors. ONNX
Runtime's Conv takes them without a copy: where the kernel is as wide as its input, the windows are the rows of a matrix
whose rows overlap in memory (`MlasConvPrepare`, "using the entire input width"), and four windows at a fixed step take the
time of one, which is that of reading. The lowerings differ in how the flattened rows get their padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import Axis, ConvSpec
from onnx_convgrad.ir.samples import filled, with_samples
from onnx_convgrad.lowering.conv.layout import extend, transpose_by_product
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    known_batch,
    known_features,
    not_empty,
    one_per_group,
    overlapping_windows,
    static_sizes,
    unit_stride,
)
from onnx_convgrad.lowering.table import lowering, needs

one_channel = needs(lambda s: s.groups == s.channels, "a group has several channels, or an unknown number")

_STATIC = [not_empty, conv_kernel, overlapping_windows, one_channel, known_features, static_sizes]


def _taps(axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a.kernel) for a in axes)))


def _pitches(sizes: Sequence[int]) -> list[int]:
    """Distances in memory of neighbors along each axis of a grid."""
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _four(windows: int) -> int:
    """The number of windows to compute: four are multiplied at a time, else two or one, so a fourth costs nothing."""
    return windows + 1 if windows % 4 == 3 else windows


def _slide(
    e: Emitter, data: ir.Value, kernel: ir.Value, groups: int, features: int, size: tuple[int, Dim, int]
) -> ir.Value:
    """out[f, m] = sum over q of data[g(f), q + m step] kernel[f, q], as [1, features, windows, 1].

    For `size` height, step, windows: the kernel has that many rows of `step` elements, the data `windows - 1` more rows.
    """
    height, step, windows = size
    data = e.reshape(data, [1, groups, height + windows - 1, step])
    kernel = e.reshape(kernel, [features, 1, height, step])
    return e.op("Conv", data, kernel, group=groups)


# -- unit stride: x as it lies in memory -------------------------------------------------------------------------------


@lowering("ConvWeightGrad", "masked_windows", requires=[*_STATIC, one_per_group, unit_stride, known_batch])
def masked_windows(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: one Conv per kernel column, with x as kernel and dy shifted, less the points that a shift would wrap."""
    rows, *inner = spec.axes
    lead = (spec.batch or 0) * spec.groups
    grid = [max(a.x, a.y) for a in inner]  # both operands get the same pitch
    pitch = math.prod(grid)
    x = _on_grid(e, n["X"], [lead, rows.x, *(a.x for a in inner)], grid)
    dy = _on_grid(e, n["dY"], [lead, rows.y, *(a.y for a in inner)], grid)
    height = -(-rows.x // rows.dilation)
    x = extend(e, x, [lead, rows.x * pitch], 1, 0, (height * rows.dilation - rows.x) * pitch)
    windows = _four(rows.kernel)
    total = (height + windows - 1) * rows.dilation * pitch
    parts = []
    for tap in _taps(inner):
        shifts = [a.shift(t) for a, t in zip(inner, tap, strict=True)]
        shifted = _unwrapped(e, e.reshape(dy, [lead, rows.y * pitch]), rows.y, inner, grid, shifts)
        # the last kernel row comes first, since it is dy that moves
        front = rows.shift(rows.kernel - 1) * pitch + sum(map(math.prod, zip(shifts, _pitches(grid), strict=True)))
        shifted = extend(e, shifted, [lead, rows.y * pitch], 1, front, total - front - rows.y * pitch)
        parts.append(_slide(e, shifted, x, lead, lead, (height, rows.dilation * pitch, windows)))
    taps = e.reshape(e.concat(parts, 3), [spec.batch or 0, spec.groups, windows, len(parts)])
    taps = e.reduce_sum(taps, [0], keepdims=False)
    reverse = ([rows.kernel - 1], [-(2**31)], [1], [-1])
    return e.reshape_like(e.op("Slice", taps, *map(e.ints, reverse)), n["W_like"])


def _on_grid(e: Emitter, v: ir.Value, shape: list[int], grid: Sequence[int]) -> ir.Value:
    """Append zeros along every axis from the third on, up to the sizes of the grid."""
    for axis, size in reversed(list(enumerate(grid, 2))):
        v = extend(e, v, shape, axis, 0, size - shape[axis])
        shape = [*shape[:axis], size, *shape[axis + 1 :]]
    return v


def _unwrapped(
    e: Emitter, dy: ir.Value, rows: int, inner: Sequence[Axis], grid: Sequence[int], shifts: Sequence[int]
) -> ir.Value:
    """dy without the points that a shift moves past an end of their row, into the next row."""
    keep = np.ones((rows, *grid), bool)
    for axis, (a, size, shift) in enumerate(zip(inner, grid, shifts, strict=True), 1):
        at = np.arange(size)
        stays = (at >= a.y) | ((at + shift >= 0) & (at + shift < size))
        keep &= stays.reshape([size if i == axis else 1 for i in range(keep.ndim)])
    return dy if keep.all() else e.mul(dy, e.const(keep.reshape(-1), dy.dtype))


# -- any stride: one copy of x per residue of the stride ---------------------------------------------------------------


@lowering("ConvWeightGrad", "placed_windows", requires=[*_STATIC, known_batch])
def placed_windows(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: one Conv per kernel column, over x padded and thinned by the stride, dy placed for the column."""
    rows, *inner = spec.axes
    lead = (spec.batch or 0) * spec.groups
    height = -(-rows.y * rows.stride // rows.dilation)
    windows = _four(rows.kernel)
    high = (height + windows - 1) * rows.dilation
    parts = []
    for tap in _taps(inner):
        spans = [_span(a, t) for a, t in zip(inner, tap, strict=True)]
        data = _thinned(e, n["X"], rows, spans, high, spec)
        kernel = _placed(e, n["dY"], rows, inner, spans, height * rows.dilation, spec)
        size = (height, rows.dilation * math.prod(s.count for s in spans), windows)
        parts.append(_slide(e, data, kernel, lead, lead * (spec.features or 0) // spec.groups, size))
    taps = e.reshape(e.concat(parts, 3), [spec.batch or 0, spec.features or 0, windows, len(parts)])
    taps = e.reduce_sum(taps, [0], keepdims=False)
    return e.reshape_like(e.slice(taps, [0], [rows.kernel], [1]), n["W_like"])


@dataclass(frozen=True, slots=True)
class _Span:
    """The columns `start`, `start + stride`, ... of x that the taps of one residue read; `offset` of dy among them."""

    start: int
    stride: int
    count: int
    offset: int
    size: int


def _span(axis: Axis, tap: int) -> _Span:
    s, shift = axis.stride, axis.shift(tap)
    same = [axis.shift(t) // s for t in range(axis.kernel) if (axis.shift(t) - shift) % s == 0]
    count = axis.y + max(same) - min(same)
    return _Span(s * min(same) + shift % s, s, count, shift // s - min(same), axis.x)


def _thinned(e: Emitter, x: ir.Value, rows: Axis, spans: Sequence[_Span], high: int, spec: ConvSpec) -> ir.Value:
    """Rows from `-begin` on and the columns of `spans`: a Conv with a one-hot kernel pads, thins and trims in one pass.

    It has three spatial axes, so that the runtime does not move x into its blocked layout and back.
    """
    batch, channels = spec.batch or 0, spec.groups
    if not spans:
        return extend(e, x, [batch * channels, rows.x], 1, rows.begin, high - rows.x - rows.begin)
    picks = [*[_Span(0, 1, 1, 0, 1)] * (2 - len(spans)), _Span(-rows.begin, 1, high, 0, rows.x), *spans]
    first = [max(p.start, 0) for p in picks]
    low = [max(-p.start, 0) for p in picks]
    over = [p.size + b - f - 1 - p.stride * (p.count - 1) for p, f, b in zip(picks, first, low, strict=True)]
    # a wider kernel leaves out the surplus columns, unless they are less than a stride
    extent = [f + 1 + (o if o >= p.stride else 0) for p, f, o in zip(picks, first, over, strict=True)]
    e.check_bytes(8 * channels * math.prod(extent), "The kernels that thin the rows")
    one = np.zeros(extent)
    one[tuple(first)] = 1
    weight = e.const(np.tile(one, [channels, 1, *[1] * len(picks)]), x.dtype)
    x = e.reshape(x, [batch, channels, *(p.size for p in picks)])
    pads = [*low, *(max(-o, 0) for o in over)]
    return e.op("Conv", x, weight, group=channels, strides=[p.stride for p in picks], pads=pads)


def _placed(
    e: Emitter, dy: ir.Value, rows: Axis, inner: Sequence[Axis], spans: Sequence[_Span], high: int, spec: ConvSpec
) -> ir.Value:
    """dy at its offset among the columns, every row followed by the rows of zeros that the stride leaves out."""
    lead = (spec.batch or 0) * (spec.features or 0)
    shape = [lead, rows.y, *(a.y for a in inner)]
    for axis, span in reversed(list(enumerate(spans, 2))):
        rest = math.prod(shape[axis + 1 :])
        # the innermost axes as one, so that a single copy places a row and its zeros
        shape = [*shape[:axis], shape[axis] * rest]
        after = (span.count - span.offset) * rest - shape[axis]
        tail = (rows.stride - 1) * math.prod(s.count for s in spans) if axis == 2 else 0
        dy = extend(e, dy, shape, axis, span.offset * rest, after + tail)
        shape = [*shape[:axis], span.count * rest]
    if not spans:
        dy = extend(e, dy, [lead, rows.y, 1], 2, 0, rows.stride - 1)
    pitch = math.prod(s.count for s in spans)
    have = rows.y * rows.stride * pitch
    return extend(e, dy, [lead, have], 1, 0, high * pitch - have)


# -- any batch: the samples innermost ----------------------------------------------------------------------------------


@lowering("ConvWeightGrad", "batch_windows", requires=_STATIC)
def batch_windows(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: the samples moved innermost, then one Conv per node for every lag; for small images, any batch size."""
    axes = spec.axes
    batch: Dim = spec.batch if spec.batch is not None else e.dim(n["X"], 0)
    channels, features = spec.groups, spec.features or 0
    rows, *inner = axes
    x, dy = n["X"], n["dY"]
    x, dy = (with_samples(e, v, [batch, *e.dims(v)[1:]]) for v in (x, dy))
    batch = filled(e, batch)
    grid = [max(a.x, a.y * a.stride, a.x + a.begin, (a.y - 1) * a.stride + 1 + a.shift(a.kernel - 1)) for a in inner]
    pitches = _pitches([0, *grid])
    x = _samples_last(e, x, batch, channels * math.prod(a.x for a in axes))
    shape: list[Dim] = [channels, *(a.x for a in axes), batch]
    for axis, (a, size) in reversed(list(enumerate(zip(inner, grid, strict=True), 2))):
        x = extend(e, x, shape, axis, 0, size - a.x)
        shape[axis] = size
    dy = _samples_last(e, dy, batch, features * math.prod(a.y for a in axes))
    shape = [features, *(a.y for a in axes), batch]
    for axis, (a, size) in reversed(list(enumerate(zip(axes, [rows.y * rows.stride, *grid], strict=True), 1))):
        dy = extend(e, dy, [*shape[: axis + 1], 1, *shape[axis + 1 :]], axis + 1, 0, a.stride - 1)
        shape[axis] = a.y * a.stride
        dy = extend(e, dy, shape, axis, 0, size - a.y * a.stride)
        shape[axis] = size
    height = rows.y * rows.stride * pitches[0]
    windows = _four(1 + sum((a.kernel - 1) * a.dilation * p for a, p in zip(axes, pitches, strict=True)))
    front = sum(a.begin * p for a, p in zip(axes, pitches, strict=True))
    have = rows.x * pitches[0]
    x = extend(e, x, [channels, have, batch], 1, front, height + windows - 1 - front - have)
    lags = _slide(e, x, dy, channels, features, (height, batch, windows))
    at = [sum(t * a.dilation * p for t, a, p in zip(tap, axes, pitches, strict=True)) for tap in _taps(axes)]
    return e.reshape_like(e.op("Gather", e.reshape(lags, [features, windows]), e.ints(at), axis=1), n["W_like"])


def _samples_last(e: Emitter, v: ir.Value, batch: Dim, size: int) -> ir.Value:
    """[batch, size] -> [size, batch]."""
    v = e.reshape(v, [batch, size])
    return transpose_by_product(e, v, batch) if isinstance(batch, int) else e.swap_last(v)
