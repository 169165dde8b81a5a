"""Callbacks that write the history of a training run: files, TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import numpy as np

from onnx_convgrad.base.drafts import write_text
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.optional import install
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.data.pictures import pixels_of
from onnx_convgrad.errors import ArgumentError, CheckpointError
from onnx_convgrad.frontend.files import check_folder
from onnx_convgrad.training.callbacks import Callback
from onnx_convgrad.training.protocols import Row, Run


class Log(Callback):
    """Writes the whole history to a file after each epoch, so that a resumed run leaves neither gaps nor duplicates.

    Args:
        path: File of the history: `.csv`, with a column for each value, or `.jsonl`, with an object on each line.
    """

    leader_only = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = as_path(path, "The path of a log")
        check_names([self.path.suffix], [".csv", ".jsonl"], "kind of log")

    def on_begin(self, run: Run) -> None:  # noqa: ARG002
        """Raise `ArgumentError` if the folder is not writable, before any training."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_folder(self.path)

    def on_epoch(self, run: Run, row: Row) -> None:  # noqa: ARG002
        try:
            write_text(self.path, self._text(run.trainer.progress.history))
        except OSError as problem:
            raise ArgumentError(
                f"{str(self.path)!r} could not be written: {problem.strerror or problem}.",
                hint="Give another file, in a folder that may be written.",
            ) from problem

    def _text(self, rows: list[dict[str, Any]]) -> str:
        if self.path.suffix == ".jsonl":
            return "".join(json.dumps(row) + "\n" for row in rows)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


class TensorBoard(Callback):
    """Writes loss and gradient norm of every step and the history for TensorBoard, with PyTorch's writer or tensorboardX.

    With Pillow, it also writes images: some of the first batch, as the program gets them, and after each epoch the confusion
    matrix, if it is among the metrics; a row has one true class, and white is none of its samples.

    Args:
        folder: Folder of event files for TensorBoard.

    Raises:
        ArgumentError: Neither writer is installed.
    """

    leader_only = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.writer_class, self.folder = _summary_writer(), as_path(folder, "The folder for TensorBoard")
        self.writer: Any = None
        self.draws, self.shown = find_spec("PIL") is not None, False

    def on_begin(self, run: Run) -> None:
        self.writer = self.writer_class(str(self.folder), purge_step=run.trainer.progress.steps + 1)

    def on_step(self, run: Run, results: Row) -> None:
        steps = run.trainer.progress.steps
        for name, value in _of_step(run, results).items():
            self.writer.add_scalar(name, value, steps)
        if self.draws and not self.shown:
            self.shown = True
            for name, pixels in _first_images(run):
                self.writer.add_images(f"first_batch/{name}", pixels, steps, dataformats="NHWC")

    def on_epoch(self, run: Run, row: Row) -> None:
        steps = run.trainer.progress.steps
        for name, value in _numbers(row):
            self.writer.add_scalar(f"epoch/{name}", value, steps)
        for name, counts in row.items() if self.draws else ():
            if isinstance(counts, list):
                self.writer.add_image(f"epoch/{name}", _heat(np.asarray(counts)), steps, dataformats="HW")

    def on_end(self, run: Run) -> None:  # noqa: ARG002
        self.writer.close()


class _Service(Callback):
    """A callback with a run at a service, whose number checkpoints keep."""

    leader_only = True
    run_id: str | None = None

    def state(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.run_id = state.get("run_id")
        if self.run_id is not None and not isinstance(self.run_id, str):
            raise CheckpointError(f"The checkpoint holds {self.run_id!r} as run_id of a logger, which is not text.")


class MLflow(_Service):
    """Writes the options of a run and its history to MLflow, one value of each column per epoch.

    A run that is active already is used and left open; else one is started, and ended with the status `FAILED` after an
    error. A run that is resumed from a checkpoint goes on with its run in MLflow.

    Args:
        experiment: Experiment of MLflow that the history is written to. By default the one that MLflow would use.
        run_name: Name of the run; by default MLflow makes one.
        tracking_uri: The place to write to, as for `mlflow.set_tracking_uri`; by default where MLflow would.

    Raises:
        ArgumentError: mlflow is not installed.
    """

    def __init__(
        self, experiment: str | None = None, *, run_name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        self.library = _installed("mlflow", "start_run")
        self.experiment, self.run_name, self.tracking_uri = experiment, run_name, tracking_uri
        self.own = False

    def on_begin(self, run: Run) -> None:
        mlflow = self.library
        active = mlflow.active_run()
        self.own = active is None
        if active is None:
            if self.tracking_uri is not None:
                mlflow.set_tracking_uri(self.tracking_uri)
            if self.experiment is not None:
                mlflow.set_experiment(self.experiment)
            active = mlflow.start_run(run_id=self.run_id, run_name=self.run_name)
        if self.run_id is None:
            mlflow.log_params(_options(run))
        self.run_id = active.info.run_id

    def on_epoch(self, run: Run, row: Row) -> None:
        self.library.log_metrics(dict(_numbers(row)), step=run.trainer.progress.steps)

    def on_end(self, run: Run) -> None:  # noqa: ARG002
        if self.own and self.library.active_run() is not None:
            self.library.end_run("FAILED" if _failing() else "FINISHED")


class WandB(_Service):
    """Writes the options of a run, loss and gradient norm of every step and the history to Weights & Biases.

    A run that is resumed from a checkpoint goes on with its run there, which drops steps that it has already.

    Args:
        project: Project of Weights & Biases that the history is written to.
        arguments: Further ones of `wandb.init`, such as `name`, `dir`, `tags`, or `mode="offline"`.

    Raises:
        ArgumentError: wandb is not installed.
    """

    def __init__(self, project: str | None = None, **arguments: Any) -> None:
        self.library = _installed("wandb", "init")
        self.project, self.arguments = project, arguments
        self.run: Any = None

    def on_begin(self, run: Run) -> None:
        again = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
        self.run = self.library.init(project=self.project, **{"config": _options(run), **again, **self.arguments})
        self.run_id = self.run.id

    def on_step(self, run: Run, results: Row) -> None:
        self.run.log(_of_step(run, results), step=run.trainer.progress.steps)

    def on_epoch(self, run: Run, row: Row) -> None:
        values = {f"epoch/{name}": value for name, value in _numbers(row)}
        self.run.log(values, step=run.trainer.progress.steps)

    def on_end(self, run: Run) -> None:  # noqa: ARG002
        self.run.finish(exit_code=int(_failing()))


def _options(run: Run) -> dict[str, Any]:
    """The settings of a run: loss, optimizer with its options, epochs, seed."""
    m = run.trainer.manifest
    optimizer = {f"optimizer.{k}": v for k, v in m.optimizer.items() if k not in ("name", "groups") and v is not None}
    losses = ", ".join(str(term["loss"] or term["output"]) for term in m.losses)
    return {
        "loss": losses,
        "optimizer": m.optimizer["name"],
        **optimizer,
        "epochs": run.epochs,
        "seed": run.trainer.seed,
    }


def _numbers(row: Row) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in row.items() if isinstance(value, float))


def _of_step(run: Run, results: Row) -> dict[str, float]:
    """The numbers of one update; the entries of a loss with the reduction "none" are summed."""
    values = {"loss": float(np.sum(results["loss"])), "learning_rate": run.rate}
    return values | {name: float(results[name]) for name in run.trainer.manifest.grad_norms()}


def _first_images(run: Run) -> Iterator[tuple[str, np.ndarray]]:
    """Input that takes images -> some of the first batch, uint8 `[N, H, W, C]`."""
    trainer = run.trainer
    for port in trainer.manifest.data:
        numbers = (trainer.sample or {}).get(port.name)
        if numbers is not None and numbers.ndim == 4:
            with suppress(ArgumentError):  # no channels of images
                yield port.name, pixels_of(numbers, port, trainer.inputs.preprocessing)


def _heat(counts: np.ndarray) -> np.ndarray:
    """A picture, uint8 `[H, W]`, of a confusion matrix, or of those of several labels side by side."""
    counts = np.concatenate(counts, 1) if counts.ndim == 3 else counts
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    size = max(1, _SIDE // len(counts))
    return np.kron(255 - np.rint(255 * shares), np.ones((size, size))).astype(np.uint8)


_SIDE = 256
"""Pixels of a side of a small confusion matrix."""


def _failing() -> bool:
    """Whether an error is ending the run."""
    return sys.exc_info()[0] is not None


def _installed(package: str, function: str) -> Any:
    """Import a package of `PACKAGES`; a folder of this name, where its files lie, is not a package."""
    try:
        library = importlib.import_module(package)
    except ImportError as problem:
        library, reason = None, "is not installed" if problem.name == package else f"cannot be imported: {problem}"
    else:
        reason = "is not installed"
    if not hasattr(library, function):
        raise ArgumentError(f"The package {package} {reason}.", hint=f"Install it with {install(package)}.")
    return library


def _summary_writer() -> Any:
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise ArgumentError(
        "Neither PyTorch's TensorBoard writer nor tensorboardX is installed.",
        hint=f"Install it with {install('tensorboardX')}.",
    )
