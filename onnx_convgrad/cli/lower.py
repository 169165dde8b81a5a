"""What `lower` does, once its options are understood."""

# ruff: noqa: T201 - commands print

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from json import dumps, loads
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnx_convgrad.cli.rewrite import rewrite
from onnx_convgrad.cli.tables import Output, Table
from onnx_convgrad.gradient_ops.lower import Lowered, lower_training_operators
from onnx_convgrad.ir.notes import UPDATES
from onnx_convgrad.pipeline.stages import Progress

__all__ = ["run"]

_FOLD = 10
"""Most gradients that are shown without being asked for."""


def run(
    model: Path, output: Path | None, arguments: Mapping[str, Any], out: Output, *, every: bool, json: bool
) -> None:
    """Lower, write, tell."""

    def change(_: ir.Model, progress: Progress) -> Lowered:
        return lower_training_operators(model, **arguments, progress=progress)  # an ir.Model has no training algorithm

    done, told = rewrite(model, output, out, change, "lowered")
    updates: dict[str, str] = loads(done.model.metadata_props.get(UPDATES, "{}"))
    if json:
        derivatives = [asdict(d) for d in done.derivatives]
        rest = {"operators": done.operators, "gradients": derivatives, "updates": updates}
        print(dumps({**told.to_dict(), **rest}, indent=2))
        return
    told.show(out, every=every)
    _print(done, updates, out, every=every)


def _print(done: Lowered, updates: Mapping[str, str], out: Output, *, every: bool) -> None:
    listed = ", ".join(f"{count} {op}" for op, count in sorted(done.operators.items()))
    out.line(f"\nLowered: {listed or 'nothing, the model has no such operators'}.")
    if updates:
        moved = ", ".join(f"{value} is the next {key}" for key, value in updates.items())
        out.line(f"The training algorithm is part of the graph now: {moved}.")
    rows = [[d.y, d.x, d.output, d.node] for d in done.derivatives]
    shown = rows if every or len(rows) <= _FOLD else rows[:_FOLD]
    if shown:
        out.line()
        out.table(Table(["gradient of", "by", "is", "node"], shown))
    if len(shown) < len(rows):
        out.line(f"... and {len(rows) - len(shown)} more (-v shows all)")
