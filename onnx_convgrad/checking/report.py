"""The reports of checks: one row for each gradient, with a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onnx_convgrad.base.forms import finite


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
        head = {"passed": self.passed, "precision": self.precision, "pytorch": self.pytorch, "seed": self.seed}
        return as_json({**head, "reason": self.reason or None}, self.inputs, self.rows)


@dataclass(frozen=True, slots=True)
class ProviderRow:
    """One gradient: its norm on the CPU, the relative distance of the provider's from it, and the largest allowed one."""

    value: str
    shape: tuple[int, ...]
    norm: float
    error: float
    limit: float

    @property
    def verdict(self) -> str:
        """`ok` or `FAIL`."""
        return "ok" if self.error <= self.limit else "FAIL"


@dataclass(frozen=True, slots=True)
class ProviderReport:
    """The comparison of a provider with the CPU.

    Attributes:
        provider: Its name in ONNX Runtime.
        rows: One for each gradient; all errors are infinite if the provider failed.
        inputs: Shapes of the inputs that were drawn.
        seed: The seed that they were drawn with.
        failure: The runtime's message if the provider failed.
    """

    provider: str
    rows: tuple[ProviderRow, ...]
    inputs: Mapping[str, tuple[int, ...]]
    seed: int
    failure: str = ""

    @property
    def passed(self) -> bool:
        return all(row.verdict == "ok" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as data for JSON; infinity and NaN become null."""
        head = {"provider": self.provider, "passed": self.passed, "failure": self.failure, "seed": self.seed}
        return as_json(head, self.inputs, self.rows)


def as_json(
    head: Mapping[str, object], inputs: Mapping[str, tuple[int, ...]], rows: Sequence[Row | ProviderRow]
) -> dict[str, Any]:
    """A report with its rows and their verdicts; infinity and NaN become null."""
    found = {**head, "inputs": inputs, "rows": [{**asdict(row), "verdict": row.verdict} for row in rows]}
    result: dict[str, Any] = finite(found)
    return result
