"""MaxPool and MaxUnpool.

y[n, c, p] = x.flat[i[n, c, p]]      the node's own Indices say which element won
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.emit import Dim, Emitter, static_dims
from onnx_convgrad.graph.namespace import Namespace
from onnx_convgrad.registry import Call, Cotangents, linear, vjp
from onnx_convgrad.rules.pool import Pool, valid_taps


@vjp("MaxPool", wrt=("X",))
def max_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[p] = x.flat[i[p]]: dx.flat[j] = sum over the p with i[p] = j of g[p]. Ties go where i points."""

    def x_grad() -> ir.Value:
        x, gy = n["X"], g["Y"]
        pool = Pool.of(n, x)
        by_corners = _has_corners(e, pool, x) and not n.node.outputs[1:]
        winners = _winners_by_corners(e, x, n.out("Y")) if by_corners else _indices(e, n)
        if e.target.ordered_sums and not _may_be_empty(pool):
            return _in_order(e, pool, gy, winners, x)
        if _may_be_empty(pool):
            lowest = np.finfo((x.dtype or ir.DataType.FLOAT).numpy()).min
            found = e.compare("Greater", n.out("Y"), e.scalar(lowest, x))
            winners, gy = e.op("Where", found, winners, e.const(np.int64(0))), e.where(found, gy, 0)
        if _unpools(e, pool, x):  # half the time of a scatter
            result = e.op("MaxUnpool", gy, winners, e.shape(x), kernel_shape=pool.kernel, strides=pool.strides)
            return e.typed(result, x)
        return scatter_flat(e, gy, winners, x)

    return {"X": x_grad}


def _has_corners(e: Emitter, pool: Pool, x: ir.Value) -> bool:
    """Whether 2x2 windows tile the whole of x, which the cache holds: beyond it the passes cost what the indices do."""
    if not pool.tiles or pool.kernel != (2, 2) or x.dtype != ir.DataType.FLOAT or "MaxUnpool" in e.target.missing:
        return False
    if any(size is None or size == 0 or size % 2 for size in pool.sizes):
        return False
    return 4 * math.prod(size or 1 for size in static_dims(x) or [1]) <= e.target.rates.cache


def _winners_by_corners(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    """Indices of the maxima of 2x2 windows, from pools without indices, which are many times faster.

    In a window of rows a, b and c, d the first row wins if max(a, b) = y, and its first column if a = y; in the second
    row, where a < y, the first column wins if max(a, c) = y.
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
    rows, columns = np.arange(1, height, 2), np.arange(1, width, 2)  # of d, the last of its window
    last = e.const((rows[:, None] * width + columns).reshape(-1))
    count = e.squeeze(e.vector([e.size_mul(planes[0], plane)]), [0])
    first = e.op("Range", e.const(np.int64(0)), count, e.const(np.int64(plane)))
    ends = e.op("Add", e.unsqueeze(first, [1]), last)
    sizes = static_dims(x) or [None]
    exact = None not in sizes and math.prod(size or 0 for size in sizes) <= _EXACT
    if exact:  # whole numbers are subtracted on one thread
        indices = e.cast(e.sub(e.cast(ends, ir.DataType.FLOAT), before), ir.DataType.INT64)
    else:
        indices = e.op("Sub", ends, e.cast(before, ir.DataType.INT64))
    return e.reshape(indices, e.dims(y))


_EXACT = 1 << 24
"""Whole numbers up to here are float32 too."""


def _unpools(e: Emitter, pool: Pool, x: ir.Value) -> bool:
    """Whether MaxUnpool can scatter: no element is shared, and none left over, where its indices are ambiguous."""
    whole = all(size is not None and size % k == 0 for size, k in zip(pool.sizes, pool.kernel, strict=True))
    return pool.tiles and whole and x.dtype == ir.DataType.FLOAT and "MaxUnpool" not in e.target.missing


def _in_order(e: Emitter, pool: Pool, gy: ir.Value, winners: ir.Value, x: ir.Value) -> ir.Value:
    """Windows that share elements are scattered apart from each other, and the results added in order.

    Every m-th window, with m strides no shorter than a window, shares none: no index repeats, and nothing is added.
    """
    axes = range(2, 2 + pool.rank)
    counts = [-(-pool.span(axis) // pool.strides[axis]) for axis in range(pool.rank)]
    sizes = [e.dim(gy, axis) for axis in axes]
    zeros = e.op("Expand", e.scalar(0, gy), e.vector([_size(e, x)]))
    parts = []
    for first in itertools.product(*map(range, counts)):
        if any(isinstance(size, int) and start >= size for start, size in zip(first, sizes, strict=True)):
            continue
        some, where = (e.slice(v, first, sizes, axes, counts) for v in (gy, winners))
        parts.append(e.reshape_like(_scatter(e, zeros, where, some), x))
    return e.typed(e.sum(parts), x)


def _indices(e: Emitter, n: Call) -> ir.Value:
    """Row-major positions of the maxima in x as a flat tensor; the node is made to produce them if it does not."""
    node = n.node
    if n.int("storage_order", 0) == 1:
        attributes = {**n.attributes(), "storage_order": 0}
        return e.ops("MaxPool", n["X"], outputs=2, **attributes)[1]
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    indices = node.outputs[1]
    if not indices.name:  # an unnamed optional result would be removed as unused
        indices.name = Namespace.of_values(e.graph).claim(f"{n.y.name}_indices")
    indices.dtype = ir.DataType.INT64
    if indices.shape is None and n.y.shape is not None:
        indices.shape = n.y.shape
    return indices


def _may_be_empty(pool: Pool) -> bool:
    """Whether some window may see nothing but padding; its index is then meaningless. It takes dilation."""
    for axis in range(pool.rank):
        if pool.dilations[axis] == 1 or pool.pads is None:
            continue
        low, high = pool.pads[axis]
        if low == 0 and high == 0 and not pool.ceil:
            continue
        if pool.sizes[axis] is None or 0 in valid_taps(pool, axis, end_counts=False):
            return True
    return pool.pads is None and set(pool.dilations) != {1}


def scatter_flat(e: Emitter, updates: ir.Value, indices: ir.Value, like: ir.Value) -> ir.Value:
    """A tensor of the shape of `like`, zero but for the sums of `updates` at flat positions `indices`."""
    wide = e.cast(updates, ir.DataType.FLOAT) if updates.dtype == ir.DataType.FLOAT16 else updates
    zeros = e.op("Expand", e.scalar(0, wide), e.vector([_size(e, like)]))
    flat = _scatter(e, zeros, indices, wide, "add")
    if wide is not updates:
        flat = e.cast(flat, ir.DataType.FLOAT16)
    return e.reshape_like(flat, like)


def _scatter(
    e: Emitter, data: ir.Value, indices: ir.Value, updates: ir.Value, reduction: str | None = None
) -> ir.Value:
    """A vector with `updates` written, or added, at `indices`; both may have any shape."""
    row = e.op("Reshape", updates, e.ints([-1]))
    if "ScatterElements" in e.target.missing:
        return e.op("ScatterND", data, e.op("Reshape", indices, e.ints([-1, 1])), row, reduction=reduction)
    return e.op("ScatterElements", data, e.op("Reshape", indices, e.ints([-1])), row, axis=0, reduction=reduction)


def _size(e: Emitter, value: ir.Value) -> Dim:
    if value.shape is not None:
        return e.size_mul(*e.dims(value))
    return e.op("Reshape", e.op("Size", value), e.ints([1]))


@linear("MaxUnpool", wrt=("X",))
def max_unpool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y.flat[i[p]] = x[p]: dx[p] = g.flat[i[p]]; where indices repeat, the last one was written and takes it all."""

    def x_grad() -> ir.Value:
        x, indices = n["X"], n["I"]
        minus = e.ints([-1])
        gx = e.op("Gather", e.op("Reshape", g["output"], minus), indices, axis=0)
        kernel = n.ints("kernel_shape") or ()
        strides = n.ints("strides") or (1,) * len(kernel)
        if all(k <= s for k, s in zip(kernel, strides, strict=True)):  # indices of disjoint windows never repeat
            return e.typed(gx, x)
        where = e.op("Reshape", indices, minus)
        count = e.op("Size", indices)
        order = e.op("Range", e.const(np.int64(0)), count, e.const(np.int64(1)))
        size = e.op("Reshape", e.op("Size", g["output"]), e.ints([1]))
        owner = e.op("ScatterElements", e.op("Expand", e.const(np.int64(0)), size), where, order, axis=0)
        kept = e.compare("Equal", e.op("Gather", owner, where, axis=0), order)
        return e.where(e.op("Reshape", kept, e.shape(indices), allowzero=1), e.typed(gx, x), 0)

    return {"X": x_grad}
