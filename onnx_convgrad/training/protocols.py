"""The interfaces between the parts of a run: callbacks and displays see a `Run`, a run sees a `TrainerLike`.

Members are read, and nobody sets them, with one exception: the learning rate of a trainer. A run is ended by `Run.stop`, and
what a checkpoint restores is set by the trainer itself. The run writes its counts into the trainer's `progress`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from onnx_convgrad.data.inputs import Batch, BatchLike, ProgramInputs
from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.metrics.progress import Progress
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.training.engine import Engine, Results

Row = Mapping[str, Any]
"""A row of the history: name -> number. `Any`, since it is written as JSON."""


class TrainerLike(Protocol):
    """The members of a trainer that runs, callbacks and checkpoints use."""

    @property
    def program(self) -> TrainingProgram:
        """The program that is trained."""

    @property
    def manifest(self) -> Manifest:
        """The names of the program and their roles."""

    @property
    def engine(self) -> Engine:
        """The sessions and the values on the device."""

    @property
    def inputs(self) -> ProgramInputs:
        """Converts batches to the inputs of the program."""

    @property
    def sample(self) -> Batch | None:
        """A few samples of the first batch; `None` before the first step."""

    @property
    def progress(self) -> Progress:
        """Counts, averages and history; a restored checkpoint brings another object."""

    @property
    def schedule(self) -> Callable[[int], float]:
        """Number of finished updates -> learning rate, unless one was set."""

    @property
    def seed(self) -> int:
        """Decides the order of the data and the masks of Dropout."""

    @property
    def restored(self) -> bool:
        """Whether a checkpoint was restored and no run has begun since."""

    @property
    def ranks(self) -> Ranks:
        """The ranks of the run, which all call `step`, `save` and `restore` at the same time."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step. A number that is set replaces the schedule; `None` returns to it."""

    @learning_rate.setter
    def learning_rate(self, rate: float | None) -> None: ...

    def step(self, batch: BatchLike, *more: BatchLike, outputs: Sequence[str] | None = None) -> Results:
        """Update once; see `Trainer.step`."""

    def evaluate_batch(self, batch: BatchLike, *, outputs: Sequence[str] | None = None) -> Results:
        """Compute loss and outputs in inference mode; see `Trainer.evaluate_batch`."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint; see `Trainer.save`."""


class Run(Protocol):
    """One call of `Trainer.fit`."""

    @property
    def trainer(self) -> TrainerLike:
        """The trainer."""

    @property
    def epochs(self) -> int:
        """Number of epochs at the end of the run, restored ones included."""

    @property
    def batches(self) -> int | None:
        """Number of batches in an epoch, if known."""

    @property
    def rate(self) -> float:
        """Learning rate of the last update."""

    @property
    def epsilon(self) -> float | None:
        """The epsilon that private training has spent so far; `None` in any other."""

    @property
    def reason(self) -> str:
        """The reason for which the run was stopped; empty if it was not."""

    def stop(self, reason: str = "") -> None:
        """End the run after the current step."""
