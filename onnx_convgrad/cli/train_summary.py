"""Print what a training run will do, before its first step."""

from __future__ import annotations

import textwrap

from onnx_convgrad.cli.tables import Output, Table, tell
from onnx_convgrad.errors import shown
from onnx_convgrad.training.summary import Summary

_WIDTH, _INDENT, _ROWS = 79, 12, 12


def print_summary(summary: Summary, out: Output) -> None:
    """Print the summary, and its warnings on stderr."""
    before = ""
    for name, text in summary.lines():
        lines = textwrap.wrap(shown(text), _WIDTH - _INDENT, break_on_hyphens=False) or [""]
        out.line(f"{'' if name == before else name:<{_INDENT}}{lines[0]}")
        for line in lines[1:]:
            out.line(f"{'':<{_INDENT}}{line}")
        before = name
    out.table(Table(["layer", "trained", "frozen"], summary.rows(), frozenset((1, 2))), fold=_ROWS)
    out.line()
    for warning in summary.warnings:
        tell(f"Warning: {warning}")
