"""The command `quantize`: from a float model to one of integers (tool: may change in a minor version)."""

# ruff: noqa: RUF009 - `option` makes a field

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.command import Model, command
from onnx_convgrad.cli.data_options import ImageOptions
from onnx_convgrad.cli.shared_options import data_option, out_option, plot_option
from onnx_convgrad.cli.tables import Output, Table, shape_text
from onnx_convgrad.pipeline import option_text as text
from onnx_convgrad.pipeline.command_options import option, same
from onnx_convgrad.pipeline.options import shared

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnx_convgrad.quantization.measure import Error, QuantizationReport

_ROWS = 16
"""Most layers in the table without `--verbose`."""

_QUANTIZE = "quantization.quantize:quantize"
_TEST = "As --data, with labels: the scores of both models on it."


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions(ImageOptions):
    """Options of `quantize`, as `onnx_convgrad.transforms.quantize` documents them."""

    method: str = same(f"{_QUANTIZE}(method)")
    weights: str = same(f"{_QUANTIZE}(weights)", "TYPE")
    activations: str = same("quantization.insert:insert_quantizers(activations)", "TYPE")
    per_tensor: bool = option(text="One scale for a whole weight instead of its channels.", default=False)
    calibration: str = same(f"{_QUANTIZE}(calibration)")
    exclude: Any = option("NAMES...", of="quantization.insert:insert_quantizers", parse=text.names, default=())
    iterations: int | None = option(of=_QUANTIZE)
    lr: float | None = option(of=_QUANTIZE, text="[default: 0.01; qat: 0.0001]")
    batch_size: int = same(f"{_QUANTIZE}(batch_size)")
    samples: int = same(f"{_QUANTIZE}(samples)")
    seed: int = same(f"{_QUANTIZE}(seed)")
    bits: float | None = option(of=_QUANTIZE)
    size: float | None = option("SIZE", of=_QUANTIZE, parse=text.weight_size)
    sensitivity: str = same(f"{_QUANTIZE}(sensitivity)")
    input_values: Mapping[str, Any] | None = shared("input_values")


@command(source=QuantizeOptions, verbose="all layers and operators.")
def quantize(
    model: Model,
    output: Annotated[
        Path | None, out_option("the quantized model. [default: <stem>.quantized.onnx beside the model]")
    ] = None,
    *,
    data: Annotated[list[str], data_option("A few hundred samples, without labels.")],
    test: Annotated[list[str] | None, typer.Option("--test", metavar="[NAME=]PATH", help=_TEST)] = None,
    plot: Annotated[Path | None, plot_option("errors of the layers")] = None,
    given: dict[str, Any],
    out: Output,
) -> None:
    """Quantize a float model to integer weights and activations.

    \b
    Example:
      onnx-convgrad quantize model.onnx --data images
      onnx-convgrad quantize model.onnx --data x.npz --method brecq --weights int4 --plot layers.png
    """
    from onnx_convgrad.cli.data_options import keep_data, preprocessing_of
    from onnx_convgrad.cli.figures import check_plot
    from onnx_convgrad.cli.quantize_plot import plot as draw
    from onnx_convgrad.cli.rewrite import rewrite
    from onnx_convgrad.data.files import read_data, require_preprocessing
    from onnx_convgrad.evaluation.calibration import inputs_manifest
    from onnx_convgrad.frontend.files import read
    from onnx_convgrad.frontend.load import load
    from onnx_convgrad.frontend.metadata import describe
    from onnx_convgrad.quantization.quantize import QuantizationSettings, run

    options = QuantizeOptions(**given)
    chosen = {f.name: getattr(options, f.name) for f in fields(QuantizationSettings) if f.name != "per_channel"}
    settings = QuantizationSettings(**chosen, per_channel=not options.per_tensor)
    if plot is not None:
        check_plot(plot)
    keep_data([*data, *(test or [])], output, plot)

    def change() -> _Quantized:
        announce("reading the data")
        source = read_data(data)
        real = read(model)
        describe(real, preprocessing=preprocessing_of(inputs_manifest(real), options))
        require_preprocessing(source, inputs_manifest(real))
        return _Quantized(*run(load(real, input_values=options.input_values), source, settings))

    result, rewritten = rewrite(model, output, out, change, "quantized")
    report = result.report
    scores = _scores(model, rewritten.output, test, options, out) if test else {}
    if plot is not None:
        draw(report, plot, model.name)
    if out.json:
        out.print_json({**rewritten.to_dict(), **report.to_dict(), "test": scores})
        return
    rewritten.show(out)
    out.line()
    _show(report, out)
    if scores:
        out.line()
        rows = [[name, *(f"{value:.4f}" for value in pair)] for name, pair in scores.items()]
        out.table(Table(["on the test data", "float", "quantized"], rows, frozenset({1, 2})))
    if plot is not None:
        out.line(f"The plot is in {plot}.")


@dataclass(frozen=True, slots=True)
class _Quantized:
    model: ir.Model
    report: QuantizationReport


def _scores(
    model: Path, quantized: Path, test: list[str], options: QuantizeOptions, out: Output
) -> dict[str, tuple[float, float]]:
    """Metric -> its values for the float and the quantized model."""
    from onnx_convgrad.cli.data_options import preprocessing_of
    from onnx_convgrad.data.files import read_data
    from onnx_convgrad.evaluation.evaluate import evaluation
    from onnx_convgrad.evaluation.predict import described
    from onnx_convgrad.evaluation.predictor import open_model

    with out.stages("evaluating"):
        opened = [open_model(str(model), input_values=options.input_values), open_model(str(quantized))]
        both = [
            evaluation(described(p, None, preprocessing_of(p.manifest, options)), read_data(test)).metrics
            for p in opened
        ]
    return {name: (both[0][name], both[1][name]) for name in both[0] if name in both[1]}


def _show(report: QuantizationReport, out: Output) -> None:
    """Print the error of each layer and output: signal to noise in decibels, higher is better."""
    plain, mixed = report.method == "nearest", any(row.sensitivity is not None for row in report.layers)
    columns = ["layer", "operator", "weight", *(["bits", "bytes", "sensitivity"] if mixed else []), "nearest dB"]
    columns += [] if plain else [f"{report.method} dB", "changed"]
    rows = [
        [
            row.node,
            row.operator,
            shape_text(row.shape),
            *([str(row.bits), str(row.bytes), f"{row.sensitivity or 0:.2g}"] if mixed else []),
            decibels(row.nearest),
            *([] if plain else [decibels(row.after), f"{row.changed:.1%}"]),
        ]
        for row in report.layers
    ]
    out.table(Table(columns, rows, frozenset(range(3, len(columns)))), fold=_ROWS)
    out.line()
    columns = ["output", "nearest dB", *([] if plain else [f"{report.method} dB"])]
    rows = [
        [name, decibels(before), *([] if plain else [decibels(after)])]
        for name, (before, after) in report.outputs.items()
    ]
    out.table(Table(columns, rows, frozenset(range(1, len(columns)))))
    if mixed:
        weights = {row.weight: (row.bytes, math.prod(row.shape)) for row in report.layers}
        total, count = (sum(pair[i] for pair in weights.values()) for i in (0, 1))
        out.line(f"All weights have {total} bytes, {8 * total / count:.2f} bits each on average.")
    out.line(
        f"Signal to noise against the float model on {report.samples} samples; weights {report.weights}, activations"
        f" {report.activations}."
    )


def decibels(error: Error) -> str:
    """The signal-to-noise ratio as text; `exact` without any difference."""
    return "exact" if math.isinf(error.signal_to_noise) else f"{error.signal_to_noise:.1f}"
