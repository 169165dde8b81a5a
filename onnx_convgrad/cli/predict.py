"""The command `predict`: labels and probabilities of images and arrays, as table, CSV, JSON or arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.command import command, own_option
from onnx_convgrad.cli.figures import check_file
from onnx_convgrad.cli.shared_options import DataOptions, check_outputs, in_parts, opened, out_option
from onnx_convgrad.cli.tables import Output, Table, csv_text

if TYPE_CHECKING:
    from onnx_convgrad.evaluation.predict import Predictions

_ROWS = 20
"""Most rows of the table without `--verbose`."""

_SHOWN = 4
"""Most numbers of a sample in the table."""

_SUFFIXES = (".csv", ".json", ".npz")


@command(verbose="all samples.")
def predict(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN", help="An ONNX file, or a folder that `train` made.")],
    data: Annotated[
        list[str], typer.Argument(metavar="DATA...", help="Images, a folder of images, .csv, .npz, or [NAME=]FILE.npy.")
    ],
    *,
    output_file: Annotated[Path | None, out_option("a .csv or .json file, or .npz (all outputs).")] = None,
    top: Annotated[int, own_option("INT", "Number of most probable labels: shown for each sample.")] = 3,
    options: DataOptions,
    out: Output,
) -> None:
    """Predict labels and probabilities.

    \b
    Example:
      onnx-convgrad predict model.train image.png
      onnx-convgrad predict model.onnx images --mean 0.5 --std 0.5 -o labels.csv
    """
    from onnx_convgrad.base.numbers import whole
    from onnx_convgrad.data.files import read_data
    from onnx_convgrad.evaluation.predict import predictions

    whole(top, "--top")
    if output_file is not None:
        check_file(output_file, "Predictions", _SUFFIXES)
    check_outputs(data, output_file)
    with out.stages("reading the data"):
        source = in_parts(read_data(data), options.part_length, options.part_past)
        predictor = opened(model, options)
        announce("predicting")
        found = predictions(predictor, source, output=options.of, task=options.task, batch_size=options.batch_size)
    if output_file is not None:
        _write(found, output_file, top)
    if out.json:
        out.print_json(_as_json(found, top))
    out.table(_table(found, top), fold=_ROWS)
    if output_file is not None:
        out.line()
        out.line(f"{len(found)} predictions are in {output_file}.")


def _table(found: Predictions, top: int) -> Table:
    if found.task == "text":
        pairs = [(name, best[0]) for name, best in zip(found.names, found.top(), strict=True)]
        return Table(["sample", "text", "confidence"], [[n, t, f"{c:.4f}"] for n, (t, c) in pairs], {2})
    if not found.labels:
        rows = [[name, _numbers(values)] for name, values in zip(found.names, found.values, strict=True)]
        return Table(["sample", "values"], rows)
    rows = []
    for name, best in zip(found.names, found.top(top), strict=True):
        (label, probability), *others = best
        rows.append([name, label, f"{probability:.4f}", ", ".join(f"{n} {p:.4f}" for n, p in others)])
    if not any(row[3] for row in rows):
        return Table(["sample", "label", "probability"], [row[:3] for row in rows], {2})
    return Table(["sample", "label", "probability", "next"], rows, {2})


def _numbers(values: Any) -> str:
    flat = values.reshape(-1)
    shape = f" ... ({'x'.join(map(str, values.shape))})" if flat.size > _SHOWN else ""
    return ", ".join(f"{v:.4g}" for v in flat[:_SHOWN]) + shape


def _as_json(found: Predictions, top: int) -> dict[str, Any]:
    if found.task == "text":
        texts = zip(found.names, found.texts, found.values.tolist(), strict=True)
        return {"task": "text", "predictions": [{"sample": n, "text": t, "confidence": c} for n, t, c in texts]}
    if not found.labels:
        rows = [{"sample": n, "values": v.tolist()} for n, v in zip(found.names, found.values, strict=True)]
        return {"task": found.task, "predictions": rows}
    listed = zip(found.names, found.top(top), strict=True)
    rows = [{"sample": n, "labels": [{"label": t, "probability": p} for t, p in best]} for n, best in listed]
    return {"task": found.task, "classes": list(found.labels), "predictions": rows}


def _write(found: Predictions, path: Path, top: int) -> None:
    """Write all predictions; the suffix chooses the format."""
    from onnx_convgrad.base.drafts import write_arrays, write_text

    if path.suffix.lower() == ".npz":
        write_arrays(path, found.outputs)
    elif path.suffix.lower() == ".json":
        write_text(path, json.dumps(_as_json(found, top), indent=2) + "\n")
    else:
        write_text(path, csv_text(_rows_of_csv(found, top)))


def _rows_of_csv(found: Predictions, top: int) -> Iterator[Iterable[Any]]:
    if found.task == "text":
        yield "sample", "text", "confidence"
        yield from zip(found.names, found.texts, found.values.tolist(), strict=True)
    elif found.labels:
        count = min(top, len(found.labels))
        yield "sample", *(f"{what}{i or ''}" for i in (0, *range(2, count + 1)) for what in ("label", "probability"))
        for name, best in zip(found.names, found.top(top), strict=True):
            yield name, *(cell for entry in best for cell in entry)
    else:
        values = found.values.reshape(len(found), -1)
        yield "sample", *(f"value{i}" for i in range(values.shape[1]))
        yield from ((name, *row) for name, row in zip(found.names, values.tolist(), strict=True))
