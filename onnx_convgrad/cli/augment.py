"""What `augment` does, once its options are understood."""

# ruff: noqa: T201 - commands print

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from json import dumps, loads
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnx_convgrad.checking.check import verify_numerically
from onnx_convgrad.cli.check import show as show_check
from onnx_convgrad.cli.rewrite import described, rewrite
from onnx_convgrad.cli.tables import Output, Table, shape_text
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.parameters import parameters
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.notes import SEEDS
from onnx_convgrad.pipeline.stages import Built, Progress, build

__all__ = ["run"]

_FOLD = 8
"""Most gradients that are shown without being asked for."""


def run(
    model: Path, output: Path | None, arguments: Mapping[str, Any], out: Output, *, check: bool, every: bool, json: bool
) -> int:
    """Build, write, tell; the exit status."""
    if check and arguments.get("per_sample"):
        raise ArgumentError("--check knows ordinary gradients only.", hint="Leave out --per-sample and --squared-norm.")

    def change(source: ir.Model, progress: Progress) -> Built:
        return build(source, **arguments, progress=progress)

    built, done = rewrite(model, output, out, change)
    done = replace(done, parameters=_parameter_count(built.primal))
    report = None
    if check:
        with out.stages() as stage:
            report = verify_numerically(built, of=arguments["of"], progress=stage)
    gradients = _gradient_rows(built.model, built.gradients)
    status = 0 if report is None or report.passed else 1
    if json:
        checked = report.to_dict() if report else None
        print(dumps({**done.to_dict(), "gradients": gradients, "check": checked}, indent=2))
        return status
    done.show(out, every=every)
    _seeds_line(built.model.metadata_props[SEEDS], out)
    table, more = _gradient_table(gradients, every=every)
    out.table(table)
    if more:
        out.line(more)
    if report:
        out.line()
        show_check(report, out, every=every)
    return status


def _seeds_line(seeds: str, out: Output) -> None:
    taken: dict[str, str] = loads(seeds)
    if taken:
        listed = ", ".join(f"{name} (of {target})" for target, name in taken.items())
        out.line(f"\nFeed the cotangents: {listed}\n")
    else:
        out.line("\nNo cotangent is to be fed.\n")


def _parameter_count(primal: ir.Model) -> int:
    """Number of trainable values in a canonical model."""
    return sum(v.const_value.size for v in parameters(primal.graph) if v.const_value is not None)


def _gradient_rows(model: ir.Model, gradients: Mapping[str, str]) -> list[dict[str, Any]]:
    """Per gradient: the value, the output that holds it, its dtype and shape."""
    values = named_values(model.graph)
    return [{"value": name, "output": output, **_typed(values[output])} for name, output in gradients.items()]


def _typed(value: ir.Value) -> dict[str, Any]:
    return {k: v for k, v in described(value).items() if k != "name"}


def _gradient_table(rows: list[dict[str, Any]], *, every: bool = False) -> tuple[Table, str]:
    """The gradients, folded when there are many, and the line that says how many more there are."""
    shown = rows if every or len(rows) <= _FOLD + 2 else rows[:_FOLD]
    cells = [[row["value"], row["output"], shape_text(row["shape"]), row["dtype"] or "?"] for row in shown]
    more = f"... and {len(rows) - len(shown)} more (-v shows all)" if len(shown) < len(rows) else ""
    return Table(["gradient of", "output", "shape", "dtype"], cells), more
