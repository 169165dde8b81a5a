"""The command `check`: compare gradients with numeric ones and PyTorch's, or those of a provider with the CPU's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.command import Model, command, own_option
from onnx_convgrad.cli.shared_options import data_option, provider_option
from onnx_convgrad.cli.tables import Output, Table, shape_text
from onnx_convgrad.errors import first_few
from onnx_convgrad.pipeline.options import Loading, Options

if TYPE_CHECKING:
    import numpy as np

    from onnx_convgrad.checking.report import CheckReport, ProviderRow, Row
    from onnx_convgrad.pipeline.built import Built

_TARGETS = {"CUDAExecutionProvider": "cuda", "WebGpuExecutionProvider": "web"}
"""Provider -> the target whose graphs it runs; others take portable ones."""

_FOLD = 20
"""Most rows that are shown without `--verbose`."""

_VERDICTS = {
    "rounding": "the same graph agrees in float64; float32 cannot be more precise on these inputs (values cancel or"
    " saturate).",
    "kinks": "PyTorch agrees; the numeric derivative is unreliable, because these inputs are on kinks (a ReLU of exact"
    " zeros) or the model's results in float64 round by more.",
    "undetermined": "the numeric derivative is unreliable: the model's results in float64 round by more, or kinks lie"
    " between its points. Try other inputs (--seed) or values (--of, such as logits before a softmax).",
}


@command(leave=("cotangents", "per_sample", "straight_through"), verbose="all values.", wrt="all")
def check(
    model: Model,
    *,
    options: Options,
    loading: Loading,
    data: Annotated[list[str] | None, data_option("Its first batch replaces random inputs.")] = None,
    seed: Annotated[int, own_option("INT", of="checking.check:verify_numerically(seed)", min=0)] = 0,
    directions: Annotated[int, own_option("INT", of="checking.check:verify_numerically(samples)", min=1)] = 1,
    provider: Annotated[
        str | None,
        provider_option(
            "cuda, webgpu, openvino ... Compare the gradients that it computes with those of the CPU instead, and fail if a"
            " node falls back to the CPU. Without --target, the graph is built for it.",
        ),
    ] = None,
    out: Output,
) -> int:
    """Compare gradients with numeric ones and PyTorch's.

    \b
    Example:
      onnx-convgrad check model.onnx --input-shape image:2,3,64,64
      onnx-convgrad check model.onnx --data inputs.npz
      onnx-convgrad check model.onnx --provider cuda
    """
    if provider is not None:
        return _check_provider(model, loading, options, provider, data, seed, out)
    from onnx_convgrad.checking.check import verify_numerically
    from onnx_convgrad.pipeline.stages import build

    with out.stages():
        # the derivatives are those of the numbers of the model itself, and other outputs may need inputs of other shapes
        options = replace(options, straight_through=False, outputs=False)
        built = build(loaded := loading.load(model), options)
        feed = _first_batch(built, data) if data else None
        report = verify_numerically(built, loaded, feed=feed, seed=seed, samples=directions)
    out.print_json({"model": str(model), "data": data, **report.to_dict()})
    show(report, out, data)
    return 0 if report.passed else 1


def _first_batch(built: Built, data: list[str]) -> Mapping[str, np.ndarray]:
    """The first samples of data, as many as the model takes at a time, or up to 32."""
    from onnx_convgrad.data.batches import Loader
    from onnx_convgrad.data.files import read_data, require_preprocessing
    from onnx_convgrad.evaluation.calibration import inputs_manifest
    from onnx_convgrad.training.stream_states import StreamStates

    announce("reading the data")
    source, manifest = read_data(data), inputs_manifest(built.primal)
    require_preprocessing(source, manifest)
    batch = next(Loader(source, manifest, shuffle=False, prefetch=0).epoch_iterator(0))
    fed = StreamStates(manifest).fed(batch)
    return {port.name: fed[port.name] for port in manifest.data}


def _check_provider(
    model: Path, loading: Loading, options: Options, provider: str, data: list[str] | None, seed: int, out: Output
) -> int:
    """Compare the gradients on a provider with those on the CPU; 1 if they differ or a node falls back."""
    from onnx_convgrad.checking.check import compare_with_cpu
    from onnx_convgrad.cli.placement import placement
    from onnx_convgrad.ir.serialize import whole_proto
    from onnx_convgrad.pipeline.stages import build
    from onnx_convgrad.runtime import import_runtime
    from onnx_convgrad.runtime.providers import CPU, check_available, resolve_providers

    name = resolve_providers(provider)[0][0]
    check_available(import_runtime(), [name])
    if options.target.name == "cpu" and name != CPU:
        options = replace(options, target=replace(options.target, name=_TARGETS.get(name, "portable")))
    with out.stages():
        built = build(loading.load(model), replace(options, outputs=False))
        announce("placing")
        placed = placement(whole_proto(built.model), providers=[name])
        feed = _first_batch(built, data) if data else None
        report = compare_with_cpu(built, name, feed=feed, seed=seed)
    passed = report.passed and not placed.fallen
    placing = {"target": options.target.name, "placement": placed.to_dict()}
    out.print_json({"model": str(model), "data": data, **report.to_dict(), "passed": passed, **placing})
    out.line(f"{_inputs(report.inputs, data, seed)}; target {options.target.name}")
    rows = [[*_named(r), _error(r.error), _error(r.limit), r.verdict] for r in report.rows]
    out.table(Table(["value", "shape", "|grad|", "error", "limit", ""], rows, {2, 3, 4}), fold=_FOLD)
    out.line()
    for table in placed.tables:
        out.table(table, fold=_FOLD)
    if report.failure:
        out.line(f"FAIL: {report.failure}")
    agree = sum(row.verdict == "ok" for row in report.rows)
    fell = f"; {len(placed.fallen)} nodes fell back to the CPU" if placed.fallen else ""
    out.line(f"{agree} of {len(rows)} gradients on {name} agree with the CPU{fell}.")
    return 0 if passed else 1


def _inputs(shapes: Mapping[str, Sequence[int]], data: list[str] | None, seed: int) -> str:
    """The inputs that were compared, in words."""
    listed = ", ".join(f"{name} {shape_text(shape)}" for name, shape in shapes.items()) or "none"
    origin = f"Inputs from {' '.join(data)}" if data else "Random inputs"
    return f"{origin}: {listed} (seed {seed})"


def show(report: CheckReport, out: Output, data: list[str] | None = None) -> None:
    """Print the errors per value and the meaning of the verdicts; unless verbose, only failures and the largest errors."""
    out.line(_inputs(report.inputs, data, report.seed))
    count = len(report.rows)
    shown = report.rows if out.verbose or count <= _FOLD + 2 else _notable(report)
    out.table(_table(shown, compared=any(row.torch is not None for row in report.rows)))
    if len(shown) < count:
        out.line(f"... and {count - len(shown)} more that agree (-v shows all)")
    out.line(f"Numeric: relative error against directional derivatives of the model in {report.precision}.")
    if report.reason:
        out.line(f"It cannot be evaluated in float64: {report.reason}.")
    out.line(f"PyTorch: {report.pytorch}.")
    _show_verdicts(report, out)


def _table(shown: Sequence[Row], *, compared: bool) -> Table:
    """One row per gradient, with a column for PyTorch if it was `compared`."""
    rows = []
    for row in shown:
        limit = max(row.numeric_limit, row.torch_limit if compared else 0)
        errors = [row.numeric, row.torch] if compared else [row.numeric]
        rows.append([*_named(row), *map(_error, errors), f"{limit:.0e}", row.verdict])
    columns = ["value", "shape", "|grad|", "numeric", *(["PyTorch"] if compared else []), "limit", ""]
    return Table(columns, rows, range(2, len(columns) - 1))


def _show_verdicts(report: CheckReport, out: Output) -> None:
    """Explain each doubt, name the gradients that are not finite, and count those that agree."""
    counts = Counter(row.verdict for row in report.rows)
    for verdict, meaning in _VERDICTS.items():
        if counts[verdict]:
            out.line(f"{verdict}: {meaning}")
    infinite = [row.value for row in report.rows if not math.isfinite(row.norm)]
    if infinite:
        out.line(f"FAIL: not finite on these inputs (a kink such as that of a root at 0?): {first_few(infinite)}")
    notes = f", {counts['rounding']} of them in float64 only" if counts["rounding"] else ""
    rest = "".join(f" {counts[v]} {v}." for v in ("undetermined", "FAIL") if counts[v])
    agree = sum(counts[v] for v in ("ok", "rounding", "kinks"))
    out.line(f"{agree} of {len(report.rows)} gradients agree{notes}.{rest}")


def _notable(report: CheckReport) -> list[Row]:
    """Every failure and doubt, and the largest errors among the rest, in the order of the report."""
    rows = report.rows
    by_error = sorted(rows, key=lambda row: (row.ok, row.verdict == "ok", -max(row.numeric or 0, row.torch or 0)))
    kept = {row.value for row in by_error[: max(sum(row.verdict != "ok" for row in rows), _FOLD)]}
    return [row for row in rows if row.value in kept]


def _named(row: Row | ProviderRow) -> list[str]:
    return [row.value, shape_text(row.shape), f"{row.norm:.3g}"]


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
