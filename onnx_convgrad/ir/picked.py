"""Whether the gradient of a gather is faster as a product with a 0/1 matrix than as a scatter."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.ir.dims import dims_equal, known, static_dims

__all__ = ["has_few_rows", "takes_one_of_few"]

_FEW = 256


def takes_one_of_few(x: ir.Value, indices: ir.Value, axis: int) -> bool:
    """Whether GatherElements reads one entry of each row along `axis`, and the rows are short and not along the last axis.

    A scatter runs on one thread and takes 50 times as long per index.
    """
    if x.shape is None or indices.shape is None or len(x.shape) != len(indices.shape):
        return False
    rank = len(x.shape)
    size, axis = known(x.shape[axis]), axis % rank
    others = (dims_equal(x.shape[i], indices.shape[i]) for i in range(rank) if i != axis)
    return known(indices.shape[axis]) == 1 and size is not None and size <= _FEW and axis < rank - 1 and all(others)


def has_few_rows(x: ir.Value, size: int, axis: int) -> bool:
    """Whether a product with a 0/1 matrix (2 ns per row and index) is faster than a scatter (9 ns per element).

    The matrix may have about as many elements as the cotangent.
    """
    dims = static_dims(x)
    if dims is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return False
    width = math.prod(d or 0 for i, d in enumerate(dims) if i != axis % len(dims))  # 0 where a size is unknown
    return size <= min(_FEW, 8 + width)
