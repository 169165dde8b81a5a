"""What the lowerings of the convolution gradients share: requirements, patches as matrices, shifted sums.

A requirement answers `None` when it holds, else the reason against the lowering.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.convolution import Window
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering.conv.empty_batch import product_of_samples
from onnx_convgrad.lowering.table import Query

_FEW_ROWS = 48
"""Of a matrix: as many a product with the identity moves sooner than one thread, which takes ten times as long where rows
are a power of two apart."""

_FEW_OF_EACH = 32
"""The same for the rows of each of many matrices."""

# -- requirements ------------------------------------------------------------------------------------------------------


def conv_kernel(q: Query) -> str | None:
    if q.dtype not in q.target.conv_dtypes:
        return f"the {q.target.name} provider has no convolution for {q.dtype.name}"
    return None


def unit_stride(q: Query) -> str | None:
    return None if q.spec.unit_stride else f"strides {list(q.spec.strides)} are not 1"


def static_kernel(q: Query) -> str | None:
    return None if q.spec.taps is not None else "the kernel size is not known while building"


def static_groups(q: Query) -> str | None:
    return None if q.spec.groups == 1 or q.spec.features is not None else "the number of features is not known"


def is_pointwise(q: Query) -> str | None:
    return None if q.spec.pointwise else "the kernel is not 1x1 with unit stride and no padding"


def one_group(q: Query) -> str | None:
    return None if q.spec.groups == 1 else f"there are {q.spec.groups} groups"


def several_taps(q: Query) -> str | None:
    return "the kernel is 1x1" if q.spec.taps == 1 else None


def not_empty(q: Query) -> str | None:
    return "a size is zero, so the gradient is" if empty(q.spec) else None


def is_empty(q: Query) -> str | None:
    return None if empty(q.spec) else "no size is known to be zero"


def empty(spec: ConvSpec) -> bool:
    return 0 in (spec.batch, spec.channels, spec.features, *spec.x, *spec.y)


def known_batch(q: Query) -> str | None:
    return None if q.spec.batch is not None else "the batch size is not known while building"


def static_sizes(q: Query) -> str | None:
    return None if q.spec.static else "a spatial size is not known while building"


def known_channels(q: Query) -> str | None:
    return None if q.spec.channels is not None else "the number of channels is not known"


# -- shared pieces -----------------------------------------------------------------------------------------------------


def window(spec: ConvSpec) -> Window:
    return Window(spec.strides, spec.dilations, spec.begin, spec.end, spec.groups)


def spatial_axes(spec: ConvSpec) -> list[int]:
    return list(range(2, 2 + spec.rank))


def dims(e: Emitter, value: ir.Value, sizes: Sequence[int | None]) -> list[Dim]:
    """Sizes of a value: those known to the spec, else read at run time."""
    return [size if size is not None else e.dim(value, axis) for axis, size in enumerate(sizes)]


def features_of(e: Emitter, w: ir.Value, spec: ConvSpec) -> Dim:
    return spec.features if spec.features is not None else e.dim(w, 0)


def swapped(e: Emitter, v: ir.Value, rows: int) -> ir.Value:
    """[.., rows, columns] -> [.., columns, rows]: few rows by a product, many by a Transpose, which runs on one thread."""
    if rows <= (_FEW_ROWS if e.rank(v) == 2 else _FEW_OF_EACH):
        return swapped_by_product(e, v, rows)
    return turned_matrix(e, v) if e.rank(v) == 2 else e.swap_last(v)


def turned_matrix(e: Emitter, v: ir.Value) -> ir.Value:
    """[rows, columns] -> [columns, rows] by a Transpose that stays as it is."""
    return transposed_apart(e, v, [1, 0])


def transposed_apart(e: Emitter, v: ir.Value, perm: Sequence[int]) -> ir.Value:
    """A Transpose that ONNX Runtime does not merge with a Reshape and Transpose that follow.

    Two that each copy rows or exchange two axes it would merge into one of four axes, which moves single elements and takes
    up to 20 times as long as the two. It does not where the first has a leading axis of 1.
    """
    return e.squeeze(e.transpose(e.unsqueeze(v, [0]), [0, *(axis + 1 for axis in perm)]), [0])


def swapped_by_product(e: Emitter, v: ir.Value, rows: int) -> ir.Value:
    """The same by a product with the identity, on all threads; not where products round their operands."""
    if rows == 1:
        return e.unsqueeze(e.squeeze(v, [-2]), [-1])
    columns = e.swap_last(v)
    return columns if e.target.narrow_products else e.matmul(columns, e.const(np.eye(rows), v.dtype))


def x_dims(e: Emitter, x: ir.Value, spec: ConvSpec) -> list[Dim]:
    return dims(e, x, (spec.batch, spec.channels, *spec.x))


def y_dims(e: Emitter, dy: ir.Value, spec: ConvSpec) -> list[Dim]:
    return dims(e, dy, (spec.batch, spec.features, *spec.y))


def extend(e: Emitter, v: ir.Value, shape: Sequence[Dim], axis: int, before: int, after: int) -> ir.Value:
    """`v`, reshaped to `shape`, with zeros around one axis; a negative amount trims.

    By a Concat where it can be, which copies on every thread; Pad copies on one.
    """
    v = e.reshape(v, shape)
    size = shape[axis]

    def zeros(count: int) -> list[ir.Value]:
        block = e.vector([*shape[:axis], count, *shape[axis + 1 :]])
        return [e.op("Expand", e.scalar(0, v), block)] if count else []

    if isinstance(size, int) and min(before, after) <= -size:
        return zeros(size + before + after)[0]
    if min(before, after) < 0:
        return e.pad(v, [before], [after], [axis])
    return e.concat([*zeros(before), v, *zeros(after)], axis)


def tap_offsets(spec: ConvSpec) -> list[tuple[int, ...]]:
    """Offsets of every kernel position in the padded input, in row-major order."""
    steps = [[t * d for t in range(k or 0)] for k, d in zip(spec.kernel, spec.dilations, strict=True)]
    return list(itertools.product(*steps))


_MOST_VIEWS = 16
"""Of x as a whole; every node takes its time to build."""


def gather(e: Emitter, x: ir.Value, y: list[Dim], spec: ConvSpec) -> ir.Value:
    """im2col by slices: [N, C, K, *y], one strided view of the padded input per tap, or per tap of each axis in turn."""
    batch, channels = x_dims(e, x, spec)[:2]
    x = e.pad(x, spec.begin, spec.end, spatial_axes(spec))
    if (spec.taps or 1) <= _MOST_VIEWS:
        return e.concat([e.unsqueeze(_view(e, x, y, spec, tap), [2]) for tap in tap_offsets(spec)], axis=2)
    for axis, (kernel, dilation) in enumerate(zip(spec.kernel, spec.dilations, strict=True)):
        stride, reach = spec.strides[axis], e.size_mul(e.size_sub(y[axis], 1), spec.strides[axis])
        views = [
            e.slice(x, [t * dilation], [e.size_add(reach, t * dilation + 1)], [2 + 2 * axis], [stride])
            for t in range(kernel or 1)
        ]
        x = e.concat([e.unsqueeze(view, [2 + axis]) for view in views], axis=2 + axis)
    return e.reshape(x, [batch, channels, spec.taps or 1, *y])


def _view(e: Emitter, x: ir.Value, y: list[Dim], spec: ConvSpec, tap: tuple[int, ...]) -> ir.Value:
    """What one tap visits of the padded input: [N, C, *y]."""
    axes = zip(y, spec.strides, tap, strict=True)
    ends = [e.size_add(e.size_mul(e.size_sub(size, 1), s), t + 1) for size, s, t in axes]
    return e.slice(x, tap, ends, spatial_axes(spec), spec.strides)


def im2col(e: Emitter, x: ir.Value, y: list[Dim], spec: ConvSpec) -> ir.Value:
    """Patches as matrices, [N, g, Cg*K, P]."""
    n, c = x_dims(e, x, spec)[:2]
    points = e.size_mul(*y)
    rows = e.size_mul(e.size_div(c, spec.groups), spec.taps or 1)
    return e.reshape(gather(e, x, y, spec), [n, spec.groups, rows, points])


def scatter(e: Emitter, dy: ir.Value, w: ir.Value, size: list[Dim], spec: ConvSpec) -> ir.Value:
    """The data gradient of channels and spatial sizes `size` by MatMul and shifted sums.

    Row p of a tap t belongs to row s p + t - begin of x, where there is one.
    """
    channels, *x = size
    batch, o, *y = y_dims(e, dy, spec)
    per, inner, taps = e.size_div(o, spec.groups), e.size_div(channels, spec.groups), spec.taps or 1
    matrix = e.transpose(e.reshape(w, [spec.groups, per, e.size_mul(inner, taps)]), [0, 2, 1])
    sizes = [batch, e.size_mul(inner, taps), per, e.size_mul(*y)]
    columns = e.reshape(product_of_samples(e, matrix, dy, sizes, spec.groups), [batch, channels, taps, *y])
    shifts = [[t - b for t, b in zip(tap, spec.begin, strict=True)] for tap in tap_offsets(spec)]
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
    return e.op("Expand", e.scalar(0, dy), e.vector([batch, channels, *x])) if total is None else total


def _placed(
    e: Emitter,
    columns: ir.Value,
    lead: list[Dim],
    sizes: list[tuple[int, int]],
    shifts: list[list[int]],
    spec: ConvSpec,
) -> Iterator[ir.Value]:
    """Each tap padded and trimmed to x, but for those that are outside in every window. `sizes` are of x and of a tap."""
    for index, shift in enumerate(shifts):
        if any(s >= want or s + have <= 0 for s, (want, have) in zip(shift, sizes, strict=True)):
            continue
        part = e.squeeze(e.slice(columns, [index], [index + 1], [2]), [2])
        part = _spread(e, part, [*lead, *(have for _, have in sizes)], spec)
        after = [want - have - s for s, (want, have) in zip(shift, sizes, strict=True)]
        yield e.pad(part, shift, after, spatial_axes(spec))


def _windows(
    e: Emitter,
    columns: ir.Value,
    lead: list[Dim],
    x: list[Dim],
    rows: list[Dim],
    shifts: list[list[int]],
    spec: ConvSpec,
) -> Iterator[ir.Value]:
    """Windows on the columns, padded so that there is one of the size of x for every tap.

    Sizes are not known: ONNX Runtime before 1.24 is wrong where a Pad first trims all away, which this one never does.
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
    """The last axes of a value spread by the stride, with zeros between: of shape `size`."""
    if spec.unit_stride:
        return value
    between = [len(size) - spec.rank + 1 + 2 * i for i in range(spec.rank)]
    value = e.pad(e.unsqueeze(value, between), [0] * spec.rank, [s - 1 for s in spec.strides], between)
    return e.reshape(value, size)
