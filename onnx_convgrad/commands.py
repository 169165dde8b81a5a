"""What `augment`, `explain` and `check` do, once their options are understood."""

# ruff: noqa: T201 - commands print

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from json import dumps, loads
from pathlib import Path
from typing import Any

from onnx_convgrad import files
from onnx_convgrad.checking.check import CheckReport, Row, verify_numerically
from onnx_convgrad.checking.check import check as check_gradients
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.known_sizes import gain_of_sizes
from onnx_convgrad.lower import Choice
from onnx_convgrad.pipeline import SEEDS_KEY, Built, build, load
from onnx_convgrad.placement import Placement, placement, predicted_placement
from onnx_convgrad.report import Report
from onnx_convgrad.summary import Figures, Rewritten, gradient_rows, gradient_table, parameter_count
from onnx_convgrad.tables import Output, Table, ms_text, shape_text

__all__ = ["augment", "check", "explain"]

Arguments = Mapping[str, Any]

_FOLD = 20
"""Most rows of a check that are shown without being asked for."""


# -- augment -----------------------------------------------------------------------------------------------------------


def augment(
    model: Path, output: Path | None, arguments: Arguments, out: Output, *, check: bool, every: bool, json: bool
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
        _print_check(report, out, every=every)
    return status


def _seeds_line(seeds: str, out: Output) -> None:
    taken: dict[str, str] = loads(seeds)
    if taken:
        listed = ", ".join(f"{name} (of {target})" for target, name in taken.items())
        out.line(f"\nFeed the cotangents: {listed}\n")
    else:
        out.line("\nNo cotangent is to be fed.\n")


# -- explain -----------------------------------------------------------------------------------------------------------


def explain(
    model: Path,
    arguments: Arguments,
    out: Output,
    *,
    json: bool,
    placed: bool = False,
    providers: Sequence[str] = (),
) -> None:
    """Per convolution its geometry, then one line per candidate lowering; where the nodes run, if `placed`."""
    with out.stages() as stage:
        built = build(model, **arguments, compare=True, progress=stage)
        found = _placement(built, arguments["target"], providers, stage) if placed or providers else None
        stage("comparing")
        gain = gain_of_sizes(model, built, arguments)
    report = Report(built.choices, built.gradients, arguments["target"], built.recomputation, gain)
    if json:
        content = loads(report.to_json())
        print(dumps(content | ({"placement": found.to_dict()} if found else {}), indent=2))
        return
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in report.choices:
        groups.setdefault((choice.node, str(choice.spec)), []).append(choice)
    for (node, spec), choices in reversed(groups.items()):  # the walk goes backwards
        rows = [row for choice in choices for row in _candidate_rows(choice)]
        out.table(Table(["gradient", "lowering", "predicted", ""], rows, frozenset({2}), title=f"{node}: {spec}"))
    used = Counter(f"{choice.op_type} by {choice.chosen}" for choice in report.choices)
    listed = "; ".join(f"{count} {what}" for what, count in used.most_common())
    out.line(f"{len(groups)} convolutions, target {report.target}: {listed or 'no convolution gradient is needed'}")
    if report.recomputation is not None:
        out.line(str(report.recomputation))
    if report.gain is not None:
        out.line(str(report.gain))
    for table in found.tables if found else []:
        out.table(table)


def _placement(built: Built, target: str, providers: Sequence[str], stage: Callable[[str], None]) -> Placement:
    """By a session where the providers are named or the target is the CPU; else by the table of CUDA's kernels."""
    stage("placing")
    proto = files.whole_proto(built.model)
    if not providers and target == "cuda":
        return predicted_placement(proto)
    return placement(proto, providers=list(providers) or None)


def _candidate_rows(choice: Choice) -> list[list[str]]:
    """The chosen lowering first, then the others from fast to slow, then the rejected ones with their reasons."""

    def order(name: str, seconds: float | None) -> tuple[bool, bool, float]:
        return name != choice.chosen, seconds is None, seconds or 0.0

    rows: list[list[str]] = []
    for c in sorted(choice.candidates, key=lambda c: order(c.name, c.seconds)):
        note = (
            ("forced" if choice.forced else "chosen")
            if c.name == choice.chosen
            else f"not used: {c.reason}"
            if c.reason
            else ""
        )
        rows.append([choice.op_type if not rows else "", str(c), "" if c.seconds is None else ms_text(c.seconds), note])
    return rows


# -- check -------------------------------------------------------------------------------------------------------------


def check(model: Path, arguments: Arguments, out: Output, *, every: bool, json: bool) -> int:
    """Compare, tell; the exit status."""
    with out.stages() as stage:
        report = check_gradients(model, **arguments, progress=stage)
    if json:
        print(dumps({"model": str(model), **report.to_dict()}, indent=2))
    else:
        _print_check(report, out, every=every)
    return 0 if report.passed else 1


def _print_check(report: CheckReport, out: Output, *, every: bool) -> None:
    shapes = ", ".join(f"{name} {shape_text(shape)}" for name, shape in report.inputs.items())
    out.line(f"Random inputs: {shapes or 'none'} (seed {report.seed})")
    compared = any(row.torch is not None for row in report.rows)
    count = len(report.rows)
    shown = list(report.rows) if every or count <= _FOLD + 2 else _notable(report)
    rows = [
        [
            row.value,
            shape_text(row.shape),
            f"{row.norm:.3g}",
            _error(row.numeric),
            *([_error(row.torch)] if compared else []),
            f"{max(row.numeric_limit, row.torch_limit if compared else 0):.0e}",
            "ok" if row.ok else "FAIL",
        ]
        for row in shown
    ]
    failed = sum(not row.ok for row in report.rows)
    columns = ["value", "shape", "|grad|", "numeric", *(["PyTorch"] if compared else []), "limit", ""]
    out.table(Table(columns, rows, frozenset(range(2, len(columns) - 1))))
    if len(shown) < count:
        out.line(f"... and {count - len(shown)} more that agree (-v shows all)")
    out.line(f"Numeric: relative error against directional derivatives of the model in {report.precision}.")
    out.line(f"PyTorch: {report.pytorch}.")
    out.line(f"{count - failed} of {count} gradients agree." + (f" {failed} FAIL." if failed else ""))


def _notable(report: CheckReport) -> list[Row]:
    """Every failure, and the largest errors among the rest, in the order of the report."""
    by_error = sorted(report.rows, key=lambda row: (row.ok, -max(row.numeric or 0, row.torch or 0)))
    failures = sum(not row.ok for row in report.rows)
    kept = {row.value for row in by_error[: max(failures, _FOLD)]}
    return [row for row in report.rows if row.value in kept]


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
