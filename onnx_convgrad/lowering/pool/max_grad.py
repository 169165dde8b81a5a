"""The gradient of MaxPool, which goes to the first of the largest elements of every window.

    MaxPoolGrad(dy, x)[q] = sum over the windows p whose first maximum is x[q] of dy[p]

ONNX Runtime's CPU provider finds the indices of maxima many times slower than the maxima, and scatters as slowly, an
element at a time. A maximum over several axes is one over the last axis, then over the one before, and so on; and the
first of the largest elements, in row-major order, is the first along each axis. So the gradient can be propagated axis by
axis, by comparisons with the maxima, which are passes at full speed and need no stored value but x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial, reduce

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.facts import meets_a_pole
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter, known, static_dims
from onnx_convgrad.ir.geometry import HINT_BATCH, HINT_CHANNELS, HINT_SIZE, Axis
from onnx_convgrad.ir.maxima import maxima_of, own_pool, winners_of
from onnx_convgrad.ir.pooling import Pool
from onnx_convgrad.ir.scatter import Winners, scatter_to_maxima
from onnx_convgrad.lowering.conv.requirements import MOST_POINTS, MOST_TAPS
from onnx_convgrad.lowering.table import Query, lowering, needs, spec_builder


@dataclass(frozen=True)
class PoolSpec:
    """The windows of a pool and the shape `[batch, channels, *pool.sizes]` of x; `None` marks an unknown size."""

    batch: int | None
    channels: int | None
    pool: Pool

    @property
    def x_shape(self) -> tuple[int | None, ...]:
        return self.batch, self.channels, *self.pool.sizes

    @property
    def y_shape(self) -> tuple[int | None, ...]:
        return self.batch, self.channels, *(self.pool.windows(axis) for axis in range(self.pool.rank))

    def with_batch(self, batch: int) -> PoolSpec:
        return replace(self, batch=batch)

    def hinted(self) -> PoolSpec:
        """This gradient with a typical number for every unknown size."""
        return PoolSpec(self.batch or HINT_BATCH, self.channels or HINT_CHANNELS, self.pool.hinted(HINT_SIZE))

    def __str__(self) -> str:
        sizes = "x".join("?" if size is None else str(size) for size in self.x_shape)
        return f"MaxPool {sizes} by {self.pool}"


@spec_builder("MaxPoolGrad", ("y_shape", "x_shape"))
def pool_spec(n: Call) -> PoolSpec:
    x = n["X"]
    batch, channels = (None if x.shape is None else known(x.shape[axis]) for axis in range(2))
    return PoolSpec(batch, channels, Pool.of(n, x))


# -- by indices --------------------------------------------------------------------------------------------------------


def returned(q: Query) -> str | None:
    if any(requirement(q) for requirement in _BY_AXES):  # no other lowering applies
        return None
    pool = q.spec.pool
    padded = pool.pads is None or any(begin for begin, _ in pool.pads)
    if q.target.name == "cuda" and any(d != 1 for d in pool.dilations) and padded:
        return "its indices are wrong with dilation and padding at the beginning"  # see quirks.CUDA_MAX_POOL_INDICES
    return None if q.target.pool_indices else f"target {q.target.name} has no MaxPool that returns indices"


@lowering("MaxPoolGrad", "indices", requires=[returned])
def by_indices(e: Emitter, n: Call, spec: PoolSpec) -> ir.Value:
    """The pool's own indices of the maxima, and a scatter."""
    return scatter_to_maxima(e, spec.pool, n["dY"], winners_of(e, n), n["X"])


# -- 2x2 windows -------------------------------------------------------------------------------------------------------


def quartered(q: Query) -> str | None:
    pool = q.spec.pool
    if not pool.tiles or pool.kernel != (2, 2):
        return "the windows are not 2x2, side by side"
    if any(size is None or size % 2 for size in pool.sizes):
        return "a size is not known while building, or odd"
    return None


def unpooled(q: Query) -> str | None:
    if q.dtype != ir.DataType.FLOAT:
        return f"MaxUnpool does not take {q.dtype.name}"
    return f"target {q.target.name} has no MaxUnpool" if "MaxUnpool" in q.target.missing else None


listed = needs(
    lambda s: math.prod(size or 1 for size in s.pool.sizes) <= MOST_POINTS, "an image has too many points to list"
)
some_elements = needs(lambda s: 0 not in (*s.x_shape, *s.y_shape), "there is nothing to pool")


@lowering("MaxPoolGrad", "corners", requires=[quartered, unpooled, some_elements, listed])
def by_corners(e: Emitter, n: Call, spec: PoolSpec) -> ir.Value:
    """Indices of the maxima of 2x2 windows from pools without indices, and MaxUnpool."""
    x = n["X"]
    return scatter_to_maxima(e, spec.pool, n["dY"], Winners(_winners_by_corners(e, x, maxima_of(e, n)), None), x)


def _winners_by_corners(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    """Indices of the maxima of 2x2 windows, from pools without indices, which are many times faster.

    In a window of rows a, b and c, d the maximum is in the first row if max(a, b) = y, and there in the first column if
    a = y; in the second row, where a < y, it is in the first column if max(a, c) = y.
    """
    height, width = (e.dim(x, axis) for axis in (2, 3))
    assert isinstance(height, int), "the sizes of the pool are known"
    assert isinstance(width, int), "the sizes of the pool are known"
    plane = height * width
    planes = [e.size_mul(e.dim(x, 0), e.dim(x, 1)), plane // 4]

    def is_best(*kernel: int) -> ir.Value:
        return e.compare("Equal", e.op("MaxPool", x, kernel_shape=kernel, strides=(2, 2)), y)

    upper, corner, left = is_best(1, 2), is_best(1, 1), is_best(2, 1)
    first_column = e.op("Or", corner, e.op("And", left, e.op("Not", upper)))
    before = e.reshape(e.add(e.mask(first_column, x), e.mul(e.mask(upper, x), width)), planes)
    rows, columns = np.arange(1, height, 2), np.arange(1, width, 2)  # of d, the last element of its window
    last = e.const((rows[:, None] * width + columns).reshape(-1))
    count = e.squeeze(e.vector([e.size_mul(planes[0], plane)]), [0])
    first = e.op("Range", e.const(np.int64(0)), count, e.const(np.int64(plane)))
    ends = e.op("Add", e.unsqueeze(first, [1]), last)
    sizes = static_dims(x) or [None]
    exact = None not in sizes and math.prod(size or 0 for size in sizes) <= _EXACT
    if exact:  # integers are subtracted on one thread
        indices = e.cast(e.sub(e.cast(ends, ir.DataType.FLOAT), before), ir.DataType.INT64)
    else:
        indices = e.op("Sub", ends, e.cast(before, ir.DataType.INT64))
    return e.reshape(indices, e.dims(y))


_EXACT = 1 << 24
"""Largest integer up to which all are exact in float32."""


# -- axis by axis ------------------------------------------------------------------------------------------------------


_PHASES = 8
"""The largest stride that is split into its phases."""

known_sizes = needs(lambda s: None not in (*s.pool.sizes, *s.y_shape[2:]), "a spatial size is not known while building")
few_taps = needs(
    lambda s: sum(s.pool.kernel) <= MOST_TAPS,
    lambda s: f"the windows have {sum(s.pool.kernel):,} rows, too many to list",
)
rows_inside = needs(
    lambda s: all(_taps(_axis(s.pool, axis)) for axis in range(s.pool.rank)), "the windows reach nothing but padding"
)


def few_phases(q: Query) -> str | None:
    """Always possible, because no other lowering applies to large strides where the provider returns no indices."""
    largest = max(q.spec.pool.strides)
    few = largest <= (_PHASES if q.target.pool_indices else MOST_TAPS)
    return None if few else f"a stride of {largest} leaves little of x to compare at once"


def compared(q: Query) -> str | None:
    kinds = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return None if q.dtype in kinds or not q.target.pool_indices else f"{q.dtype.name} is compared an element at a time"


def _axis(pool: Pool, axis: int) -> Axis:
    """The axis of the convolution with the windows of a pool: tap t of window p is row `stride p + shift(t)`."""
    size, count = pool.sizes[axis], pool.windows(axis)
    assert None not in (pool.pads, size, count), "known_sizes requires it"
    begin = (pool.pads or ())[axis][0]
    return Axis(size or 0, pool.kernel[axis], count or 0, pool.strides[axis], pool.dilations[axis], begin)


def _taps(axis: Axis) -> list[int]:
    """The taps that are inside x, or between two of its rows, for some window."""
    reach = axis.stride * (axis.y - 1)
    return [t for t in range(axis.kernel) if axis.shift(t) + reach >= 0 and axis.shift(t) < axis.x]


_BY_AXES = (known_sizes, some_elements, few_phases, few_taps, rows_inside, compared)


@lowering("MaxPoolGrad", "axes", requires=_BY_AXES)
def by_axes(e: Emitter, n: Call, spec: PoolSpec) -> ir.Value:
    """Comparisons with the maxima over one axis after the other."""
    x, pool = n["X"], spec.pool
    axes = [_axis(pool, axis) for axis in range(pool.rank)]
    lead = e.size_mul(*e.dims(x)[:2])
    behind, found, largest = 1, [], x
    for at, axis in reversed(list(enumerate(axes))):  # the axes behind are already pooled
        before = e.size_mul(lead, *(a.x for a in axes[:at]))
        windows = _Windows.of(e, axis, largest, before, behind)
        found.append(windows)
        largest, behind = windows.largest, behind * axis.y
    g, own = n["dY"], own_pool(e, n)
    select = own is not None and meets_a_pole(own.outputs[0])
    for windows in reversed(found):
        g = windows.hand_back(e, g, select=select)
    return e.reshape_like(g, x)


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows along one axis of values [before, size, behind]: the rows of each tap, and their maxima.

    Rows have the shape [before, count, behind], without a trailing 1: the runtime pads rows of one element slowly.
    """

    axis: Axis
    before: Dim
    behind: int
    rows: tuple[ir.Value, ...]
    largest: ir.Value

    @classmethod
    def of(cls, e: Emitter, axis: Axis, v: ir.Value, before: Dim, behind: int) -> _Windows:
        tail, blocks = _tail(behind), _blocks(axis)
        phases = [e.reshape(v, [before, axis.x, *tail])]
        if axis.stride > 1:
            whole = e.pad(phases[0], [0], [blocks * axis.stride - axis.x], [1], -math.inf)
            whole = e.reshape(whole, [before, blocks, axis.stride, *tail])
            if axis.stride <= _PHASES:
                parts = e.ops("Split", whole, outputs=axis.stride, axis=2, num_outputs=axis.stride)
            else:  # more results than one shader can write
                parts = tuple(e.slice(whole, [phase], [phase + 1], [2]) for phase in range(axis.stride))
            phases = [e.reshape(part, [before, blocks, *tail]) for part in parts]
        rows = []
        for tap in _taps(axis):
            block, phase = divmod(axis.shift(tap), axis.stride)
            rows.append(_moved(e, phases[phase], blocks, -block, block + axis.y - blocks, -math.inf))
        return cls(axis, before, behind, tuple(rows), reduce(partial(e.op, "Max"), rows))

    def hand_back(self, e: Emitter, g: ir.Value, *, select: bool) -> ir.Value:
        """Add g [before, count, behind] to the first row of each window that is not less than the maximum.

        Of a window with NaN that is the first row. `select`: g may be infinite, and 0 times infinity is NaN.
        """
        axis, taps, tail, blocks = self.axis, _taps(self.axis), _tail(self.behind), _blocks(self.axis)
        rest = e.reshape(g, [self.before, axis.y, *tail])
        parts: list[ir.Value | None] = [None] * axis.stride
        for tap, row in zip(taps, self.rows, strict=True):
            mine, last = rest, tap == taps[-1]
            inside = axis.reached(tap)
            if not last or len(inside) < axis.y:
                less = e.compare("Less", row, self.largest)
                if len(inside) < axis.y:  # padding equals the maximum of a window of -inf
                    outside = np.ones((1, axis.y, *[1] * len(tail)), bool)
                    outside[:, inside] = False
                    less = e.op("Or", less, e.const(outside))
                left = e.where(less, rest, 0) if select else e.mul(rest, e.mask(less, rest))
                mine, rest = e.where(less, 0, rest) if select else e.sub(rest, left), left
            block, phase = divmod(axis.shift(tap), axis.stride)
            mine = _moved(e, mine, axis.y, block, blocks - axis.y - block, 0)
            old = parts[phase]
            parts[phase] = mine if old is None else e.add(old, mine)
        given = next(part for part in parts if part is not None)
        size = [self.before, blocks, 1, *tail]
        whole = e.concat([e.reshape(part or e.zeros_like(given), size) for part in parts], 2)
        return e.slice(e.reshape(whole, [self.before, blocks * axis.stride, *tail]), [0], [axis.x], [1])


def _blocks(axis: Axis) -> int:
    """Number of whole strides that cover the rows."""
    return -(-axis.x // axis.stride)


def _tail(behind: int) -> list[int]:
    return [behind] if behind > 1 else []


def _moved(e: Emitter, v: ir.Value, size: int, front: int, back: int, fill: float) -> ir.Value:
    """Add rows of `fill` in front of and behind the rows of v [_, size, ...]; negative numbers remove rows.

    In two nodes, since the runtime pads and trims slowly in one.
    """
    v = e.slice(v, [max(-front, 0)], [size - max(-back, 0)], [1])
    return e.pad(v, [max(front, 0)], [max(back, 0)], [1], fill)
