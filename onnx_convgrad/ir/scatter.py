"""Add values at positions of a tensor of zeros, with an operator that the target runs.

`ScatterElements` is the general form. `Col2Im` adds whole windows at once, and `MaxUnpool` writes one maximum per window.
`ScatterND` with `reduction="add"` would need no expanded indices, but ONNX Runtime's CPU provider runs it on several threads
that overwrite each other's sums where an index repeats.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.pooling import Pool

_NARROW = frozenset((ir.DataType.FLOAT16, ir.DataType.BFLOAT16))

# -- along one axis ----------------------------------------------------------------------------------------------------


def scatter(
    e: Emitter, data: ir.Value, indices: ir.Value, updates: ir.Value, axis: int, reduction: str = "none"
) -> ir.Value:
    """ScatterElements. Half precision is reduced in float32: there is no kernel for it, and long sums need the digits."""
    narrow = updates.dtype if reduction != "none" and updates.dtype in _NARROW else None
    a, b = (e.cast(v, ir.DataType.FLOAT) if narrow else v for v in (data, updates))
    result = e.op("ScatterElements", a, indices, b, axis=axis, reduction=None if reduction == "none" else reduction)
    return e.typed(e.cast(result, narrow) if narrow else result, data)


def scatter_add(e: Emitter, like: ir.Value, indices: ir.Value, g: ir.Value, axis: int) -> ir.Value:
    """Sums of `g` at `indices` along `axis` (both of one shape) in zeros of the shape of `like`."""
    return scatter(e, e.zeros_like(like), indices, g, axis, "add")


_MOST_COPIES = 1024
"""Most operands of a Concat of equal zeros; for more, one operand holds all of them."""


def insert_zeros(e: Emitter, value: ir.Value, like: ir.Value, steps: dict[int, int]) -> ir.Value:
    """`step - 1` zeros after every element of some axes: [m] -> [m, 1] -> [m, s] -> [m s]; `like` has the same rank.

    A Concat adds the zeros: ONNX Runtime's CPU provider takes 5 to 20 times as long for a Pad of single elements.
    """
    if not steps:
        return value
    rank = len(value.shape) if value.shape is not None else e.rank(like)
    sizes = [e.dim(value, axis) for axis in range(rank)]
    for axis, step in sorted(((axis % rank, step) for axis, step in steps.items()), reverse=True):
        single = [*sizes[: axis + 1], 1, *sizes[axis + 1 :]]
        each, copies = (1, step - 1) if step <= _MOST_COPIES else (step - 1, 1)
        zeros = e.op("Expand", e.scalar(0, value), e.vector([*sizes[: axis + 1], each, *sizes[axis + 1 :]]))
        sizes[axis] = e.size_mul(sizes[axis], step)
        value = e.reshape(e.concat([e.reshape(value, single), *[zeros] * copies], axis + 1), sizes)
    return value


# -- windows -----------------------------------------------------------------------------------------------------------


def adds_windows(e: Emitter, g: ir.Value) -> bool:
    """Whether the target runs the operator that `add_windows` emits, for the dtype of `g`."""
    return g.dtype == ir.DataType.FLOAT and "Col2Im" not in e.target.missing


def add_windows(
    e: Emitter, g: ir.Value, before: Dim, after: int, *, taps: Dim, tap: int, starts: Dim, step: int = 1
) -> ir.Value:
    """The sums of `g[b, i, j, a]` at `[b, tap i + step j, a]`, with as many rows as the windows reach."""
    far = [e.size_mul(e.size_sub(count, 1), by) for count, by in ((taps, tap), (starts, step))]
    span = e.size_add(e.size_add(far[0], far[1]), 1)
    last = after == 1  # the windows lie along the image's rows
    image = e.op(
        "Col2Im",
        e.op("Reshape", g, e.vector([before, taps, e.size_mul(starts, after)]), allowzero=1),
        e.vector([1, span] if last else [span, after]),
        e.vector([1, taps] if last else [taps, 1]),
        strides=[1, step] if last else [step, 1],
        dilations=[1, tap] if last else [tap, 1],
    )
    return e.op("Reshape", image, e.vector([before, span, after]), allowzero=1)


# -- flat positions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Winners:
    """Row-major positions of the maxima in x, and which windows have one; `None`: all have."""

    indices: ir.Value
    exist: ir.Value | None


def scatter_to_maxima(e: Emitter, pool: Pool, gy: ir.Value, winners: Winners, x: ir.Value) -> ir.Value:
    """gx.flat[j] = sum over the p with i[p] = j of gy[p], in the shape of x."""
    indices = winners.indices
    if e.target.ordered_sums and winners.exist is None:
        return _scatter_in_order(e, pool, gy, indices, x)
    if winners.exist is not None:
        indices, gy = e.op("Where", winners.exist, indices, e.const(np.int64(0))), e.where(winners.exist, gy, 0)
    unpooled = _unpool(e, pool, gy, indices, x)
    return _scatter_flat(e, gy, indices, x) if unpooled is None else unpooled


def _scatter_flat(e: Emitter, updates: ir.Value, indices: ir.Value, like: ir.Value) -> ir.Value:
    """Sums of `updates` at the row-major positions `indices` of a tensor of the shape of `like`, zero elsewhere."""
    wide = e.cast(updates, ir.DataType.FLOAT) if updates.dtype == ir.DataType.FLOAT16 else updates
    zeros = e.op("Expand", e.scalar(0, wide), e.vector([_size(e, like)]))
    flat = _scatter_rows(e, zeros, indices, wide, "add")
    if wide is not updates:
        flat = e.cast(flat, ir.DataType.FLOAT16)
    return e.reshape_like(flat, like)


def _scatter_in_order(e: Emitter, pool: Pool, updates: ir.Value, indices: ir.Value, like: ir.Value) -> ir.Value:
    """Add one update per window of a pool at its position, with the terms of each sum added in a fixed order.

    Every m-th window, with m strides no shorter than a window, shares no element: its updates are scattered without a
    reduction, and the results for all residues modulo m are added one after the other.
    """
    axes = range(2, 2 + pool.rank)
    counts = [-(-pool.span(axis) // pool.strides[axis]) for axis in range(pool.rank)]
    sizes = [e.dim(updates, axis) for axis in axes]
    zeros = e.op("Expand", e.scalar(0, updates), e.vector([_size(e, like)]))
    parts = []
    for first in itertools.product(*map(range, counts)):
        if any(isinstance(size, int) and start >= size for start, size in zip(first, sizes, strict=True)):
            continue
        some, where = (e.slice(v, first, sizes, axes, counts) for v in (updates, indices))
        parts.append(e.reshape_like(_scatter_rows(e, zeros, where, some), like))
    return e.typed(e.sum(parts), like)


def _unpool(e: Emitter, pool: Pool, updates: ir.Value, indices: ir.Value, like: ir.Value) -> ir.Value | None:
    """Add one update per window of a pool by MaxUnpool, in half the time; `None` where it does not apply.

    No two windows may share an element, and none may be left over, because then the indices of MaxUnpool are ambiguous.
    """
    whole = all(size is not None and size % k == 0 for size, k in zip(pool.sizes, pool.kernel, strict=True))
    if not (pool.tiles and whole and like.dtype == ir.DataType.FLOAT and "MaxUnpool" not in e.target.missing):
        return None
    result = e.op("MaxUnpool", updates, indices, e.shape(like), kernel_shape=pool.kernel, strides=pool.strides)
    return e.typed(result, like)


def _scatter_rows(
    e: Emitter, data: ir.Value, indices: ir.Value, updates: ir.Value, reduction: str | None = None
) -> ir.Value:
    """A vector with `updates` written, or added, at `indices`; both may have any shape."""
    row = e.op("Reshape", updates, e.ints([-1]))
    if "ScatterElements" in e.target.missing:
        return e.op("ScatterND", data, e.op("Reshape", indices, e.ints([-1, 1])), row, reduction=reduction)
    return e.op("ScatterElements", data, e.op("Reshape", indices, e.ints([-1])), row, axis=0, reduction=reduction)


def _size(e: Emitter, value: ir.Value) -> Dim:
    """The number of elements of a value."""
    if value.shape is not None:
        return e.size_mul(*e.dims(value))
    return e.op("Reshape", e.op("Size", value), e.ints([1]))
