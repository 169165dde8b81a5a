"""Cofactors of matrices in a batch, which ONNX can compute as determinants."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter


def cofactors(e: Emitter, x: ir.Value) -> ir.Value:
    """C[i, j] = (-1)^(i+j) det(X without row i and column j), for matrices X in the last two axes."""
    size = e.dim(x, -1)
    if isinstance(size, int) and size == 1:
        return e.full_like(x, 1)
    others, sign = _minors(e, size, x)
    rows = e.gather(e.reshape(x, [leading_count(e, x, 2), size, size]), others, axis=1)
    both = e.gather(rows, others, axis=3)
    minors = e.op("Det", e.transpose(both, [0, 1, 3, 2, 4]))
    return e.reshape_like(e.mul(minors, sign), x)


def leading_count(e: Emitter, value: ir.Value, last: int) -> Dim:
    """The product of all sizes but the `last` ones. Not -1, which would be ambiguous for an empty tensor."""
    if value.shape is not None:
        return e.size_mul(*(e.dim(value, axis) for axis in range(len(value.shape) - last)))
    return e.op("ReduceProd", e.op("Shape", value, end=-last), keepdims=1)


_LISTED = 1024
"""Most rows of a matrix for which the indices of all minors are a constant."""


def _minors(e: Emitter, size: Dim, like: ir.Value) -> tuple[ir.Value, ir.Value]:
    """For each i the indices other than i, and the signs (-1)^(i+j)."""
    if isinstance(size, int) and size <= _LISTED:
        every = np.arange(size)
        rest = np.arange(max(size - 1, 0))
        signs = 1 - 2 * ((every[:, None] + every) % 2)
        return e.const(rest + (rest >= every[:, None])), e.const(signs, like.dtype or ir.DataType.FLOAT)
    whole = e.arange(size)
    part = e.arange(e.size_sub(size, 1))
    column = e.unsqueeze(whole, [1])
    skipped = e.cast(e.compare("GreaterOrEqual", part, column), ir.DataType.INT64)
    odd = e.op("Mod", e.op("Add", whole, column), e.ints([2]))
    sign = e.op("Sub", e.ints([1]), e.op("Mul", odd, e.ints([2])))
    return e.op("Add", part, skipped), e.cast(sign, like.dtype or ir.DataType.FLOAT)
