"""Print what a training run will do; save, export, draw and print what it has given."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.base.drafts import write_text
from onnx_convgrad.base.forms import finite
from onnx_convgrad.cli.evaluate import matrix_table
from onnx_convgrad.cli.tables import Output, Table, tell
from onnx_convgrad.cli.train_card import model_card
from onnx_convgrad.cli.train_config import Config
from onnx_convgrad.cli.train_folder import here, resume_command
from onnx_convgrad.cli.train_plot import plot
from onnx_convgrad.errors import DivergenceError, shown
from onnx_convgrad.training.display import measures, number
from onnx_convgrad.training.interruption import Interruption
from onnx_convgrad.training.run_folder import BEST, CARD, CHECKPOINTS, TRAINED
from onnx_convgrad.training.summary import Summary
from onnx_convgrad.training.trainer import Trainer

_ADAPTERS = ("adapter.onnx_adapter", "adapter.safetensors")

_LAYERS, _EPOCHS = 12, 20
"""Most layers in the table of the summary, and most epochs in that of the history."""

_WIDTH = 80
"""Characters in a line."""


def print_summary(summary: Summary, out: Output) -> None:
    """Print the summary, and its warnings on stderr."""
    before = ""
    for name, text in summary.lines():
        label = f"{'' if name == before else name:<12}"
        indents: Any = {"initial_indent": label, "subsequent_indent": " " * 12}
        for line in textwrap.wrap(shown(text), _WIDTH - 1, break_on_hyphens=False, **indents) or [label]:
            out.line(line)
        before = name
    out.table(Table(["layer", "trained", "frozen"], summary.rows(), {1, 2}), fold=_LAYERS)
    out.line()
    for warning in summary.warnings:
        tell(f"Warning: {warning}")


def finish(
    config: Config,
    trainer: Trainer,
    folder: Path,
    interruption: Interruption,
    diverged: DivergenceError | None,
    out: Output,
    summary: Summary,
) -> int:
    """Save, draw and print; return the exit status, or raise the error of a run that has diverged."""
    progress, rows = trainer.progress, trainer.progress.history
    stopped = interruption.signal is not None and progress.epoch < config.epochs and diverged is None
    name = interruption.signal.name if stopped and interruption.signal else None
    saved = trainer.save(folder / CHECKPOINTS) if stopped else None
    files: dict[str, str] = {}
    if rows:
        out.table(history_table(rows))
        for table in _confusions(rows[-1], trainer.labels):
            out.line()
            out.table(table)
    if saved is not None and trainer.ranks.leader:
        tell(
            f"{name} after step {progress.steps}, in epoch {progress.epoch + 1} of {config.epochs}. "
            "Everything is saved. Continue with:"
        )
        tell(f"  {resume_command(config, folder)}")
    elif saved is None and diverged is None:
        files = _exported(config, trainer, folder)
        if trainer.ranks.leader:
            model, best = trainer.program.model("inference"), "best" in files
            write_text(folder / CARD, model_card(config, model, summary, rows, trainer.labels, best=best))
        _print_files(config, folder, files, out)
    if config.plot and rows and trainer.ranks.leader:
        plot(rows, Path(config.plot), Path(config.model or "").name, f"{', '.join(config.loss)}, {config.optimizer}")
        out.line(f"The plot is in {here(config.plot)}.")
    out.print_json(
        {
            "model": config.model,
            "folder": str(folder),
            "summary": summary.to_json(),
            "interrupted": name,
            "checkpoint": str(saved) if saved else None,
            "trained": files.get("trained"),
            "best": files.get("best"),
            "plot": config.plot if rows else None,
            "history": finite(rows),
        }
    )
    if diverged is not None:
        raise diverged
    return interruption.exit_status if stopped else 0


def _print_files(config: Config, folder: Path, files: Mapping[str, str], out: Output) -> None:
    """Print where the results are."""
    out.line()
    out.line(f"{here(config.model or '')} -> {here(folder / TRAINED)}")
    if config.lora is not None:
        out.line(f"The adapters alone are in {' and '.join(_ADAPTERS)} beside it.")
    if "best" in files:
        out.line(f"{here(folder / BEST)} has the parameters of the epoch with the lowest validation loss.")
    out.line(f"Checkpoints, history and program are in {here(folder)}, described in {CARD}.")


def _exported(config: Config, trainer: Trainer, folder: Path) -> dict[str, str]:
    """Write the trained model, and the best one if there was a validation."""
    files = {"trained": folder / TRAINED}
    trainer.export(files["trained"])
    if config.lora is not None:
        for name in _ADAPTERS:
            trainer.export_adapter(folder / name)
    best = folder / CHECKPOINTS / "best.safetensors"
    if config.validation and trainer.ranks.of_leader(best.exists()):
        trainer.restore(best)
        files["best"] = folder / BEST
        trainer.export(files["best"])
    return {name: str(path) for name, path in files.items()}


def _confusions(row: Mapping[str, Any], labels: Sequence[str] | None) -> Iterator[Table]:
    """The confusion matrices of the last epoch, of the validation if there is one."""
    for name, counts in row.items():
        if isinstance(counts, list) and np.ndim(counts) == 2 and f"val_{name}" not in row:
            names = list(labels or ()) if len(labels or ()) == len(counts) else list(map(str, range(len(counts))))
            yield replace(matrix_table(counts, names), title=name.replace("val_", "validation "))


def history_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table with one row per epoch; of many epochs, evenly spaced ones and the last.

    Columns that do not fit the page are left out: `history.csv` has all.
    """
    distance = -(-len(rows) // _EPOCHS)
    shown = [row for row in rows if row is rows[-1] or (len(rows) - row["epoch"]) % distance == 0]
    values = list(measures(rows[-1]))
    columns = {"epoch": [str(row["epoch"]) for row in shown]}
    columns |= {key.replace("val_", "val. "): [number(row[key]) for row in shown] for key in values}
    columns["rate"] = [f"{row['learning_rate']:.3g}" for row in shown]
    columns["seconds"] = [f"{row['seconds']:.1f}" for row in shown]
    columns["samples/s"] = [f"{row['samples_per_second']:,.0f}" for row in shown]
    doubled = [key for key in values if key != "loss" and f"val_{key}" in values]
    for name in ["samples/s", "seconds", *reversed(doubled), "rate", *reversed(list(columns)[3:])]:
        if sum(max(map(len, (heading, *cells))) + 2 for heading, cells in columns.items()) <= _WIDTH:
            break
        columns.pop(name, None)
    return Table(list(columns), list(zip(*columns.values(), strict=True)), range(len(columns)))
