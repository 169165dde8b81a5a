"""Data sets of Hugging Face's `datasets`: a table whose rows are read in any order."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnx_convgrad.data.datasets import Dataset, Rows
from onnx_convgrad.data.inputs import USUAL_TARGETS, as_array
from onnx_convgrad.errors import ArgumentError


class Columns(Dataset):
    """The columns of a `datasets.Dataset` as arrays by name; images are decoded to pixels.

    Args:
        table: The data set. `Any`, since its package is not a dependency.
    """

    slow = True

    def __init__(self, table: Any) -> None:
        self.table = table.with_format("numpy")

    def __len__(self) -> int:
        return len(self.table)

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        return {name: _of_one_shape(name, as_array(column)) for name, column in self.table[rows].items()}

    def class_numbers(self) -> np.ndarray | None:
        names = [name for name in self.table.column_names if name.lower() in USUAL_TARGETS]
        labels = as_array(self.table.select_columns(names)[:][names[0]]) if len(names) == 1 else np.zeros(0)
        return labels if labels.dtype.kind in "biu" and labels.ndim == 1 else None

    def describe(self) -> dict[str, Any]:
        return {"kind": "columns", "samples": len(self), "columns": list(self.table.column_names)}


def _of_one_shape(name: str, column: np.ndarray) -> np.ndarray:
    """The column; raises `ArgumentError` if its rows are arrays of several shapes."""
    rows = column.flat if column.dtype == object else ()
    shapes = list(dict.fromkeys(row.shape for row in rows if isinstance(row, np.ndarray)))
    if not shapes:
        return column
    raise ArgumentError(
        f"The rows of the column {name!r} have several shapes, such as {' and '.join(map(str, shapes[:2]))}.",
        hint="Bring them to one shape with map (resize images). Leave out batch(): batch_size= says how many go together.",
    )


def is_columns(source: object) -> bool:
    """Whether an object is a `datasets.Dataset`; one that streams (`IterableDataset`) is not."""
    return all(hasattr(source, name) for name in ("column_names", "with_format", "select_columns", "__len__"))
