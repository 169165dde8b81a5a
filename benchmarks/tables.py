"""Markdown tables, means, and saved measurements."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean; NaN for no ratios."""
    ratios = list(ratios)
    return statistics.geometric_mean(ratios) if ratios else float("nan")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    rows = [list(row) for row in rows]
    widths = [max(3, *(len(row[i]) for row in [list(columns), *rows])) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(("-" * (w + 1) + ":") if i else "-" * (w + 2) for i, w in enumerate(widths)) + "|"
    return "\n".join([line(columns), rule, *map(line, rows)])


def ms(seconds: float | None) -> str:
    """Milliseconds with three digits."""
    return "-" if seconds is None else f"{1e3 * seconds:.2f}" if seconds < 0.0995 else f"{1e3 * seconds:.0f}"


def save(path: Path | None, kind: str, machine: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write one table's measurements as JSON."""
    if path:
        path.write_text(json.dumps({"table": kind, "machine": machine, "rows": list(rows)}, indent=1))


def saved(paths: Iterable[Path], kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine and the rows of one table, from files that `save` wrote in several runs."""
    parts = [json.loads(path.read_text()) for path in paths]
    parts = [part for part in parts if part["table"] == kind]
    if not parts:
        raise SystemExit(f"No measurements of {kind!r} in these files.")
    return parts[0]["machine"], [row for part in parts for row in part["rows"]]
