"""The command `quantize`: from a float model to one of integers (tool: may change in a minor version)."""

# ruff: noqa: RUF009 - `option` makes a field

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.command import Model, command, own_option
from onnx_convgrad.cli.figures import CONTRAST, FAINT, INK, OURS, no_formula, panels, picture
from onnx_convgrad.cli.shared_options import (
    ImageOptions,
    check_outputs,
    data_option,
    out_option,
    plot_option,
    preprocessing_of,
)
from onnx_convgrad.cli.tables import Output, Table, shape_text, shortened
from onnx_convgrad.errors import shown
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


@command(verbose="all layers and operators.")
def quantize(
    model: Model,
    output: Annotated[
        Path | None, out_option("the quantized model. [default: <stem>.quantized.onnx beside the model]")
    ] = None,
    *,
    data: Annotated[list[str], data_option("A few hundred samples, without labels.")],
    test: Annotated[list[str] | None, own_option("[NAME=]PATH", _TEST)] = None,
    plot: Annotated[Path | None, plot_option("errors of the layers")] = None,
    options: QuantizeOptions,
    out: Output,
) -> None:
    """Quantize a float model to integer weights and activations.

    \b
    Example:
      onnx-convgrad quantize model.onnx --data images
      onnx-convgrad quantize model.onnx --data x.npz --method brecq --weights int4 --plot layers.png
    """
    from onnx_convgrad.cli.rewrite import rewrite
    from onnx_convgrad.data.files import read_data, require_preprocessing
    from onnx_convgrad.evaluation.calibration import inputs_manifest
    from onnx_convgrad.frontend.files import read
    from onnx_convgrad.frontend.load import load
    from onnx_convgrad.frontend.metadata import describe
    from onnx_convgrad.quantization.quantize import QuantizationSettings, run

    chosen = {f.name: getattr(options, f.name) for f in fields(QuantizationSettings) if f.name != "per_channel"}
    settings = QuantizationSettings(**chosen, per_channel=not options.per_tensor)
    check_outputs([*data, *(test or [])], output, plot=plot)

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
        _plot(report, plot, model.name)
    out.print_json({**rewritten.to_dict(), **report.to_dict(), "test": scores})
    rewritten.show(out)
    out.line()
    _show(report, out)
    if scores:
        out.line()
        rows = [[name, *(f"{value:.4f}" for value in pair)] for name, pair in scores.items()]
        out.table(Table(["on the test data", "float", "quantized"], rows, {1, 2}))
    if plot is not None:
        out.line(f"The plot is in {plot}.")


class _Quantized(NamedTuple):
    model: ir.Model
    report: QuantizationReport


def _scores(
    model: Path, quantized: Path, test: list[str], options: QuantizeOptions, out: Output
) -> dict[str, tuple[float, float]]:
    """Metric -> its values for the float and the quantized model."""
    from onnx_convgrad.data.files import read_data
    from onnx_convgrad.evaluation.evaluate import evaluation
    from onnx_convgrad.evaluation.predict import described
    from onnx_convgrad.evaluation.predictor import open_model

    with out.stages("evaluating"):
        opened = open_model(str(model), input_values=options.input_values), open_model(str(quantized))
        predictors = [described(p, None, preprocessing_of(p.manifest, options)) for p in opened]
        before, after = (evaluation(p, read_data(test)).metrics for p in predictors)
    return {name: (value, after[name]) for name, value in before.items() if name in after}


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
    out.table(Table(columns, rows, range(3, len(columns))), fold=_ROWS)
    out.line()
    columns = ["output", "nearest dB", *([] if plain else [f"{report.method} dB"])]
    rows = [
        [name, decibels(before), *([] if plain else [decibels(after)])]
        for name, (before, after) in report.outputs.items()
    ]
    out.table(Table(columns, rows, range(1, len(columns))))
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


# -- the plot ----------------------------------------------------------------------------------------------------------

_WIDTH, _LEFT, _TOP, _BOTTOM, _ROW = 8.0, 3.4, 1.3, 0.9, 0.27
"""Inches: the figure, labels, headline, axis and legend, one layer."""

_LETTERS = 26
"""Most letters of a weight's name."""


def _plot(report: QuantizationReport, path: Path, title: str) -> None:
    """Draw the signal-to-noise ratio of each layer, with rounding to the nearest and with the method."""
    rows = [
        *((row.node, shape_text(row.shape), row.nearest, row.after) for row in report.layers),
        *((name, "output", before, after) for name, (before, after) in report.outputs.items()),
    ]
    size = _WIDTH, _TOP + _BOTTOM + _ROW * max(len(rows), 4)
    about = f"{report.method}: weights {report.weights}, activations {report.activations}"
    details = f"signal to noise against the float model on {report.samples} samples"
    with picture(path, size, title, about, details) as figure:
        (axis,) = panels(figure, left=_LEFT, right=0.24, top=_TOP, bottom=_BOTTOM)
        places = range(len(rows))
        nearest, after = (
            [error.signal_to_noise for error in side] for side in zip(*(row[2:] for row in rows), strict=True)
        )
        for y, ends in enumerate(zip(nearest, after, strict=True)):
            axis.plot(ends, [y, y], color=FAINT, lw=1, zorder=1)
        for points, color, label in ((nearest, CONTRAST, "nearest"), (after, OURS, report.method)):
            axis.plot(points, places, "o", ms=6, color=color, mec="white", mew=0.7, label=label)
        labels = [no_formula(f"{shortened(shown(name), _LETTERS)}   {shape}") for name, shape, *_ in rows]
        axis.set_yticks(places, labels, size=8, color=INK, family="monospace")
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel("decibels; more is better")
        axis.grid(axis="x")
        figure.legend(loc="lower right", bbox_to_anchor=(0.98, 0.0), ncol=2, handletextpad=0.2)
