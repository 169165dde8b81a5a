"""What happens beside training: checkpoints, early stopping, logs."""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import positive, whole
from onnx_convgrad.errors import ArgumentError, CheckpointError
from onnx_convgrad.frontend.files import check_folder
from onnx_convgrad.training.run import checkpoint

if TYPE_CHECKING:
    from onnx_convgrad.training.run.fit import Run

__all__ = ["Callback", "Checkpoints", "EarlyStopping", "Log", "TensorBoard"]

Row = Mapping[str, Any]
Mode = Literal["auto", "min", "max"]


class Callback:
    """Told of what goes on. `run` has the trainer, the number of epochs and `stop()`."""

    def on_begin(self, run: Run) -> None:
        """Before the first step; also when a run is taken up again."""

    def on_step(self, run: Run, results: Row) -> None:
        """After an update; `results` has the loss."""

    def on_epoch(self, run: Run, row: Row) -> None:
        """After an epoch; `row` is what was added to the history."""

    def on_end(self, run: Run) -> None:
        """After the last step, also when an error ended the run."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the callback to go on, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""


class _Best:
    """The best value so far of one entry of the rows."""

    def __init__(self, monitor: str, mode: Mode, margin: float = 0.0) -> None:
        check_names([mode], ["auto", "min", "max"], "mode")
        positive(margin, "min_delta")
        self.monitor, self.margin = monitor, margin
        self.sign = 1 if mode == "min" or (mode == "auto" and "loss" in monitor) else -1
        self.value: float | None = None

    def improved(self, row: Row) -> bool:
        """Whether a row is better than all before it; a NaN never is."""
        if self.monitor not in row:
            check_names([self.monitor], [k for k, v in row.items() if isinstance(v, float)], "monitored value")
        value = float(row[self.monitor])
        better = not math.isnan(value) and (
            self.value is None or self.sign * value < self.sign * self.value - self.margin
        )
        if better:
            self.value = value
        return better

    def state(self) -> dict[str, Any]:
        return {"best": self.value, "monitor": self.monitor}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on from such a state; whether it was of the same entry."""
        same = bool(state.get("monitor", self.monitor) == self.monitor)
        if same:
            self.value = state.get("best")
        return same


class Checkpoints(Callback):
    """Saves checkpoints, named after the number of steps, and deletes old ones.

    Args:
        folder: Where to; made if it is not there.
        every_steps: Save after so many updates.
        every_epochs: Save after so many epochs; 0 for never.
        keep: Number of checkpoints that are kept.
        best: Also save `best.safetensors` when this value of an epoch is better than ever, for example `"val_loss"`.
        mode: Whether the best is the smallest or the largest; by default the smallest of what has `loss` in its name.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_epochs: int = 1,
        keep: int = 3,
        best: str | None = None,
        mode: Mode = "auto",
    ) -> None:
        if every_steps is not None:
            whole(every_steps, "every_steps")
        self.folder, self.keep = Path(folder), whole(keep, "keep")
        self.every_steps, self.every_epochs = every_steps, whole(every_epochs, "every_epochs", 0)
        self.best = None if best is None else _Best(best, mode)

    def on_begin(self, run: Run) -> None:
        """Raises `ArgumentError` when the folder holds checkpoints of a run that got further than this one."""
        checkpoint.library()  # rather now than when the first epoch is done
        if self.folder.exists() and not self.folder.is_dir():
            raise ArgumentError(f"{str(self.folder)!r} is a file, where checkpoints need a folder.")
        self.folder.mkdir(parents=True, exist_ok=True)
        steps = run.trainer.progress.steps
        if self.best is not None and not steps:  # another run than that before
            self.best.value = None
        for ahead, path in reversed(checkpoint.numbered(self.folder)):
            if ahead > steps and _readable(path):
                raise ArgumentError(
                    f"{str(self.folder)!r} holds a checkpoint of step {ahead}, and this run is at step {steps}.",
                    hint=f"Continue it with trainer.restore({str(self.folder)!r}), or give another folder.",
                )

    def on_step(self, run: Run, results: Row) -> None:  # noqa: ARG002 - the signature of every callback
        if self.every_steps and run.trainer.progress.steps % self.every_steps == 0:
            self.save(run)

    def on_epoch(self, run: Run, row: Row) -> None:
        if self.best is not None and self.best.improved(row):
            run.trainer.save(self.folder / "best.safetensors")
        if self.every_epochs and run.trainer.progress.epoch % self.every_epochs == 0:
            self.save(run)

    def save(self, run: Run) -> None:
        """Save one now."""
        run.trainer.save(self.folder)
        checkpoint.prune(self.folder, self.keep, run.trainer.progress.steps)

    def state(self) -> dict[str, Any]:
        return {} if self.best is None else self.best.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.best is not None:
            self.best.restore(state)


def _readable(path: Path) -> bool:
    try:
        checkpoint.read(path)
    except CheckpointError:
        return False
    return True


class EarlyStopping(Callback):
    """Ends training when a value has not become better for `patience` epochs.

    Args:
        monitor: Entry of the history's rows.
        patience: Number of epochs.
        min_delta: By how much a better value must be better.
        mode: As for `Checkpoints`, whose `best` keeps the values of the best epoch.
    """

    def __init__(
        self, monitor: str = "val_loss", *, patience: int = 3, min_delta: float = 0.0, mode: Mode = "auto"
    ) -> None:
        self.best, self.patience = _Best(monitor, mode, min_delta), whole(patience, "patience")
        self.waited = 0

    def on_begin(self, run: Run) -> None:
        if not run.trainer.progress.steps:  # another run than that before, as in a loop over folds
            self.best.value, self.waited = None, 0
        self._decide(run)

    def on_epoch(self, run: Run, row: Row) -> None:
        self.waited = 0 if self.best.improved(row) else self.waited + 1
        self._decide(run)

    def _decide(self, run: Run) -> None:
        if self.waited >= self.patience:
            run.stop(f"{self.best.monitor} has not become better for {self.waited} epochs")

    def state(self) -> dict[str, Any]:
        return {**self.best.state(), "waited": self.waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.waited = state["waited"] if self.best.restore(state) else 0


class Log(Callback):
    """Writes the history to a file after each epoch, all of it, so that a resumed run leaves no gap and no row twice.

    Args:
        path: `.csv`, with a column for each value, or `.jsonl`, with an object on each line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        check_names([self.path.suffix], [".csv", ".jsonl"], "kind of log")

    def on_begin(self, run: Run) -> None:  # noqa: ARG002
        """Raises `ArgumentError` when the folder cannot be written to: rather now than when the first epoch is done."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_folder(self.path)

    def on_epoch(self, run: Run, row: Row) -> None:  # noqa: ARG002
        draft = self.path.with_name(f".{self.path.name}.part")
        draft.write_text(self._text(run.trainer.progress.history), encoding="utf-8", newline="")
        draft.replace(self.path)

    def _text(self, rows: list[dict[str, Any]]) -> str:
        if self.path.suffix == ".jsonl":
            return "".join(json.dumps(row) + "\n" for row in rows)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


class TensorBoard(Callback):
    """Writes the loss of every step and the rows of the history for TensorBoard, by PyTorch's writer or tensorboardX.

    Args:
        folder: Where to.

    Raises:
        ArgumentError: Neither writer is installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.writer_class, self.folder = _summary_writer(), Path(folder)
        self.writer: Any = None

    def on_begin(self, run: Run) -> None:
        self.writer = self.writer_class(str(self.folder), purge_step=run.trainer.progress.steps + 1)

    def on_step(self, run: Run, results: Row) -> None:
        self.writer.add_scalar("loss", float(results["loss"]), run.trainer.progress.steps)
        self.writer.add_scalar("learning_rate", run.rate, run.trainer.progress.steps)

    def on_epoch(self, run: Run, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, float):
                self.writer.add_scalar(f"epoch/{name}", value, run.trainer.progress.steps)

    def on_end(self, run: Run) -> None:  # noqa: ARG002
        self.writer.close()


def _summary_writer() -> Any:
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise ArgumentError(
        "There is nothing here that writes for TensorBoard.",
        hint="Install it with `pip install tensorboardX`, or `pip install torch tensorboard`.",
    )
