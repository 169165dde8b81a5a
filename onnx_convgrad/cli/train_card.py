"""The model card of a training run: what was trained on what and how, and how good it is, as Markdown."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.base.version import __version__
from onnx_convgrad.cli.train_config import Config, spelled
from onnx_convgrad.cli.train_folder import with_paths
from onnx_convgrad.errors import shown
from onnx_convgrad.pipeline.command_options import written
from onnx_convgrad.runtime import import_runtime
from onnx_convgrad.training.display import measures, number
from onnx_convgrad.training.run_folder import BEST, CONFIG, HISTORY, TRAINED
from onnx_convgrad.training.summary import Summary


def model_card(
    config: Config,
    model: ir.Model,
    summary: Summary,
    rows: Sequence[Mapping[str, Any]],
    labels: Sequence[str] | None,
    *,
    best: bool,
) -> str:
    """The text of the card: `rows` are the history, and `best` says whether the model of the best epoch was written."""
    name = shown(Path(config.model or "").name)
    files = f"`{TRAINED}` is `{name}` with the parameters of the last epoch"
    files += f", `{BEST}` with those of the epoch with the lowest validation loss." if best else "."
    parts = [
        f"# {name}, trained\n\n{files}",
        "## Results\n\n" + "\n".join(_results(rows, best=best)),
        "## Inputs and outputs\n\n" + "\n".join(_ports(model)),
        *([f"Classes by number, from 0: {', '.join(map(shown, labels))}."] if labels else []),
        "## Training\n\n```text\n" + "\n".join(shown(f"{key:<12}{text}") for key, text in summary.lines()) + "\n```",
        *(f"Warning: {shown(text)}" for text in summary.warnings),
        f"## Command\n\n```sh\n{shown(command_of(config))}\n```\n\n`{CONFIG}` has all options.",
        "## Versions\n\n" + ", ".join(_versions()) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def command_of(config: Config) -> str:
    """The command with the options that are not the defaults; paths are relative where that is shorter."""
    words = []
    plain = with_paths({f.name: getattr(config, f.name) for f in fields(Config)}, _shorter)
    for f in fields(Config):
        value, option = plain[f.name], spelled(f.name)
        if value == (f.default if f.default_factory is MISSING else f.default_factory()):
            continue
        if f.name == "model":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(written(f)[0].names[0].split("/")[0 if value else -1])
        elif isinstance(value, Mapping):
            words += [word for key, entry in value.items() for word in (option, f"{key}={_text(entry)}")]
        else:
            entries = value if isinstance(value, tuple) else (value,)
            words += [word for entry in entries for word in (option, _text(entry))]
    return f"python -m onnx_convgrad train {shlex.join(words)}"


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _shorter(path: str) -> str:
    """A path, or its form relative to the current folder if that is shorter."""
    try:
        return min(os.path.relpath(path), path, key=len)
    except ValueError:  # on another drive
        return path


def _results(rows: Sequence[Mapping[str, Any]], *, best: bool) -> Iterator[str]:
    """A table with the last epoch, and the best one."""
    if not rows:
        yield "Nothing was trained."
        return
    names = list(measures(rows[-1]))
    yield f"| file | epoch | {' | '.join(shown(name).replace('|', '/') for name in names)} |"
    yield f"|{'---|' * (len(names) + 2)}"
    chosen = {TRAINED: rows[-1]}
    if best:
        chosen[BEST] = min(rows, key=lambda row: row["val_loss"])
    for file, row in chosen.items():
        yield f"| {file} | {row['epoch']} | {' | '.join(number(row[name]) for name in names)} |"
    yield ""
    yield f"Names that begin with `val_` are of the data that were held out; `{HISTORY}` has all epochs."


def _ports(model: ir.Model) -> Iterator[str]:
    """A table of the inputs and outputs, and the opset."""
    yield "| name | | type | sizes |"
    yield "|---|---|---|---|"
    for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            sizes = "unknown" if value.shape is None else " x ".join(str(getattr(d, "value", d)) for d in value.shape)
            dtype = "unknown" if value.dtype is None else value.dtype.numpy().name
            yield f"| {shown(value.name or '').replace('|', '/')} | {kind} | {dtype} | {shown(sizes or 'one number')} |"
    yield ""
    yield f"The opset is {model.opset_imports.get('', 'not that of ONNX')}."


def _versions() -> Iterator[str]:
    yield f"onnx_convgrad {__version__}"
    yield from (f"{library.__name__} {library.__version__}" for library in (import_runtime(), onnx, ir, np))
    yield f"Python {platform.python_version()}"
