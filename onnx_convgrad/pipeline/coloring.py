"""Directions that compute several columns of a sparse Jacobian at once.

Columns without a common row add up to one direction: the product with it has the numbers of all of them. Finding few
directions is a coloring (Curtis, Powell, Reid, "On the estimation of sparse Jacobian matrices", 1974); here a greedy one, by
decreasing number of neighbors (Gebremedhin, Manne, Pothen, "What color is your Jacobian?", 2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from onnx_convgrad.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Pattern:
    """The places where a Jacobian may differ from zero.

    Attributes:
        rows, columns: int64 `[entries]`, sorted by row, then by column.
        shape: Sizes of the value of `of` and of the source.
    """

    rows: np.ndarray
    columns: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def of(cls, pattern: Any) -> Self:
        """The pattern of a matrix: an array, or a sparse one of SciPy with its stored entries."""
        sparse = pattern.tocoo() if hasattr(pattern, "tocoo") else None
        matrix = np.asarray(pattern if sparse is None else sparse.data)
        shape = matrix.shape if sparse is None else tuple(sparse.shape)
        if len(shape) != 2 or matrix.dtype.kind not in "biuf":
            raise ArgumentError(
                "sparsity takes a matrix of numbers or booleans, or a sparse matrix of SciPy, not "
                f"{type(pattern).__name__}{'' if len(shape) == 2 else f' of shape {shape}'}.",
                hint="It has a row for each number of `of` and a column for each number of `wrt`.",
            )
        places = np.nonzero(matrix) if sparse is None else (sparse.row, sparse.col)
        flat = np.unique(places[0].astype(np.int64) * shape[1] + places[1])
        return cls(flat // max(shape[1], 1), flat % max(shape[1], 1), (int(shape[0]), int(shape[1])))

    def turned(self) -> Pattern:
        """The transpose, with its entries in the order of this one."""
        return Pattern(self.columns, self.rows, self.shape[::-1])

    def colors(self) -> np.ndarray:
        """A color for each column, int64: no two columns of one color have a common row."""
        members = _grouped(self.rows, self.columns, self.shape[0])
        rows = _grouped(self.columns, self.rows, self.shape[1])
        near = [np.unique(np.concatenate([members[i] for i in own])) if own.size else own for own in rows]
        colors = np.full(self.shape[1], -1, np.int64)
        for column in sorted(range(self.shape[1]), key=lambda j: -near[j].size):
            taken = set(colors[near[column]].tolist())
            colors[column] = next(c for c in range(len(taken) + 1) if c not in taken)
        return colors


def _grouped(keys: np.ndarray, values: np.ndarray, count: int) -> list[np.ndarray]:
    """The values of each key from 0 up to `count`."""
    order = np.argsort(keys, kind="stable")
    return np.split(values[order], np.searchsorted(keys[order], np.arange(1, count))) if count else []
