"""The best value so far of one column of a history."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import positive
from onnx_convgrad.errors import ArgumentError

Mode = Literal["auto", "min", "max"]

_VALIDATION = "Values that begin with `val_` are those of validation data: fit(..., validation=...), --validation."


class Best:
    """The best value so far of one column of a history.

    Args:
        monitor: Name of the column.
        mode: Whether smaller (`"min"`) or larger (`"max"`) is better; `"auto"`: smaller if the name contains `loss`.
        margin: Smallest change that counts as an improvement.
        relative: Whether `margin` is a share of the best value.
    """

    def __init__(self, monitor: str, mode: Mode, margin: float = 0.0, *, relative: bool | None = None) -> None:
        check_names([mode], ["auto", "min", "max"], "mode")
        if not isinstance(monitor, str):
            raise ArgumentError(f"monitor must be the name of a column of the history, not {monitor!r}.")
        positive(margin, "min_delta" if relative is None else "threshold")
        self.monitor, self.margin, self.relative = monitor, margin, bool(relative)
        self.sign = 1 if mode == "min" or (mode == "auto" and "loss" in monitor) else -1
        self.value: float | None = None

    def read(self, row: Mapping[str, Any]) -> float:
        """The value of the column in a row; raises `ArgumentError` if the row has no number of this name."""
        if isinstance(row.get(self.monitor), (list, type(None))):
            columns = [k for k, v in row.items() if isinstance(v, float)]
            unmeasured = self.monitor.startswith("val_") and not any(k.startswith("val_") for k in columns)
            check_names([self.monitor], columns, "monitored value", _VALIDATION if unmeasured else "")
        return float(row[self.monitor])

    def improves(self, value: float) -> bool:
        """Take a value; return whether it is better than all before it. A NaN never is."""
        if self.value is not None:
            margin = self.margin * self.value if self.relative else self.margin
            if not self.sign * value < self.sign * self.value - margin:
                return False
        elif math.isnan(value):
            return False
        self.value = value
        return True
