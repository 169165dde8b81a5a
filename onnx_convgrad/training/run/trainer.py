"""Training in a stock ONNX Runtime: a program, its values on the device, and where the run has got to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.base.numbers import positive, whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.runtime import Options, Providers
from onnx_convgrad.training.data.fitting import Fitting, as_array
from onnx_convgrad.training.optim.schedules import Schedule, as_schedule
from onnx_convgrad.training.program.build import TrainingProgram
from onnx_convgrad.training.program.inference import export
from onnx_convgrad.training.run import flat
from onnx_convgrad.training.run.engine import Engine, Results
from onnx_convgrad.training.run.progress import Progress
from onnx_convgrad.training.run.resume import restore, save

if TYPE_CHECKING:
    from onnx_convgrad.training.run.metrics import MetricLike

__all__ = ["Trainer"]


class Trainer:
    """Trains a program in ONNX Runtime sessions. Parameters and state stay on the device of the first provider.

    Args:
        program: The program, or the folder that it was saved to.
        providers: As in `onnxruntime.InferenceSession`, also `"cpu"`, `"cuda"` and `"cuda:1"`; the CPU by default.
        seed: For the order of the data in `fit`; other than 0 also for the masks of Dropout, which with 0 are those of the
            program's own seed.
        schedule: Learning rate, or number of updates done -> learning rate; by default that of the program's optimizer.
        options: Of the sessions: `SessionOptions`, or a mapping with some of its attributes, such as `{"threads": 2}`.

    Attributes:
        engine: Sessions and values.
        fitting: Brings arrays to what the program takes.
        progress: Updates and epochs done, position in the epoch, history.

    Raises:
        ArgumentError: The schedule of a loaded program is of a class that it cannot know: give `schedule`.
        ExecutionError: The runtime or a provider is missing.
        ModelError: The folder holds no program.
    """

    def __init__(
        self,
        program: TrainingProgram | str | os.PathLike[str],
        providers: Providers | None = None,
        seed: int = 0,
        *,
        schedule: Schedule | Callable[[int], float] | float | None = None,
        options: Options | None = None,
    ) -> None:
        if not isinstance(program, (TrainingProgram, str, os.PathLike)):
            raise ArgumentError(
                f"A Trainer takes a training program or the folder of one, not {type(program).__name__}.",
                hint="Build one of a model with onnx_convgrad.build_training.",
            )
        self.program = program if isinstance(program, TrainingProgram) else TrainingProgram.load(program)
        self.manifest = self.program.manifest
        self.schedule = _schedule(self.program, schedule)
        self.seed = whole(seed, "seed", 0)
        self.progress = Progress()
        self.engine = Engine(self.program, self.seed, {"providers": providers, "options": options})
        self.fitting = Fitting(self.manifest)
        self.stopped = self.restored = False
        self.on_save: Callable[[], None] | None = None

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self, batch: Any, *more: Any, outputs: Sequence[str] | None = None) -> Results:
        """One update, from one batch or from several as if they were one.

        The gradients of several batches are computed one batch after the other and averaged, each by its share in the
        loss over all of them; running statistics and random state move with each.

        Args:
            batch: Mapping from input to array, or a sequence: first the data, then the targets. Arrays are cast to what
                the program takes where that loses no more than digits.
            more: Further batches.
            outputs: Outputs of the model to return; by default all that the program gives out.

        Returns:
            `"loss"`, the terms of a loss that has several, and the outputs, those of several batches one after the other.

        Raises:
            ArgumentError: Arrays are missing or do not fit, or the losses of several batches cannot be averaged.
        """
        wanted, rate = self._wanted(outputs), self.learning_rate
        if more:
            results = self.engine.step_over([self.fitting(b) for b in (batch, *more)], rate, wanted)
        else:
            results = self.engine.step(self.fitting(batch), rate, wanted)
        self.progress.steps += 1
        return self._named(results)

    def evaluate(self, batch: Any, *, outputs: Sequence[str] | None = None) -> Results:
        """Loss and outputs in inference mode; nothing changes. Arguments, result and errors as for `step`."""
        return self._named(self.engine.evaluate(self.fitting(batch), self._wanted(outputs)))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        rate = self.schedule(self.progress.steps)
        positive(rate, f"The learning rate of step {self.progress.steps}")
        return float(rate)

    # -- many steps ----------------------------------------------------------------------------------------------------

    def fit(self, data: Any, *, epochs: int = 1, **options: Any) -> list[dict[str, Any]]:
        """Train until `epochs` epochs are done in all, those of a restored checkpoint included.

        Arguments, result and errors as for `onnx_convgrad.training.run.fit.fit`.
        """
        from onnx_convgrad.training.run.fit import fit

        return fit(self, data, epochs=epochs, **options)

    def validate(self, data: Any, metrics: Iterable[MetricLike] = (), **options: Any) -> dict[str, float]:
        """Loss and metrics over data in inference mode, averaged as over one large batch.

        Args:
            data: As for `fit`.
            metrics: As for `fit`.
            options: `batch_size` and others of `onnx_convgrad.training.data.sources.as_batches`.
        """
        from onnx_convgrad.training.run.fit import validate

        return validate(self, data, metrics, **options)

    def stop(self) -> None:
        """Let `fit` end after the step under way; also from a callback, another thread or a signal handler."""
        self.stopped = True

    # -- values --------------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters, by name."""
        return self.engine.read(p.name for p in self.manifest.parameters)

    def state(self) -> dict[str, np.ndarray]:
        """Copies of what moves besides the parameters: of the optimizer, running statistics, random state."""
        return self.engine.read(s.name for s in self.manifest.state)

    def load(self, values: Mapping[str, Any]) -> None:
        """Replace parameters and state by arrays of the same shape; what is not named stays.

        Raises:
            ArgumentError: An unknown name or another shape.
        """
        entries = {entry.name: entry for entry in self.manifest.moving()}
        if not isinstance(values, Mapping):
            raise ArgumentError(
                f"load takes a mapping from names to arrays, not {type(values).__name__}.", hint="restore reads files."
            )
        check_names(list(values), list(entries), "parameter or state")
        arrays = {name: _of_dtype(name, as_array(value), entries[name].dtype) for name, value in values.items()}
        for name, array in arrays.items():
            if array.shape != entries[name].shape:
                raise ArgumentError(f"{name!r} has shape {entries[name].shape}, not {array.shape}.")
        self.engine.write(arrays)

    def flat_parameters(self, *, statistics: bool = False) -> np.ndarray:
        """All parameters as one vector, in the order of the manifest; with `statistics` the running statistics too."""
        entries = flat.entries(self.manifest, statistics=statistics)
        return flat.flatten(entries, self.engine.read(e.name for e in entries))

    def load_flat(self, vector: np.ndarray, *, statistics: bool = False) -> None:
        """Replace all parameters by the numbers of a vector such as `flat_parameters` gives.

        Raises:
            ArgumentError: The vector has another length.
        """
        self.engine.write(flat.unflatten(flat.entries(self.manifest, statistics=statistics), vector))

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint: a file of this name, or in a folder that is there one named after the number of steps.

        The file is a safetensors file with all values, and with the progress as JSON in its header. It appears complete
        or not at all.

        Returns:
            The file.

        Raises:
            CheckpointError: It cannot be written.
        """
        return save(self, Path(path))

    def restore(self, path: str | os.PathLike[str]) -> Path:
        """Continue from a checkpoint: a file, or the newest one of a folder that can be used; others are warned of.

        Returns:
            The file.

        Raises:
            CheckpointError: It is damaged, or of another program; in a folder, all are.
        """
        return restore(self, Path(path))

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the trained model as it came in: same inputs, outputs and opset, in inference mode.

        Above 2 GB the weights go to `<path>.data`.

        Raises:
            ArgumentError: The path is a folder, or not writable.
            ModelError: Writing failed.
        """
        values = self.engine.read(entry.name for entry in self.manifest.stored())
        export(self.program.model("inference"), values, path)

    def __repr__(self) -> str:
        p = self.progress
        loss = f", loss {p.history[-1]['loss']:.4f}" if p.history else ""
        return f"<Trainer: {p.steps} steps, {p.epoch} epochs done{loss}; {self.program!r}>"

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _wanted(self, outputs: Sequence[str] | None) -> tuple[str, ...]:
        if outputs is None:
            return (*self.engine.losses, *self.manifest.outputs)
        names = as_names(outputs, "outputs")
        check_names(names, list(self.manifest.outputs), "output")
        return (*self.engine.losses, *names)

    def _named(self, results: Results) -> Results:
        """The loss under `"loss"`, however it is called in the graph; an output of that name gives way."""
        loss = results.pop(self.manifest.loss)
        return {"loss": loss, **{name: value for name, value in results.items() if name != "loss"}}


def _of_dtype(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    if array.dtype.kind not in "biuf":
        raise ArgumentError(f"{name!r} takes {dtype} numbers, not {array.dtype}.")
    return np.asarray(array, dtype)


def _schedule(
    program: TrainingProgram, given: Schedule | Callable[[int], float] | float | None
) -> Callable[[int], float]:
    if given is not None:
        if isinstance(given, (int, float)):
            return as_schedule(given)
        if not callable(given):
            raise ArgumentError(
                f"schedule takes a learning rate or a function of the step, not {given!r}.",
                hint="Schedules are in onnx_convgrad.optim.",
            )
        return given
    if program.schedule is None:
        name = program.manifest.optimizer["schedule"]["name"]
        raise ArgumentError(
            f"The program was built with a schedule of the class {name}, which its files cannot hold.",
            hint="Give it again: Trainer(program, schedule=...).",
        )
    return program.schedule
