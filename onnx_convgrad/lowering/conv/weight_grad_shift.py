"""Weight gradients that gather only some axes of the patches, or none.

    dw[o, c, t] = sum over n and p of dy[n, o, p] x[n, c, s p + d t - b]

depends on the shift of x against dy, so a tap along one axis may as well shift dy. Shifting whole rows along the first
spatial axis copies long runs, and three shifts of dy and three gathered columns cost fewer copies than the nine patches of a
3x3 kernel. With few points, one product per tap skips the padding.
"""

from __future__ import annotations

import itertools
import math

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.ir.samples import squares
from onnx_convgrad.lowering.conv.layout import transpose_last, zeros
from onnx_convgrad.lowering.conv.patches import patches_by_conv
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    known_channels,
    not_empty,
    one_group,
    several_rows,
    several_samples,
    several_taps,
    static_kernel,
    static_sizes,
    unit_row_stride,
)
from onnx_convgrad.lowering.conv.weight_grad import contract, leading, of_samples, only_norms, shaped, sizes_of
from onnx_convgrad.lowering.table import lowering, needs

_MOST_TAPS = 64

# -- requirements ------------------------------------------------------------------------------------------------------


static_rows = needs(
    lambda s: None not in (s.x[0], s.y[0]), "the number of rows along the first axis is not known while building"
)
few_taps = needs(
    lambda s: s.taps is None or s.taps <= _MOST_TAPS,
    lambda s: f"the kernel has {s.taps} taps, each of which is a separate product",
)


def _dense(spec: ConvSpec) -> bool:
    return all(d == 1 or k == 1 for d, k in zip(spec.dilations, spec.kernel, strict=True))


two_axes = needs(lambda s: s.rank == 2, "there are not two spatial axes")
no_trimming = needs(lambda s: min(s.pads, default=0) >= 0, "the padding is negative")
tiles_its_input = needs(lambda s: _dense(s) and s.kernel == s.strides, "the windows overlap or leave gaps")

# -- shifts along the first axis ---------------------------------------------------------------------------------------


def _gathered(e: Emitter, x: ir.Value, spec: ConvSpec, begin: int, end: int) -> ir.Value:
    """Patches along all axes but the first, which is padded by `begin` and `end`: [N, C * K, rows, *y]."""
    inner = Window(
        (1, *spec.strides[1:]),
        (1, *spec.dilations[1:]),
        (begin, *spec.begin[1:]),
        (end, *spec.end[1:]),
        spec.groups,
    )
    if (
        all(k == 1 for k in spec.kernel[1:])
        and set(inner.strides) == {1}
        and not any((*inner.begin[1:], *inner.end[1:]))
    ):
        return e.pad(x, [begin], [end], [2])
    return patches_by_conv(e, x, (1, *spec.kernel[1:]), inner, spec.channels or 1)


def _inner_taps(spec: ConvSpec) -> int:
    return math.prod(k or 1 for k in spec.kernel[1:])


@of_samples(
    "row_shift",
    requires=[not_empty, conv_kernel, static_kernel, known_channels, static_rows, several_rows, unit_row_stride],
)
def row_shift(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Patches along all axes but the first; for that, dy is shifted by whole rows, with one MatMul per shift."""
    batch, channels, features, y = sizes_of(e, n, spec)
    taps, have, want = _inner_taps(spec), spec.y[0] or 0, spec.x[0] or 0
    columns = _gathered(e, n["X"], spec, 0, 0)
    width = e.size_mul(*y[1:])
    sizes = features, e.size_mul(channels, taps), e.size_mul(want, width)
    rows = e.reshape(n["dY"], [batch, e.size_mul(features, spec.groups), e.size_mul(have, width)])
    lead = leading(n, batch)
    shape = [*lead, e.size_mul(features, spec.groups), channels, 1, taps]
    parts = []
    for t in range(spec.kernel[0] or 1):
        low = t * spec.dilations[0] - spec.begin[0]  # row p of dy meets row p + low of x
        high = want - have - low
        if low >= want or high >= want:
            parts.append(zeros(e, n["X"], shape))  # the tap reads padding alone
            continue
        moved = e.pad(rows, [e.size_mul(width, low)], [e.size_mul(width, high)], [2])
        parts.append(e.reshape(contract(e, n, moved, columns, batch, spec.groups, sizes), shape))
    if only_norms(n):
        return e.sum([squares(e, part) for part in parts])
    return shaped(e, n, e.concat(parts, axis=len(lead) + 2))


def shifted_copies(e: Emitter, n: Call, size: list[Dim], spec: ConvSpec, dy: ir.Value | None = None) -> ir.Value:
    """dY shifted by each tap of the first axis: [N, O, k * (rows + (k - 1) d), width], k copies in a row.

    Each copy is shifted by d more rows among k d - d rows of zeros, so that the gaps between the copies are k d rows each.
    Of shape `size`, [N, O, rows, ...]; `dy` replaces dY.
    """
    first, width = spec.kernel[0] or 1, e.size_mul(1, *size[3:])
    gap = zeros(e, n["X"], [*size[:2], e.size_mul(width, first * spec.dilations[0])])
    rows = e.reshape(n["dY"] if dy is None else dy, [*size[:2], e.size_mul(size[2], width)])
    return e.concat([rows, *[gap, rows] * (first - 1)], axis=2)


@of_samples(
    "split_shift",
    requires=[not_empty, conv_kernel, static_kernel, known_channels, several_rows, unit_row_stride],
)
def split_shift(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Patches along all axes but the first; for that, all shifts of dy side by side, in one MatMul; for small groups."""
    batch, channels, features, y = sizes_of(e, n, spec)
    taps, first, dilation = _inner_taps(spec), spec.kernel[0] or 1, spec.dilations[0]
    columns = _gathered(e, n["X"], spec, spec.begin[0], spec.end[0])
    outputs = e.size_mul(features, spec.groups)
    moved = shifted_copies(e, n, [batch, outputs, *y], spec)
    points = e.size_mul(e.size_add(y[0], (first - 1) * dilation), *y[1:])
    sizes = e.size_mul(features, first), e.size_mul(channels, taps), points
    total = contract(e, n, moved, columns, batch, spec.groups, sizes)
    lead = leading(n, batch)
    at = len(lead)
    total = e.reshape(total, [*lead, outputs, first, channels, taps])
    return shaped(e, n, total, [*range(at), at, at + 2, at + 1, at + 3])


@lowering(
    "ConvWeightGrad",
    "merged_shift",
    requires=[
        not_empty,
        static_sizes,
        one_group,
        several_rows,
        unit_row_stride,
        two_axes,
        several_samples,
        no_trimming,
    ],
)
def merged_shift(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """All shifts of dy along the rows, and of x along the columns, in one MatMul over all samples; for few points."""
    batch, channels, features, (rows, columns) = sizes_of(e, n, spec)
    (first, second), (down, across) = (tuple(k or 1 for k in spec.kernel), spec.dilations)
    padded = e.pad(n["X"], spec.begin, spec.end, [2, 3])
    height = e.size_add(rows, (first - 1) * down)
    last = e.size_add(e.size_mul(e.size_sub(columns, 1), spec.strides[1]), 1)
    x = e.transpose(padded, [2, 3, 0, 1])
    steps = [1, spec.strides[1]]
    seen = [e.slice(x, [0, t * across], [height, e.size_add(last, t * across)], [0, 1], steps) for t in range(second)]
    points = e.size_mul(height, columns, batch)
    taps = e.reshape(e.concat(seen, axis=3), [points, channels * second])
    moved = shifted_copies(e, n, [1, features, rows, columns, batch], spec, e.transpose(n["dY"], [1, 2, 3, 0]))
    total = e.matmul(e.reshape(moved, [e.size_mul(features, first), points]), taps)
    total = e.reshape(total, [features, first, second, channels])
    return e.reshape_like(e.transpose(total, [0, 3, 1, 2]), n["W_like"])


# -- tap by tap --------------------------------------------------------------------------------------------------------


@lowering("ConvWeightGrad", "taps", requires=[not_empty, static_sizes, one_group, several_taps, few_taps])
def taps(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """One MatMul per tap over the points of all samples where the tap is inside x; for many channels, few points.

    With channels last in x, a tap reads a run of whole points.
    """
    batch, channels, features, _ = sizes_of(e, n, spec)
    axes, each = spec.spatial_axes, spec.axes
    x = e.transpose(n["X"], [*axes, 0, 1])
    dy = e.transpose(n["dY"], [1, *axes, 0])
    parts = []
    for tap in itertools.product(*(range(axis.kernel) for axis in each)):
        reached = [axis.reached(t) for axis, t in zip(each, tap, strict=True)]
        if not all(reached):
            parts.append(zeros(e, n["X"], [1, features, channels]))
            continue
        reads = [axis.read(outputs, t) for axis, outputs, t in zip(each, reached, tap, strict=True)]
        starts, ends = zip(*reads, strict=True)
        points = e.size_mul(batch, *(len(outputs) for outputs in reached))
        seen = e.reshape(e.slice(x, starts, ends, list(range(spec.rank)), spec.strides), [points, channels])
        dy_at = [r.start for r in reached], [r.stop for r in reached], [1 + i for i in range(spec.rank)]
        used = e.reshape(e.slice(dy, *dy_at), [features, points])
        parts.append(e.unsqueeze(e.matmul(used, seen), [0]))
    rows = e.reshape(e.concat(parts, axis=0), [len(parts), e.size_mul(features, channels)])
    return e.reshape_like(transpose_last(e, rows, len(parts)), n["W_like"])


@lowering("ConvWeightGrad", "patches", requires=[not_empty, static_kernel, several_taps, one_group, tiles_its_input])
def patches(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Windows that tile x: a transposition gives the patches, and one MatMul multiplies all of them."""
    batch, channels, features, y = sizes_of(e, n, spec)
    axes, rank = spec.spatial_axes, spec.rank
    kernel = [k or 1 for k in spec.kernel]
    x = e.pad(n["X"], spec.begin, spec.end, axes)
    x = e.slice(x, [0] * rank, [e.size_mul(size, k) for size, k in zip(y, kernel, strict=True)], axes)
    x = e.reshape(x, [batch, channels, *(d for pair in zip(y, kernel, strict=True) for d in pair)])
    x = e.transpose(x, [0, *(2 + 2 * i for i in range(rank)), 1, *(3 + 2 * i for i in range(rank))])
    points = e.size_mul(*y)
    x = e.reshape(x, [e.size_mul(batch, points), e.size_mul(channels, math.prod(kernel))])
    dy = e.transpose(e.reshape(n["dY"], [batch, features, points]), [1, 0, 2])
    return e.reshape_like(e.matmul(e.reshape(dy, [features, e.size_mul(batch, points)]), x), n["W_like"])
