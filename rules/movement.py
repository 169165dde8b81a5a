"""The adjoint of any operator that copies elements, for the rules of slicing and indexing.

    y[j] = x[p(j)]        dx[i] = sum of g[j] over all j with p(j) = i

The operator applied to `positions(x)`, the numbers 0, 1, 2, ..., gives p itself, at run time and for any rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter, static_dims
from onnx_convgrad.ir.scatter import scatter


def extent(e: Emitter, value: ir.Value, start: int, stop: int | None = None) -> Dim:
    """The product of the dimensions `start:stop`; the rank may be unknown."""
    dims = static_dims(value)
    part = None if dims is None else dims[start:stop]
    if part is not None and None not in part:
        return math.prod(d for d in part if d is not None)
    return e.op("ReduceProd", e.op("Shape", value, start=start or None, end=stop), keepdims=1)


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
    dims = static_dims(value)
    return value if dims is not None and len(dims) == 1 else e.op("Reshape", value, e.ints([-1]))


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
