"""What `explain` does, once its options are understood."""

# ruff: noqa: T201 - commands print

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from json import dumps, loads
from pathlib import Path
from typing import Any

from onnx_convgrad.cli.placement import Placement, placement, predicted_placement
from onnx_convgrad.cli.tables import Output, Table, ms_text
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.pipeline.known_sizes import gain_of_sizes
from onnx_convgrad.pipeline.report import Report
from onnx_convgrad.pipeline.stages import Built, build

__all__ = ["run"]


def run(
    model: Path,
    arguments: Mapping[str, Any],
    out: Output,
    *,
    json: bool,
    every: bool = False,
    placed: bool = False,
    providers: Sequence[str] = (),
) -> None:
    """Per convolution its geometry, then one line per lowering that applies, and those that do not if `every` is wanted.

    And where the nodes run, if `placed`.
    """
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
        rows = [row for choice in choices for row in _candidate_rows(choice, every=every)]
        out.table(Table(["gradient", "lowering", "predicted", ""], rows, frozenset({2}), title=f"{node}: {spec}"))
    used = Counter(f"{choice.op_type} by {choice.chosen}" for choice in report.choices)
    listed = "; ".join(f"{count} {what}" for what, count in used.most_common())
    out.line(f"Convolutions and pools: {len(groups)}; target {report.target}: {listed or 'no such gradient is needed'}")
    if report.recomputation is not None:
        out.line(str(report.recomputation))
    if report.gain is not None:
        out.line(str(report.gain))
    for table in found.tables if found else []:
        out.table(table)


def _placement(built: Built, target: str, providers: Sequence[str], stage: Callable[[str], None]) -> Placement:
    """By a session where the providers are named or the target is the CPU; else by the table of CUDA's kernels."""
    stage("placing")
    proto = whole_proto(built.model)
    if not providers and target == "cuda":
        return predicted_placement(proto)
    return placement(proto, providers=list(providers) or None)


def _candidate_rows(choice: Choice, *, every: bool) -> list[list[str]]:
    """The chosen lowering first, then the others from fast to slow, then the rejected ones with their reasons."""
    shown = [c for c in choice.candidates if every or not c.reason]
    left = len(choice.candidates) - len(shown)

    def order(name: str, seconds: float | None) -> tuple[bool, bool, float]:
        return name != choice.chosen, seconds is None, seconds or 0.0

    rows: list[list[str]] = []
    for c in sorted(shown, key=lambda c: order(c.name, c.seconds)):
        note = (
            ("forced" if choice.forced else "chosen")
            if c.name == choice.chosen
            else f"not used: {c.reason}"
            if c.reason
            else ""
        )
        rows.append([choice.op_type if not rows else "", str(c), "" if c.seconds is None else ms_text(c.seconds), note])
    if left:
        rows.append(["", f"{left} more", "", "not used: see -v"])
    return rows
