"""Memory formats of arrays: channels first (C order), or channels last, in which one axis is innermost in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["axis_to_end", "moved_axis"]


def moved_axis(array: np.ndarray[Any, Any]) -> int | None:
    """The axis that is innermost in memory, of an array that is otherwise in C order; `None` for every other array."""
    if array.flags.c_contiguous:
        return None
    strides, itemsize = array.strides, array.itemsize
    for axis in range(len(strides) - 1):
        if strides[axis] == itemsize and array.transpose(axis_to_end(array.ndim, axis)).flags.c_contiguous:
            return axis
    return None


def axis_to_end(rank: int, axis: int) -> tuple[int, ...]:
    """The permutation that moves one axis to the end."""
    return (*range(axis), *range(axis + 1, rank), axis)


def inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes another one."""
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))
