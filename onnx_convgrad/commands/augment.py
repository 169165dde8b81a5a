"""What `augment` does, once its options are understood."""

# ruff: noqa: T201 - commands print

from __future__ import annotations

import time
from collections.abc import Mapping
from json import dumps, loads
from pathlib import Path
from typing import Any

from onnx_convgrad import files
from onnx_convgrad.checking.check import verify_numerically
from onnx_convgrad.commands.check import show as show_check
from onnx_convgrad.commands.summary import Figures, Rewritten, gradient_rows, gradient_table, parameter_count
from onnx_convgrad.commands.tables import Output
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline import SEEDS_KEY, build, load

__all__ = ["run"]


def run(
    model: Path, output: Path | None, arguments: Mapping[str, Any], out: Output, *, check: bool, every: bool, json: bool
) -> int:
    """Build, write, tell; the exit status."""
    if check and arguments.get("per_sample"):
        raise ArgumentError("--check knows ordinary gradients only.", hint="Leave out --per-sample and --squared-norm.")
    destination = output or files.default_output(model)
    source = load(model)
    files.check_destination(destination, model)
    with out.stages() as stage:
        start = time.perf_counter()
        built = build(source, **arguments, progress=stage)
        seconds = time.perf_counter() - start
        trainable = parameter_count(built.primal)
        before = Figures.of(source, model, trainable)
        stage("writing")
        data = files.write(built.model, destination)
        report = None
        if check:
            report = verify_numerically(built, of=arguments["of"], progress=stage)
    after = Figures.of(load(destination), destination, trainable)
    done = Rewritten(model, destination, data, before, after, seconds)
    gradients = gradient_rows(built.model, built.gradients)
    status = 0 if report is None or report.passed else 1
    if json:
        checked = report.to_dict() if report else None
        print(dumps({**done.to_dict(), "gradients": gradients, "check": checked}, indent=2))
        return status
    done.show(out, every=every)
    _seeds_line(built.model.metadata_props[SEEDS_KEY], out)
    table, more = gradient_table(gradients, every=every)
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
