"""The command `explain`: show how each gradient of a convolution or pool would be computed, and where nodes run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.command import Model, command, own_option
from onnx_convgrad.cli.tables import Output, Table, bytes_text, count_text, ms_text, shape_text
from onnx_convgrad.cli.view import page_path, write_page
from onnx_convgrad.pipeline.option_text import names
from onnx_convgrad.pipeline.options import Loading, Options

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnx_convgrad.cli.placement import Placement
    from onnx_convgrad.lowering.candidates import Candidate
    from onnx_convgrad.lowering.lower import Choice
    from onnx_convgrad.pipeline.report import Report

_FOLD = 25
"""Most layers of a training program that are shown without `--verbose`."""


@command(verbose="also the lowerings that do not apply, and why.")
def explain(
    model: Model,
    *,
    options: Options,
    loading: Loading,
    placement: Annotated[
        bool, own_option("--placement", "Also show which provider runs each node, and which fall back to the CPU.")
    ] = False,
    providers: Annotated[
        list[str] | None,
        own_option("NAMES", "Implies --placement.", of="training.trainer:Trainer(providers)"),
    ] = None,
    html: Annotated[Path | None, own_option("FILE", "Also write the page that `view` writes.")] = None,
    out: Output,
) -> None:
    """Show how each convolution gradient would be computed.

    If MODEL is the folder of a training program, show memory, operations and files of a step, and what each layer takes.

    \b
    Example:
      onnx-convgrad explain model.onnx --target cuda --input-shape image:8,3,224,224
      onnx-convgrad explain model.onnx --target cuda --placement
      onnx-convgrad explain --training program --input-shape image:8,3,224,224
    """
    if model.is_dir():
        _show_program(model, loading.input_shapes, out)
        return
    from onnx_convgrad.pipeline.report import Report
    from onnx_convgrad.pipeline.stages import build

    placed = None
    drawn = None if html is None else page_path(model, html)
    with out.stages():
        if drawn is not None:
            built = write_page(model, loading, options, drawn)
        else:
            built = build(loading.load(model), replace(options, compare=True))
        if placement or providers:
            placed = _placement(built.model, options.target.name, names(providers or []))
        announce("comparing")
        report = Report.of(built)
    out.print_json(loads(report.to_json()) | ({"placement": placed.to_dict()} if placed else {}))
    _show(report, placed, out)


def _placement(model: ir.Model, target: str, providers: Sequence[str]) -> Placement:
    """Ask ONNX Runtime if providers are named or the target is the CPU; for a GPU use the table of its kernels."""
    from onnx_convgrad.cli.placement import placement, predicted_placement
    from onnx_convgrad.ir.serialize import whole_proto

    announce("placing")
    proto = whole_proto(model)
    if not providers and target in ("cuda", "webgpu"):
        return predicted_placement(proto, target)
    return placement(proto, providers=list(providers) or None)


def _show(report: Report, placed: Placement | None, out: Output) -> None:
    """Print the totals, where nodes run, and a table per convolution or pool; unless verbose, equal tables once."""
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in report.choices:
        groups.setdefault((choice.node, str(choice.spec)), []).append(choice)
    used = Counter(f"{choice.op_type} by {choice.chosen}" for choice in report.choices)
    listed = "; ".join(f"{count} {name}" for name, count in used.most_common())
    out.line(f"Convolutions and pools: {len(groups)}; target {report.target}: {listed or 'no such gradient is needed'}")
    for summary in (report.recomputation, report.memory, report.gain):
        if summary is not None:
            out.line(str(summary))
    out.line()
    for table in placed.tables if placed else []:
        out.table(table)
    if placed and placed.fallen:
        out.line()
    shown: dict[tuple[str, str], tuple[list[str], list[list[str]]]] = {}
    for (node, spec), choices in reversed(groups.items()):  # the walk goes backwards
        rows = [row for choice in choices for row in _candidate_rows(choice, every=out.verbose)]
        shown.setdefault((spec, node if out.verbose else f"{rows}"), ([], rows))[0].append(node)
    for (spec, _), (nodes, rows) in shown.items():
        same = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        title = f"{nodes[0]}{same}: {spec}"
        out.table(Table(["gradient", "lowering", "predicted", ""], rows, {2}, title=title))


def _candidate_rows(choice: Choice, *, every: bool) -> list[list[str]]:
    """List the chosen lowering first, then the others by predicted time, then the rejected ones with their reasons."""

    def order(c: Candidate) -> tuple[bool, bool, float]:
        return c.name != choice.chosen, c.seconds is None, c.seconds or 0.0

    def note(c: Candidate) -> str:
        if c.reason:
            return f"not used: {c.reason}"
        use = ("forced" if choice.forced else "chosen") if c.name == choice.chosen else ""
        return ", ".join(filter(None, (use, c.rounds)))

    shown = sorted((c for c in choice.candidates if every or not c.reason), key=order)
    rows = [["", str(c), "" if c.seconds is None else ms_text(c.seconds), note(c)] for c in shown]
    rows[0][0] = choice.op_type
    if len(shown) < len(choice.candidates):
        rows.append(["", f"{len(choice.candidates) - len(shown)} more", "", "not used: see -v"])
    return rows


# -- training programs --------------------------------------------------------------------------------------------------


def _show_program(folder: Path, input_shapes: Any, out: Output) -> None:
    """Print what a step of the training program in a folder takes: memory, operations, files, and each layer's part."""
    from onnx_convgrad.programs.footprint import footprint
    from onnx_convgrad.programs.program import TrainingProgram

    with out.stages("reading"):
        program = TrainingProgram.load(folder)
        announce("counting")
        f = footprint(program, input_shapes)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    target = program.manifest.options.get("target")
    out.print_json({"program": str(folder), "target": target, "files": files, **f.to_dict()})
    typical = ", ".join(f"{name} = {size}" for name, size in f.typical.items())
    counted = ", ".join(f"{name} {shape_text(shape)}" for name, shape in f.sizes.items())
    out.line(f"{folder.name}: {str(program).strip('<>')}")
    out.line(f"Counted for {counted}" + (f" (typical: {typical}; --input-shape gives others)" if typical else ""))
    parameters, state = (sum(getattr(layer, name) for layer in f.layers) for name in ("parameters", "state"))
    rows = [
        ["memory, at its peak", bytes_text(f.peak)],
        ["  parameters", bytes_text(parameters)],
        ["  state of the optimizer, running statistics", bytes_text(state)],
        ["  data and labels", bytes_text(f.inputs - parameters - state)],
        ["  constants", bytes_text(f.constants)],
        ["  computed values", bytes_text(f.peak - f.inputs - f.constants)],
        *([["not needed: gradients and state of what is not trained", bytes_text(f.saved)]] if f.saved else []),
        *([["not needed: float32 masters of integer weights", bytes_text(f.narrowed)]] if f.narrowed else []),
        ["operations", count_text(f.flops)],
        ["  forward", count_text(sum(layer.forward for layer in f.layers))],
        ["  backward and update", count_text(sum(layer.backward for layer in f.layers))],
        ["files of the program", bytes_text(sum(files.values()))],
        *([f"  {name}", bytes_text(size)] for name, size in files.items()),
    ]
    out.table(Table(["a step takes", ""], rows, {1}))
    out.line()
    layers = [
        [layer.layer, *(bytes_text(n) if n else "" for n in (layer.parameters, layer.state, layer.kept)),
         *(count_text(n) if n else "" for n in (layer.forward, layer.backward))]
        for layer in f.layers
    ]  # fmt: skip
    columns = ["layer", "parameters", "state", "kept", "forward", "backward"]
    out.table(Table(columns, layers, range(1, 6)), fold=_FOLD)
