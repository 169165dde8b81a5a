"""The rows of the GPU table, and a clock that limits the total time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benchmarks.program import ms, table

Kernels: TypeAlias = Sequence[tuple[str, float, int]]
"""Name, total seconds and number of runs of each kernel of a call, longest first."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check or measurement; a pair is PyTorch's number and ours, `None` was not measured."""

    what: str
    precision: str = "float32"
    error: float | None = None
    limit: float | None = None
    seconds: tuple[float | None, float | None] = (None, None)
    memory: tuple[int | None, int | None] = (None, None)
    launches: tuple[int | None, int | None] = (None, None)
    kernels: tuple[Kernels, Kernels] = ((), ())
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.error is not None and self.limit is not None and not self.error <= self.limit


@dataclass
class Clock:
    """Stops measuring when the time is up; the remaining rows say so. With `only`, names must contain one of its texts."""

    minutes: float
    only: Sequence[str] = ()
    start: float = field(default_factory=time.monotonic)

    @property
    def up(self) -> bool:
        return time.monotonic() - self.start > 60 * self.minutes

    def wants(self, what: str, precision: str) -> bool:
        return not self.only or any(text in f"{what} {precision}" for text in self.only)

    def row(self, what: str, precision: str, measure: Callable[..., Row], *arguments: Any) -> Iterator[Row]:
        """Measure one row, if it is wanted; a failure becomes a row too, so that the rest of the table is measured."""
        if not self.wants(what, precision):
            return
        if self.up:
            yield Row(what=what, precision=precision, note=f"left out: {self.minutes:g} minutes are over")
            return
        try:
            yield measure(*arguments)
        except Exception as problem:  # noqa: BLE001 - shown in the table and by the exit status
            text = " ".join(str(problem).split())
            yield Row(what=what, precision=precision, error=float("nan"), limit=0.0, note=f"failed: {text[:160]}")


def show(rows: Sequence[Row]) -> str:
    """The table of all rows."""
    columns = ["", "type", "error", "PyTorch ms", "ours ms", "ratio", "MB", "kernels", "note"]
    return table(columns, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    theirs, ours = row.seconds
    error = "-" if row.error is None else f"{row.error:.1e}{' FAIL' if row.failed else ''}"
    ratio = f"{ours / theirs:.2f}" if ours and theirs else "-"
    memory = _pair(*(None if n is None else round(n / 1e6) for n in row.memory))
    return [row.what, row.precision, error, ms(theirs), ms(ours), ratio, memory, _pair(*row.launches), row.note]


def _pair(theirs: int | None, ours: int | None) -> str:
    if theirs is None and ours is None:
        return "-"
    return f"{'-' if theirs is None else theirs} / {'-' if ours is None else ours}"


def print_layers(stored: Sequence[Mapping[str, Any]]) -> None:
    """The stored rows of layers: milliseconds of both sides and their ratio."""
    body = []
    for row in stored:
        theirs, ours = row["seconds"]
        body.append(
            [row["what"], row["precision"], f"{row['error']:.1e}", ms(theirs), ms(ours), f"{ours / theirs:.2f}"]
        )
    print(table(["x * w", "type", "gradients differ by", "PyTorch ms", "ours ms", "ratio"], body))


def print_steps(stored: Sequence[Mapping[str, Any]]) -> None:
    """The stored rows of training steps: milliseconds of both sides, their ratio, and gigabytes."""
    body = []
    for row in stored:
        (theirs, ours), (held, own) = row["seconds"], row["memory"]
        times = [ms(theirs), ms(ours), f"{ours / theirs:.2f}"]
        body.append(
            [row["what"], row["precision"], f"{row['error']:.1e}", *times, f"{held / 1e9:.1f}", f"{own / 1e9:.1f}"]
        )
    print(table(["", "type", "loss differs by", "PyTorch ms", "ours ms", "ratio", "PyTorch GB", "ours GB"], body))
