"""Constant indices of Gather and GatherElements: tables of sliding windows, and picks of one element per row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.dims import dims_equal, known, static_dims

_FEW = 256


def takes_one_of_few(x: ir.Value, indices: ir.Value, axis: int) -> bool:
    """Whether a GatherElements reads one element of each short row of `x` along `axis`, which is not the last.

    Its gradient can then be a product with zeros and ones. A scatter, on one thread, takes 50 times as long per index.
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


@dataclass(frozen=True, slots=True)
class SlidingWindows:
    """A table with the entries `[i, j] = first + tap i + step j`: element i of window j."""

    first: int
    tap: int
    step: int


def sliding_windows(table: np.ndarray) -> SlidingWindows | None:
    """Recognize a table of indices [taps, windows]; `None` if it is another one or has negative entries."""
    if table.ndim != 2 or min(table.shape) < 2:
        return None
    first = int(table[0, 0])
    tap, step = int(table[1, 0]) - first, int(table[0, 1]) - first
    expected = first + tap * np.arange(table.shape[0])[:, None] + step * np.arange(table.shape[1])
    if first < 0 or tap < 1 or step < 1 or not np.array_equal(table, expected):
        return None
    return SlidingWindows(first, tap, step)
