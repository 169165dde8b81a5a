"""Callbacks of a training run: checkpoints and early stopping.

Args:
    run: The run: `run.trainer`, `run.epochs` and `run.stop()`.
    results: `"loss"` and its terms, `"grad_norm"` if the program computes it, and by name the outputs of the model that
        the callback or a metric asks for (`Callback.outputs`).
    row: The row of the history: losses, metrics and learning rate by name, as `Trainer.fit` returns them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from onnx_convgrad.base.best import Best, Mode
from onnx_convgrad.base.drafts import remove_leftovers
from onnx_convgrad.base.forms import NATURAL, check_form
from onnx_convgrad.base.numbers import flag, whole
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.errors import ArgumentError, CheckpointError
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.precision import AVERAGE, AVERAGE_MASTER, MASTER
from onnx_convgrad.training import checkpoint
from onnx_convgrad.training.protocols import Row, Run


class Callback:
    """Base class: a run calls these methods. `run` has the trainer, the number of epochs and `stop()`.

    Of several ranks (`Trainer(..., distributed=...)`), every one calls its own callbacks. `trainer.save` writes on rank 0
    alone, but all ranks must call it.

    Attributes:
        leader_only: Whether only rank 0 calls the callback, as it should if it writes or prints.
        outputs: Names of the outputs of the model that `on_step` gets; `None` for all. Each is copied after every step.
        arrays: Arrays by name that a checkpoint must hold to resume the callback, besides its `state`. They are assigned
            before `restore` is called; of several ranks, on rank 0 alone.
    """

    leader_only = False
    outputs: tuple[str, ...] | None = ()
    arrays: Mapping[str, np.ndarray] = MappingProxyType({})

    def on_begin(self, run: Run) -> None:
        """Called before the first step; also when a run is resumed."""

    def on_step(self, run: Run, results: Row) -> None:
        """Called after an update; `results` has the loss, `"grad_norm"` if the program computes it, and `outputs`."""

    def on_epoch(self, run: Run, row: Row) -> None:
        """Called after an epoch; `row` was added to the history."""

    def on_end(self, run: Run) -> None:
        """Called after the last step, also when an error ended the run."""

    def state(self) -> dict[str, Any]:
        """State that a checkpoint must hold to resume the callback, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`.

        Args:
            state: The value that `state` returned before.
        """


_STATE = {"best": (None, float), "monitor": str, "waited": NATURAL, str: object}


class _Best(Best):
    """The best value so far of one column of the history, which checkpoints keep."""

    def improved(self, row: Row) -> bool:
        """Take a row; return whether it is better than all before it."""
        return self.improves(self.read(row))

    def state(self) -> dict[str, Any]:
        return {"best": self.value, "monitor": self.monitor}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Continue from a result of `state`, if it is of the same column; return whether it is.

        Raises:
            CheckpointError: It is not a result of `state`.
        """
        try:
            check_form({"best": None, "monitor": "", "waited": 0, **state}, _STATE)
        except ValueError as problem:
            raise CheckpointError(f"The checkpoint holds no state of {self.monitor!r}: {problem}.") from problem
        same = bool(state.get("monitor", self.monitor) == self.monitor)
        if same:
            self.value = state.get("best")
        return same


class Checkpoints(Callback):
    """Saves checkpoints, named after the number of steps, and deletes old ones.

    Args:
        folder: Folder of the checkpoints; created if missing.
        every_steps: Number of updates between checkpoints.
        every_epochs: Number of epochs between checkpoints; 0 for none at the end of epochs.
        keep: Number of checkpoints to keep.
        best: Also save `best.safetensors` whenever this column of the history improves, for example `"val_loss"`.
        mode: Whether smaller (`"min"`) or larger (`"max"`) is better; `"auto"`: smaller if the name contains `loss`.
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
        self.folder, self.keep = as_path(folder, "The folder of checkpoints"), whole(keep, "keep")
        self.every_steps, self.every_epochs = every_steps, whole(every_epochs, "every_epochs", 0)
        self.best = None if best is None else _Best(best, mode)

    def on_begin(self, run: Run) -> None:
        """Raise `ArgumentError` if the folder holds checkpoints of later steps than this run has reached."""
        checkpoint.library()  # a missing package is reported before any training
        steps = run.trainer.progress.steps
        if self.best is not None and not steps:  # a new run, not a resumed one
            self.best.value = None
        if not run.trainer.ranks.leader:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ArgumentError(
                f"{str(self.folder)!r} is a file; checkpoints need a folder.", hint="Give another name."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder, "*.safetensors")
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
        """Save a checkpoint and delete old ones."""
        run.trainer.save(self.folder)
        if run.trainer.ranks.leader:
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


def _judged(manifest: Manifest) -> list[str]:
    """The values that an evaluation depends on: parameters, averages, running statistics, and their float32 copies."""
    slots = (MASTER, AVERAGE, AVERAGE_MASTER)
    state = (s.name for s in manifest.state if s.kind in ("statistic", "wide statistic") or s.slot in slots)
    return [*(p.name for p in manifest.parameters), *state]


class EarlyStopping(Callback):
    """Ends training when a value has not improved for `patience` epochs, and puts the parameters of the best epoch back.

    Args:
        monitor: Column of the history.
        patience: Epochs without improvement after which training stops.
        min_delta: Smallest change that counts as an improvement.
        mode: As for `Checkpoints`.
        restore_best_weights: Whether the trainer has the parameters, their averages and the running statistics of the best
            epoch when `fit` returns, also after the last of all epochs, but not after an interruption. The state of the
            optimizer stays. Main memory and checkpoints hold a copy of these values. Without it, the trainer has the values
            of the last epoch.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        restore_best_weights: bool = True,
    ) -> None:
        self.best, self.patience = _Best(monitor, mode, min_delta), whole(patience, "patience")
        self.restore_best_weights = flag(restore_best_weights, "restore_best_weights")
        self.waited = 0

    def on_begin(self, run: Run) -> None:
        if not run.trainer.progress.steps:  # a new run, as in a loop over folds
            self.best.value, self.waited, self.arrays = None, 0, {}
        self._decide(run)

    def on_epoch(self, run: Run, row: Row) -> None:
        improved = self.best.improved(row)
        self.waited = 0 if improved else self.waited + 1
        if improved and self.restore_best_weights:
            self.arrays = run.trainer.engine.read(_judged(run.trainer.manifest))
        self._decide(run)

    def on_end(self, run: Run) -> None:
        """Put the parameters of the best epoch back, if the run is finished."""
        trainer, finished = run.trainer, self.waited >= self.patience or run.trainer.progress.epoch >= run.epochs
        if not (finished and self.waited and self.restore_best_weights) or sys.exc_info()[0] is not None:
            return
        if trainer.ranks.of_leader(bool(self.arrays)):  # after a checkpoint was restored, rank 0 alone has them
            trainer.engine.restore({**trainer.engine.to_save(), **self.arrays}, trainer.seed)

    def _decide(self, run: Run) -> None:
        if self.waited >= self.patience:
            back = run.trainer.ranks.of_leader(bool(self.arrays))
            best = f"; the parameters are those of epoch {run.trainer.progress.epoch - self.waited}" if back else ""
            run.stop(f"{self.best.monitor} has not improved for {self.waited} epochs{best}")

    def state(self) -> dict[str, Any]:
        return {**self.best.state(), "waited": self.waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.waited = state.get("waited", 0) if self.best.restore(state) else 0
