"""The interfaces between the parts of a run: callbacks and displays see a `Run`, a run sees a `TrainerLike`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from onnx_convgrad.data.inputs import BatchLike, ProgramInputs
from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.metrics.progress import Progress
from onnx_convgrad.programs.build import TrainingProgram
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.training.engine import Engine, Results

Row = Mapping[str, Any]
"""A row of the history: name -> number. `Any`, since it is written as JSON."""


class TrainerLike(Protocol):
    """The members of a trainer that runs, callbacks and checkpoints use.

    Attributes:
        stopped: Whether `fit` ends after the current step.
        restored: Whether a checkpoint was restored and no run has continued from it yet.
        learning_rate: The learning rate of the next step; may be set, see `Trainer`.
        on_save: Called before a checkpoint is written: gives the progress of all ranks, with the state of callbacks.
        ranks: The ranks of the run, which all call `step`, `save` and `restore` at the same time.
    """

    program: TrainingProgram
    manifest: Manifest
    engine: Engine
    inputs: ProgramInputs
    progress: Progress
    schedule: Callable[[int], float]
    seed: int
    stopped: bool
    restored: bool
    on_save: Callable[[], Progress] | None
    ranks: Ranks
    learning_rate: Any

    def step(self, batch: BatchLike, *more: BatchLike, outputs: Sequence[str] | None = None) -> Results: ...

    def evaluate(self, batch: BatchLike, *, outputs: Sequence[str] | None = None) -> Results: ...

    def save(self, path: str | os.PathLike[str]) -> Path: ...

    def stop(self) -> None: ...


class Run(Protocol):
    """One call of `Trainer.fit`.

    Attributes:
        epochs: Number of epochs at the end of the run, restored ones included.
        batches: Number of batches in an epoch, if known.
        reason: Why the run was stopped; empty if it was not.
    """

    epochs: int
    batches: int | None
    reason: str

    @property
    def trainer(self) -> TrainerLike:
        """The trainer."""

    @property
    def rate(self) -> float:
        """Learning rate of the last update."""

    @property
    def epsilon(self) -> float | None:
        """The epsilon that private training has spent so far; `None` in any other."""

    def stop(self, reason: str = "") -> None:
        """End the run after the current step."""
