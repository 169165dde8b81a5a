"""The adjoint of any operator that copies elements, for the rules of slicing and indexing.

    y[j] = x[p(j)]        dx[i] = sum of g[j] over all j with p(j) = i

The operator applied to `positions(x)`, the numbers 0, 1, 2, ..., gives p itself, at run time and for any rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.dims import static_product
from onnx_convgrad.ir.emit import Dim, Emitter, known, static_dims
from onnx_convgrad.ir.indices import has_few_rows, sliding_windows
from onnx_convgrad.ir.scatter import add_windows, adds_windows, scatter


def extent(e: Emitter, value: ir.Value, start: int, stop: int | None = None) -> Dim:
    """The product of the dimensions `start:stop`; the rank may be unknown."""
    part = None if value.shape is None else static_product(value.shape[start:stop])
    return e.op("ReduceProd", e.op("Shape", value, start=start or None, end=stop), keepdims=1) if part is None else part


def size_in(e: Emitter, value: ir.Value) -> Dim:
    """The number in an operand of one element, as a size."""
    number = e.number_of(value)
    return int(number) if number is not None else e.op("Reshape", e.cast(value, ir.DataType.INT64), e.ints([1]))


def entry_of(e: Emitter, vector: ir.Value, i: int) -> Dim:
    """One entry of a vector of integers, as a size."""
    values = e.constant_of(vector)
    if values is not None:
        return int(values.reshape(-1)[i])
    return e.op("Slice", e.cast(vector, ir.DataType.INT64), e.ints([i]), e.ints([i + 1]), e.ints([0]))


def positions(e: Emitter, x: ir.Value) -> ir.Value:
    """The position of each element of `x` in row-major order, as an int64 tensor of the shape of `x`."""
    numbers = e.op("Range", e.const(np.int64(0)), e.op("Size", x), e.const(np.int64(1)))
    result = e.op("Reshape", numbers, e.shape(x), allowzero=1)
    result.dtype = ir.DataType.INT64
    result.shape = x.shape
    return result


def flatten(e: Emitter, value: ir.Value) -> ir.Value:
    """The elements in row-major order, as a vector."""
    return value if value.shape is not None and len(value.shape) == 1 else e.op("Reshape", value, e.ints([-1]))


def adjoint_by_positions(
    e: Emitter, move: Callable[[ir.Value], ir.Value], x: ir.Value, g: ir.Value, *, unique: bool = False
) -> ir.Value:
    """The cotangent of `x` under `y = move(x)`, where `move` only copies elements; `unique`: each at most once."""
    where = move(positions(e, x))
    flat = e.op("Expand", e.scalar(0, g), e.op("Reshape", e.op("Size", x), e.ints([1])))
    if g.dtype is not None:
        flat.dtype = g.dtype
    result = scatter(e, flat, flatten(e, where), flatten(e, g), 0, "none" if unique else "add")
    return e.reshape_like(result, x)


def survive(
    e: Emitter,
    nobody: ir.Value,
    updates: ir.Value,
    write: Callable[[ir.Value, ir.Value], ir.Value],
    read: Callable[[ir.Value], ir.Value],
) -> ir.Value:
    """A mask of the updates that are left after `write(data, updates)`, where later ones overwrite earlier ones.

    `nobody` is an int64 tensor of the shape of the data, and `read` gathers from where the updates are written.
    """
    order = positions(e, updates)
    return e.compare("Equal", read(write(nobody, order)), order)


# -- the adjoint of Gather ---------------------------------------------------------------------------------------------


def ungather(
    e: Emitter, x: ir.Value, indices: ir.Value, gy: ir.Value, axis: int, *, unique: bool = False, finite: bool = True
) -> ir.Value:
    """The cotangent of `x` under `Gather(x, indices, axis)`; `unique`: no index repeats; `finite`: no cotangent is infinite.

    Padding if the indices are a run of rows, a Gather if they are distinct, sums of windows if they unfold an image, a
    product with a 0/1 matrix if x has few rows, else a scatter.
    """
    size = e.dim(x, axis)
    rank = None if indices.shape is None else len(indices.shape)
    chosen = from_start(e.constant_of(indices), size)
    if rank == 0:
        gy = e.unsqueeze(gy, [axis])
    if chosen is not None and rank in (0, 1):
        result = _unpick(e, gy, chosen.reshape(-1), size, axis)
        if result is not None:
            return result
    if rank == 0 or (rank == 1 and indices.shape is not None and known(indices.shape[0]) == 1):
        return _place_row(e, gy, indices, size, axis)
    if 0 in (static_dims(gy) or ()):
        return e.zeros_like(x)
    before, _, after = _block_sizes(e, x, axis)
    block = e.op("Reshape", gy, e.vector([before, extent(e, indices, 0), after]), allowzero=1)
    if chosen is not None:
        result = _add_windows(e, block, chosen, x, axis) or _unpick(e, block, chosen.reshape(-1), size, 1)
        if result is not None:
            return e.reshape_like(result, x)
    if isinstance(size, int) and finite and not unique and has_few_rows(x, size, axis):
        found = hits(e, flatten(e, indices), size, gy, 1)
        return e.reshape_like(e.op("MatMul", found, block), x)
    row = e.op("Reshape", e.cast(indices, ir.DataType.INT64), e.ints([1, -1, 1]))
    where = e.op("Expand", row, e.shape(block))
    like = e.op("Expand", e.scalar(0, gy), e.vector(_block_sizes(e, x, axis)))
    return e.reshape_like(scatter(e, like, where, block, 1, "none" if unique else "add"), x)


def from_start(indices: np.ndarray | None, size: Dim) -> np.ndarray | None:
    """Constant indices counted from the start; unchanged if the size of the axis is unknown."""
    if indices is None or indices.size == 0:
        return None
    return np.where(indices < 0, indices + size, indices) if isinstance(size, int) else indices


_LISTED = 2**24
"""Most rows of which a constant says where each comes from."""


def _unpick(e: Emitter, gy: ir.Value, chosen: np.ndarray, size: Dim, axis: int) -> ir.Value | None:
    """For constant indices: pad a run of rows, or gather distinct rows back, and the other rows from a row of zeros."""
    first, count = int(chosen[0]), len(chosen)
    if (np.diff(chosen) == 1).all() and (first >= 0 or int(chosen[-1]) < 0):
        begin = e.size_add(size, first) if first < 0 else first
        end = e.size_sub(size, first + count) if first >= 0 else -first - count
        return e.pad(gy, [begin], [end], [axis])
    if not isinstance(size, int) or size > _LISTED or len(set(chosen.tolist())) < count:
        return None
    inverse = np.full(size, count, np.int64)
    inverse[chosen] = np.arange(count)
    source = gy if count == size else e.pad(gy, [0], [1], [axis])
    return e.op("Gather", source, e.const(inverse), axis=axis)


def _add_windows(e: Emitter, gy: ir.Value, chosen: np.ndarray, x: ir.Value, axis: int) -> ir.Value | None:
    """For constant indices first + tap i + step j, as in an unfolded image: add whole windows."""
    table = sliding_windows(chosen)
    if table is None or not adds_windows(e, gy):
        return None
    before, size, after = _block_sizes(e, x, axis)
    if not isinstance(after, int):  # it may be 0, and Col2Im refuses windows without elements
        return None
    taps, starts = chosen.shape
    rows = add_windows(e, gy, before, after, taps=taps, tap=table.tap, starts=starts, step=table.step)
    span = (taps - 1) * table.tap + (starts - 1) * table.step + 1
    return e.pad(rows, [table.first], [e.size_sub(size, table.first + span)], [1])


def _place_row(e: Emitter, gy: ir.Value, index: ir.Value, size: Dim, axis: int) -> ir.Value:
    """The cotangent if one row was selected at run time: pad it."""
    row = e.op("Reshape", e.cast(index, ir.DataType.INT64), e.ints([1]))
    begin = e.where(e.compare("Less", row, 0), e.size_add(row, size), row)
    return e.pad(gy, [begin], [e.size_sub(e.size_sub(size, 1), begin)], [axis])


def _block_sizes(e: Emitter, x: ir.Value, axis: int) -> tuple[Dim, Dim, Dim]:
    """The sizes of x with the axes before and after `axis` merged: [before, axis, after]."""
    before = extent(e, x, 0, axis) if axis else 1
    return before, e.dim(x, axis), extent(e, x, axis + 1) if axis != -1 else 1


def hits(e: Emitter, indices: ir.Value, size: int, like: ir.Value, trailing: int) -> ir.Value:
    """[indices = k] for k < size, as 0 and 1, with k along the axis in front of `trailing` others."""
    from_end = e.cast(e.compare("Less", indices, 0), indices.dtype or ir.DataType.INT64)
    place = e.op("Add", indices, e.op("Mul", from_end, e.scalar(size, from_end)))
    numbers = e.const(np.arange(size).reshape(-1, *[1] * trailing), indices.dtype or ir.DataType.INT64)
    return e.mask(e.compare("Equal", place, numbers), like)
