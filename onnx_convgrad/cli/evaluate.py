"""The command `evaluate`: loss, accuracy, precision, recall, F1, AUROC and confusion matrix, as tables, CSV, JSON, plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_convgrad.base.forms import finite
from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.command import command, own_option
from onnx_convgrad.cli.figures import INK, OURS, check_file, no_formula, picture
from onnx_convgrad.cli.shared_options import (
    DataOptions,
    check_outputs,
    in_parts,
    named_inputs,
    opened,
    out_option,
    plot_option,
)
from onnx_convgrad.cli.tables import Output, Table, csv_text
from onnx_convgrad.errors import ArgumentError, shown

if TYPE_CHECKING:
    import numpy as np

    from onnx_convgrad.evaluation.evaluate import Evaluation

_ROWS = 20
"""Most classes in the table without `--verbose`."""

_WIDTH, _PAIRS = 76, 10
"""Characters of a confusion matrix; else the most frequent confusions, at most so many."""

_CORNER = "true \\ predicted"

_CELLS = ("true 0", "false 1", "false 0", "true 1")
"""The numbers in the confusion matrix of one label."""

_COLUMNS = ("label", "precision", "recall", "f1", "auroc", "support")

_SUFFIXES = (".csv", ".json")


@command(verbose="all classes.")
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN", help="An ONNX file, or a folder that `train` made.")],
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA...",
            help="A folder with one folder of images per class, a .csv or .tsv of images and texts, .npz, or "
            "[NAME=]FILE.npy.",
        ),
    ],
    *,
    output_file: Annotated[Path | None, out_option("a .csv (by class) or .json file.")] = None,
    plot: Annotated[Path | None, plot_option("the confusion matrix")] = None,
    top: Annotated[int, own_option("INT", of="evaluation.evaluate:evaluate(top)")] = 5,
    mapped: Annotated[
        list[str] | None,
        own_option("--map INPUT=ARRAY", "target=ARRAY names the labels.", of="evaluation.evaluate:evaluate(names)"),
    ] = None,
    options: DataOptions,
    out: Output,
) -> None:
    """Evaluate a model on data with labels.

    \b
    Example:
      onnx-convgrad evaluate model.train images/test --plot confusion.png
      onnx-convgrad evaluate model.onnx test.npz -o classes.csv
    """
    from onnx_convgrad.base.drafts import write_text
    from onnx_convgrad.data.files import read_data
    from onnx_convgrad.evaluation.evaluate import evaluation

    if output_file is not None:
        check_file(output_file, "An evaluation", _SUFFIXES)
    check_outputs(data, output_file, plot=plot)
    with out.stages("reading the data"):
        source = in_parts(read_data(data), options.part_length, options.part_past)
        predictor = opened(model, options, loss=True)
        announce("evaluating")
        found = evaluation(
            predictor,
            source,
            output=options.of,
            task=options.task,
            names=named_inputs(mapped or ()),
            top=top,
            batch_size=options.batch_size,
        )
    if plot is not None and found.confusion is None:
        raise ArgumentError(
            f"There is no confusion matrix to draw: the outputs are {found.task}.", hint="Leave --plot out."
        )
    if output_file is not None:
        text = json.dumps(as_json(found), indent=2)
        write_text(output_file, f"{text}\n" if output_file.suffix.lower() == ".json" else csv_text(_rows_of_csv(found)))
    if plot is not None and found.confusion is not None:
        _plot(found, found.confusion, plot, Path(model).name)
    if out.json:
        out.print_json(as_json(found))
    _show(found, out)
    for what, path in (("The scores are", output_file), ("The plot is", plot)):
        if path is not None:
            out.line(f"{what} in {path}.")


def _show(found: Evaluation, out: Output) -> None:
    """Print metrics, classes and confusions, each at most 80 columns wide."""
    rows = [["samples", f"{found.samples:,}"], *([name, _number(v)] for name, v in found.metrics.items())]
    out.table(Table(["metric", "value"], rows, {1}))
    if found.confusion is None:
        return
    out.line()
    rows = [[label, *map(_number, scores), f"{support:,}"] for label, *scores, support in map(astuple, found.classes)]
    columns = ["class" if found.task == "classes" else "label", "precision", "recall", "f1", "auroc", "samples"]
    out.table(Table(columns, rows, range(1, 6)), fold=_ROWS)
    out.line()
    if found.confusion.ndim == 2:
        out.table(matrix_table(found.confusion.tolist(), list(found.labels)))
        return
    rows = [[label, *map(str, cells.reshape(-1))] for label, cells in zip(found.labels, found.confusion, strict=True)]
    out.table(Table(["label", *_CELLS], rows, range(1, 5)))


def matrix_table(counts: list[list[int]], labels: list[str]) -> Table:
    """A confusion matrix, its columns named or numbered, or the most frequent confusions if it is wider than the page."""
    numbers = list(map(str, range(len(labels))))
    numbered = [label if label == n else f"{n} {label}" for n, label in zip(numbers, labels, strict=True)]
    for columns, names in ((labels, labels), (numbers, numbered)):
        widths = [max(len(label), *(len(str(row[i])) for row in counts)) for i, label in enumerate(columns)]
        if sum(widths) + 3 * len(widths) + max(len(_CORNER), *map(len, names)) <= _WIDTH:
            rows = [[name, *map(str, row)] for name, row in zip(names, counts, strict=True)]
            return Table([_CORNER, *columns], rows, range(1, len(labels) + 1))
    pairs = [(n, i, j) for i, row in enumerate(counts) for j, n in enumerate(row) if n and i != j]
    pairs.sort(key=lambda pair: (-pair[0], *pair[1:]))
    rows = [[labels[i], labels[j], str(n)] for n, i, j in pairs[:_PAIRS]]
    return Table(["true", "predicted", "count"], rows or [["none", "", "0"]], {2})


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def as_json(found: Evaluation) -> dict[str, Any]:
    """The evaluation as JSON values; what is not defined is null."""
    result: dict[str, Any] = finite(
        {
            "samples": found.samples,
            "task": found.task,
            "metrics": found.metrics,
            "classes": [asdict(c) for c in found.classes],
            "confusion": None if found.confusion is None else found.confusion.tolist(),
        }
    )
    return result


def _rows_of_csv(found: Evaluation) -> Iterator[Iterable[Any]]:
    """A row for each class, with its row of the confusion matrix; of numbers a row for each metric."""
    if found.confusion is None:
        yield from (("metric", "value"), ("samples", found.samples), *found.metrics.items())
        return
    single = found.confusion.ndim == 2
    yield *_COLUMNS, *([f"predicted {label}" for label in found.labels] if single else _CELLS)
    for scores, counts in zip(found.classes, found.confusion.reshape(len(found.classes), -1).tolist(), strict=True):
        yield *finite(astuple(scores)), *counts


# -- the plot ----------------------------------------------------------------------------------------------------------

_CELL, _LEAST, _GREATEST = 0.52, 3.2, 9.0
"""Inches: one cell, and the least and the greatest side of a matrix."""

_NAMED, _COUNTED = 40, 25
"""Most classes with names at the axes, and with counts in the cells."""

_LONGEST, _LETTER = 24, 0.075
"""Most letters of a name, and inches of each."""

_ACROSS = 4
"""Matrices in a row, of several labels."""


def _plot(found: Evaluation, counts: np.ndarray, path: Path, title: str) -> None:
    """Draw the share of each true class by predicted class, with the counts while they fit, or a matrix for each label."""
    from matplotlib.colors import LinearSegmentedColormap

    single = counts.ndim == 2
    matrices = [counts] if single else list(counts)
    columns = min(len(matrices), _ACROSS)
    rows = -(-len(matrices) // columns)
    names = [list(map(shown, found.labels))] if single else [["no", shown(label)] for label in found.labels]
    side = min(max(_CELL * matrices[0].shape[0], _LEAST if single else 1.6), _GREATEST)
    longest = min(max(len(n) for group in names for n in group), _LONGEST) * _LETTER
    upright = longest > side / matrices[0].shape[0]
    margin, below = 0.5 + longest, 0.6 + (longest if upright else 0.1)
    width, height = max(columns * (side + margin) + 0.3, 5.0), rows * (side + below) + 1.15
    shades = LinearSegmentedColormap.from_list("share", ["#ffffff", OURS])
    measured = [f"{name} {value:.4f}" for name, value in found.metrics.items() if not math.isnan(value)]
    details = f"{found.samples:,} samples; " + ", ".join(measured[3:])
    with picture(path, (width, height), title, ", ".join(measured[:3]), details) as figure:
        for number, (matrix, labels) in enumerate(zip(matrices, names, strict=True)):
            left = number % columns * (side + margin) + margin
            bottom = height - 1.15 - (number // columns) * (side + below) - side
            axis = figure.add_axes((left / width, bottom / height, side / width, side / height))
            _matrix(axis, matrix, labels, shades, upright=upright)


def _matrix(axis: Any, counts: np.ndarray, labels: list[str], shades: Any, *, upright: bool) -> None:
    """Draw one matrix, each row divided by its sum."""
    total = counts.sum(1, keepdims=True)
    shares = counts / total.clip(1)
    axis.imshow(shares, cmap=shades, vmin=0, vmax=1, interpolation="nearest", aspect="equal")
    size = 8.0 if len(labels) <= _COUNTED else 6.0
    if len(labels) <= _NAMED:
        short = [no_formula(n if len(n) <= _LONGEST else f"{n[: _LONGEST - 1]}…") for n in labels]
        axis.set_xticks(range(len(labels)), short, rotation=90 if upright else 0, size=size, color=INK)
        axis.set_yticks(range(len(labels)), short, size=size, color=INK)
    if len(labels) <= _COUNTED:
        for i, j in zip(*counts.nonzero(), strict=True):
            color = "white" if shares[i, j] > 0.5 else INK
            axis.text(j, i, str(counts[i, j]), ha="center", va="center", size=size, color=color)
    axis.set_xlabel("predicted", loc="center")
    axis.set_ylabel("true")
    axis.spines[:].set(visible=True, color="#c9d1d9")
