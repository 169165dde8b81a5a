"""The report of a check: one row for each gradient, with a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """One gradient: its norm, its relative errors (`None` without a reference), the verdict.

    `rounding` is the numeric error of the same graph in float64, where float32 fails because of rounding alone.
    `undetermined`: the numeric derivative is not precise enough, because of rounding or kinks, and PyTorch was not compared.
    """

    value: str
    output: str
    shape: tuple[int, ...]
    norm: float
    numeric: float | None
    numeric_limit: float
    torch: float | None
    torch_limit: float
    ok: bool
    rounding: float | None = None
    undetermined: bool = False

    @property
    def verdict(self) -> str:
        """`ok`, `rounding` (correct in float64; float32 cannot resolve it), `kinks`, `undetermined` or `FAIL`.

        `kinks`: PyTorch agrees, and the numeric derivative is not precise enough.
        """
        if not self.ok:
            return "FAIL"
        if self.undetermined or self.rounding is not None:
            return "undetermined" if self.undetermined else "rounding"
        return "kinks" if self.numeric is not None and self.numeric > self.numeric_limit else "ok"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The verdict on every gradient, the inputs used, the precision of the comparison, and why it is not float64."""

    rows: tuple[Row, ...]
    inputs: Mapping[str, tuple[int, ...]]
    precision: str
    pytorch: str
    seed: int
    reason: str = ""

    @property
    def passed(self) -> bool:
        return all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as data for JSON; infinity and NaN become null."""
        rows = [{**asdict(row), "shape": list(row.shape), "verdict": row.verdict} for row in self.rows]
        rows = [{k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()} for row in rows]
        inputs = {name: list(shape) for name, shape in self.inputs.items()}
        head = {"passed": self.passed, "precision": self.precision, "pytorch": self.pytorch, "seed": self.seed}
        head["reason"] = self.reason or None
        return {**head, "inputs": inputs, "rows": rows}
