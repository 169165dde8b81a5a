"""One entry of each row, picked by GatherElements: whether the way back can be a product with zeros and ones."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.dims import dims_equal, known

__all__ = ["takes_one_of_few"]

_FEW = 256


def takes_one_of_few(x: ir.Value, indices: ir.Value, axis: int) -> bool:
    """Whether every row of `x` along `axis`, which is not the last, is short, and one entry of it is read."""
    if x.shape is None or indices.shape is None or len(x.shape) != len(indices.shape):
        return False
    rank = len(x.shape)
    size, axis = known(x.shape[axis]), axis % rank
    others = (dims_equal(x.shape[i], indices.shape[i]) for i in range(rank) if i != axis)
    return known(indices.shape[axis]) == 1 and size is not None and size <= _FEW and axis < rank - 1 and all(others)
