"""What `check` does, once its options are understood, and how its report is shown."""

# ruff: noqa: T201 - commands print

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

from onnx_convgrad.checking.check import check as check_gradients
from onnx_convgrad.checking.report import CheckReport, Row
from onnx_convgrad.cli.tables import Output, Table, shape_text
from onnx_convgrad.errors import first_few

__all__ = ["run", "show"]

_FOLD = 20
"""Most rows that are shown without being asked for."""

_VERDICTS = {
    "rounding": "in float64 the same graph agrees, and float32 cannot be more precise on these inputs (values cancel or"
    " saturate).",
    "kinks": "PyTorch agrees, and the numeric derivative cannot tell: these inputs are on kinks (a ReLU of exact zeros), or"
    " the model's results in float64 round by more.",
    "undetermined": "the numeric derivative cannot tell: the model's results in float64 round by more, or kinks lie between"
    " its points. Other inputs (--seed-value) or targets (--of, such as logits before a softmax) may.",
}


def run(model: Path, arguments: Mapping[str, Any], out: Output, *, every: bool, json: bool) -> int:
    """Compare, tell; the exit status."""
    with out.stages() as stage:
        report = check_gradients(model, **arguments, progress=stage)
    if json:
        print(dumps({"model": str(model), **report.to_dict()}, indent=2))
    else:
        show(report, out, every=every)
    return 0 if report.passed else 1


def show(report: CheckReport, out: Output, *, every: bool) -> None:
    """The errors per value: every failure, and the largest of the rest unless `every`; then what the verdicts mean."""
    shapes = ", ".join(f"{name} {shape_text(shape)}" for name, shape in report.inputs.items())
    out.line(f"Random inputs: {shapes or 'none'} (seed {report.seed})")
    count = len(report.rows)
    shown = report.rows if every or count <= _FOLD + 2 else _notable(report)
    out.table(_table(shown, compared=any(row.torch is not None for row in report.rows)))
    if len(shown) < count:
        out.line(f"... and {count - len(shown)} more that agree (-v shows all)")
    out.line(f"Numeric: relative error against directional derivatives of the model in {report.precision}.")
    out.line(f"PyTorch: {report.pytorch}.")
    _show_verdicts(report, out)


def _table(shown: Sequence[Row], *, compared: bool) -> Table:
    """One line per gradient; with a column for PyTorch if it was `compared`."""
    rows = [
        [
            row.value,
            shape_text(row.shape),
            f"{row.norm:.3g}",
            _error(row.numeric),
            *([_error(row.torch)] if compared else []),
            f"{max(row.numeric_limit, row.torch_limit if compared else 0):.0e}",
            row.verdict,
        ]
        for row in shown
    ]
    columns = ["value", "shape", "|grad|", "numeric", *(["PyTorch"] if compared else []), "limit", ""]
    return Table(columns, rows, frozenset(range(2, len(columns) - 1)))


def _show_verdicts(report: CheckReport, out: Output) -> None:
    """What each doubt means, which gradients are not finite, and how many agree."""
    told = Counter(row.verdict for row in report.rows)
    for verdict, meaning in _VERDICTS.items():
        if told[verdict]:
            out.line(f"{verdict}: {meaning}")
    infinite = [row.value for row in report.rows if not math.isfinite(row.norm)]
    if infinite:
        out.line(f"FAIL: not finite on these inputs (a kink such as that of a root at 0?): {first_few(infinite)}")
    notes = f", {told['rounding']} of them in float64 alone" if told["rounding"] else ""
    rest = "".join(f" {told[v]} {v}." for v in ("undetermined", "FAIL") if told[v])
    agree = sum(told[v] for v in ("ok", "rounding", "kinks"))
    out.line(f"{agree} of {len(report.rows)} gradients agree{notes}.{rest}")


def _notable(report: CheckReport) -> list[Row]:
    """Every failure and doubt, and the largest errors among the rest, in the order of the report."""
    by_error = sorted(
        report.rows, key=lambda row: (row.ok, row.verdict == "ok", -max(row.numeric or 0, row.torch or 0))
    )
    failures = sum(row.verdict != "ok" for row in report.rows)
    kept = {row.value for row in by_error[: max(failures, _FOLD)]}
    return [row for row in report.rows if row.value in kept]


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
