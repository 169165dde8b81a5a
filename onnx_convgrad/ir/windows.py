"""Tables of indices that hold the windows of an axis, as unfolded images are gathered with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Windows", "windows"]


@dataclass(frozen=True, slots=True)
class Windows:
    """Entry [i, j] of the table is `first + tap i + step j`: element i of window j."""

    first: int
    tap: int
    step: int


def windows(table: np.ndarray) -> Windows | None:
    """What the indices [taps, windows] of a table are, if that is so and none is negative."""
    if table.ndim != 2 or min(table.shape) < 2:
        return None
    first = int(table[0, 0])
    tap, step = int(table[1, 0]) - first, int(table[0, 1]) - first
    found = first + tap * np.arange(table.shape[0])[:, None] + step * np.arange(table.shape[1])
    if first < 0 or tap < 1 or step < 1 or not np.array_equal(table, found):
        return None
    return Windows(first, tap, step)
