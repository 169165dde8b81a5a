"""Patches of an image as a matrix (im2col), and the adjoint: columns added into an image.

patches[n, c, t, p] = x[n, c, s p + d t - b]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.convolution import conv, trim
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.lowering.conv.layout import product_of_samples, x_dims, y_dims, zeros
from onnx_convgrad.lowering.conv.requirements import MOST_TAPS

_MOST_VIEWS = 16
"""Most Slices of the whole of x; every node takes time to build."""

# -- gathered ----------------------------------------------------------------------------------------------------------


def tap_offsets(kernel: Sequence[int | None], dilations: Sequence[int]) -> list[tuple[int, ...]]:
    """Offsets of every kernel position in the padded input, in row-major order."""
    steps = [[t * d for t in range(k or 0)] for k, d in zip(kernel, dilations, strict=True)]
    return list(itertools.product(*steps))


def gather_patches(e: Emitter, x: ir.Value, y: list[Dim], spec: ConvSpec) -> ir.Value:
    """[N, C, K, *y], by one strided Slice of the padded input per tap, or per tap of each axis in turn."""
    batch, channels = x_dims(e, x, spec)[:2]
    x = e.pad(x, spec.begin, spec.end, spec.spatial_axes)
    if (spec.taps or 1) > MOST_TAPS:
        return e.reshape(_gathered_rows(e, x, y, spec), [batch, channels, spec.taps or 1, *y])
    if (spec.taps or 1) <= _MOST_VIEWS:
        return _views(e, x, y, tap_offsets(spec.kernel, spec.dilations), spec.strides)
    for axis, (kernel, dilation) in enumerate(zip(spec.kernel, spec.dilations, strict=True)):
        stride, reach = spec.strides[axis], e.size_mul(e.size_sub(y[axis], 1), spec.strides[axis])
        views = [
            e.slice(x, [t * dilation], [e.size_add(reach, t * dilation + 1)], [2 + 2 * axis], [stride])
            for t in range(kernel or 1)
        ]
        x = e.concat([e.unsqueeze(view, [2 + axis]) for view in views], axis=2 + axis)
    return e.reshape(x, [batch, channels, spec.taps or 1, *y])


def _gathered_rows(e: Emitter, x: ir.Value, y: list[Dim], spec: ConvSpec) -> ir.Value:
    """[N, C, *kernel, *y] from the padded input, by one Gather per axis: for kernels with too many taps to list."""
    for axis, (kernel, dilation, stride) in enumerate(zip(spec.kernel, spec.dilations, spec.strides, strict=True)):
        at = e.op("Add", e.unsqueeze(e.arange(kernel or 1, dilation), [1]), e.arange(y[axis], stride))
        x = e.op("Gather", x, at, axis=2 + 2 * axis)
        rest = [a for a in range(spec.rank + axis + 3) if a != 2 + 2 * axis]
        x = e.transpose(x, [*rest[: 2 + axis], 2 + 2 * axis, *rest[2 + axis :]])
    return x


def _views(
    e: Emitter, x: ir.Value, y: Sequence[Dim], taps: Sequence[tuple[int, ...]], strides: Sequence[int]
) -> ir.Value:
    """The points of the padded input that each tap reads, side by side: [N, C, K, *y]."""
    axes, views = range(2, 2 + len(y)), []
    for tap in taps:
        along = zip(y, strides, tap, strict=True)
        ends = [e.size_add(e.size_mul(e.size_sub(size, 1), s), t + 1) for size, s, t in along]
        views.append(e.unsqueeze(e.slice(x, tap, ends, axes, strides), [2]))
    return e.concat(views, axis=2)


def patches_by_conv(e: Emitter, x: ir.Value, kernel: Sequence[int | None], win: Window, channels: int) -> ir.Value:
    """Patches [N, C * K, *y] by the runtime's own convolution, a depthwise one with one-hot kernels.

    It gathers with every stride, padding and size, so nothing here depends on a spatial size. On a GPU a few taps of known
    sizes are slices instead, see quirks.CUDA_ONE_HOT_CONV.
    """
    x, win = trim(e, x, win)
    sizes = [k or 1 for k in kernel]
    taps = math.prod(sizes)
    known = [d for d in e.dims(x)[2:] if isinstance(d, int)]
    if e.target.rates.wave and taps <= _MOST_VIEWS and len(known) == len(sizes):
        return _patches_by_slices(e, x, sizes, win, known)
    one_hot = e.const(np.eye(taps).reshape(taps, 1, *sizes), x.dtype or ir.DataType.FLOAT)
    kernels = e.op("Tile", one_hot, e.ints([channels, *[1] * (len(sizes) + 1)])) if channels > 1 else one_hot
    return conv(e, x, kernels, None, Window(win.strides, win.dilations, win.begin, win.end, channels))


def _patches_by_slices(e: Emitter, x: ir.Value, kernel: list[int], win: Window, size: list[int]) -> ir.Value:
    """The patches of an input with spatial axes of known `size`, by one strided Slice per tap."""
    batch, channels = e.dims(x)[:2]
    sides = zip(size, win.begin, win.end, strict=True)
    padded = [n + low + high for n, low, high in sides]
    reach = [d * (k - 1) for k, d in zip(kernel, win.dilations, strict=True)]
    y = [(n - r - 1) // s + 1 for n, r, s in zip(padded, reach, win.strides, strict=True)]
    x = e.pad(x, win.begin, win.end, range(2, 2 + len(kernel)))
    patches = _views(e, x, y, tap_offsets(kernel, win.dilations), win.strides)
    return e.reshape(patches, [batch, e.size_mul(channels, math.prod(kernel)), *y])


# -- added in place ----------------------------------------------------------------------------------------------------


def scatter_columns(e: Emitter, dy: ir.Value, w: ir.Value, size: list[Dim], spec: ConvSpec) -> ir.Value:
    """The data gradient of channels and spatial sizes `size` by MatMul and shifted sums.

    Row p of a tap t belongs to row s p + t - begin of x, where there is one.
    """
    channels, *x = size
    batch, o, *y = y_dims(e, dy, spec)
    per, inner, taps = e.size_div(o, spec.groups), e.size_div(channels, spec.groups), spec.taps or 1
    matrix = e.transpose(e.reshape(w, [spec.groups, per, e.size_mul(inner, taps)]), [0, 2, 1])
    sizes = [batch, e.size_mul(inner, taps), per, e.size_mul(*y)]
    product = product_of_samples(e, matrix, dy, sizes, spec.groups)
    if taps > MOST_TAPS:
        return _skewed(e, product, [batch, channels], x, y, spec)
    columns = e.reshape(product, [batch, channels, taps, *y])
    shifts = [[t - b for t, b in zip(tap, spec.begin, strict=True)] for tap in tap_offsets(spec.kernel, spec.dilations)]
    rows: list[Dim] = [e.size_mul(count, s) for count, s in zip(y, spec.strides, strict=True)]
    known = [
        (want, have) for want, have in zip(x, rows, strict=True) if isinstance(want, int) and isinstance(have, int)
    ]
    if len(known) == spec.rank:
        parts = _placed(e, columns, [batch, channels], known, shifts, spec)
    else:
        parts = _windows(e, columns, [batch, channels, taps], x, rows, shifts, spec)
    total: ir.Value | None = None
    for part in parts:
        total = part if total is None else e.add(total, part)
    return zeros(e, dy, [batch, channels, *x]) if total is None else total


def _skewed(e: Emitter, columns: ir.Value, lead: list[Dim], x: list[Dim], y: list[Dim], spec: ConvSpec) -> ir.Value:
    """The columns added in place, axis by axis, in a few nodes for any number of taps.

    Rows that are d longer than the result, and read as rows of its length, shift tap t by d t: then they are summed.
    """
    kernel = [k or 1 for k in spec.kernel]
    order = [0, *(a for i in range(spec.rank) for a in (1 + i, 1 + spec.rank + i))]
    pairs: list[Dim] = [d for pair in zip(kernel, y, strict=True) for d in pair]
    v = e.transpose(e.reshape(columns, [e.size_mul(*lead), *kernel, *y]), order)
    for axis in reversed(range(spec.rank)):
        k, d, s = kernel[axis], spec.dilations[axis], spec.strides[axis]
        before, after = e.size_mul(*lead, *pairs[: 2 * axis]), e.size_mul(1, *pairs[2 * axis + 2 :])
        v = e.reshape(v, [before, k, y[axis], 1, after])
        v = e.pad(v, [0], [s - 1], [3])
        length = e.size_mul(y[axis], s)
        wide = e.size_add(length, d * (k - 1))
        v = e.pad(e.reshape(v, [before, k, length, after]), [0], [d * k], [2])
        v = e.reshape(v, [before, e.size_mul(e.size_add(wide, d), k), after])
        v = e.reshape(e.slice(v, [0], [e.size_mul(wide, k)], [1]), [before, k, wide, after])
        v = e.reduce_sum(v, [1], keepdims=False)
        first, want = spec.begin[axis], x[axis]
        v = e.pad(v, [0], [e.size_max(e.size_sub(e.size_add(want, first), wide), 0)], [1])
        v = e.pad(v, [max(-first, 0)], [0], [1])
        v = e.slice(v, [max(first, 0)], [e.size_add(want, max(first, 0))], [1])
        pairs[2 * axis : 2 * axis + 2] = [want]
    return e.reshape(v, [*lead, *x])


def _placed(
    e: Emitter,
    columns: ir.Value,
    lead: list[Dim],
    sizes: list[tuple[int, int]],
    shifts: list[list[int]],
    spec: ConvSpec,
) -> Iterator[ir.Value]:
    """Each tap padded and trimmed to x, except taps that are outside in every window. `sizes` are of x and of a tap."""
    for index, shift in enumerate(shifts):
        if any(s >= want or s + have <= 0 for s, (want, have) in zip(shift, sizes, strict=True)):
            continue
        part = e.squeeze(e.slice(columns, [index], [index + 1], [2]), [2])
        part = _spread(e, part, [*lead, *(have for _, have in sizes)], spec)
        after = [want - have - s for s, (want, have) in zip(shift, sizes, strict=True)]
        yield e.pad(part, shift, after, spec.spatial_axes)


def _windows(
    e: Emitter,
    columns: ir.Value,
    lead: list[Dim],
    x: list[Dim],
    rows: list[Dim],
    shifts: list[list[int]],
    spec: ConvSpec,
) -> Iterator[ir.Value]:
    """For every tap a window of the size of x on the padded columns, where sizes are unknown.

    ONNX Runtime before 1.24 is wrong where a Pad trims everything away first, which this one never does.
    """
    axes = list(zip(*shifts, strict=True))
    low = [max(0, *along) for along in axes]
    high = [
        e.size_max(e.size_sub(e.size_sub(want, have), min(along)), 0)
        for want, have, along in zip(x, rows, axes, strict=True)
    ]
    columns = e.pad(_spread(e, columns, [*lead, *rows], spec), low, high, range(3, 3 + spec.rank))
    for index, shift in enumerate(shifts):
        start: list[Dim] = [lo - s for lo, s in zip(low, shift, strict=True)]
        stop = [e.size_add(want, at) for want, at in zip(x, start, strict=True)]
        yield e.squeeze(e.slice(columns, [index, *start], [index + 1, *stop], range(2, 3 + spec.rank)), [2])


def _spread(e: Emitter, value: ir.Value, size: list[Dim], spec: ConvSpec) -> ir.Value:
    """The value with zeros inserted between the elements of its last axes, as many as the stride skips: of shape `size`."""
    if spec.unit_stride:
        return value
    between = [len(size) - spec.rank + 1 + 2 * i for i in range(spec.rank)]
    value = e.pad(e.unsqueeze(value, between), [0] * spec.rank, [s - 1 for s in spec.strides], between)
    return e.reshape(value, size)
