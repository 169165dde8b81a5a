"""The loop of epochs and batches: averages, validation, callbacks, and where to take it up again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from onnx_convgrad.base.numbers import whole
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.data.sources import Batches, as_batches
from onnx_convgrad.training.run.callbacks import Callback, Checkpoints
from onnx_convgrad.training.run.display import Display, display
from onnx_convgrad.training.run.metrics import Metric, MetricLike, resolve_metrics
from onnx_convgrad.training.run.progress import Progress
from onnx_convgrad.training.run.shares import joined, parts, samples

if TYPE_CHECKING:
    from onnx_convgrad.training.run.trainer import Trainer

__all__ = ["Run", "fit", "validate"]

T = TypeVar("T")
Row = dict[str, Any]


def fit(
    trainer: Trainer,
    data: Any,
    *,
    epochs: int = 1,
    batch_size: int | None = None,
    shuffle: bool = True,
    validation: Any = None,
    metrics: Iterable[MetricLike] | MetricLike = (),
    callbacks: Sequence[Callback] = (),
    accumulate: int = 1,
    progress: str = "auto",
) -> list[Row]:
    """Train until `epochs` epochs are done in all, those of a restored checkpoint included.

    A run that was restored goes on within the epoch at the batch where it was, so the same call does for both.

    Args:
        trainer: What is trained.
        data: Arrays by name, a file or folder, or an iterable of batches: see `onnx_convgrad.data.as_batches`.
        epochs: Number of epochs.
        batch_size: Samples in a batch, of data that are not batches yet.
        shuffle: Whether those come in a new order in each epoch, drawn from the trainer's seed.
        validation: Further data, on which the model is evaluated after each epoch.
        metrics: `"accuracy"`, members of `onnx_convgrad.metrics`, or functions `(results, batch) -> number`.
        callbacks: Members of `onnx_convgrad.callbacks` or the like, called in their order.
        accumulate: Number of batches for one update.
        progress: `"bar"`, `"text"` (a line for each epoch), `"none"`, or `"auto"`: the bar on a terminal, else text. All
            goes to stderr.

    Returns:
        The history: for each epoch a row with `epoch`, `step`, `loss`, metrics, the same with `val_` before them,
        `learning_rate`, `seconds` and `samples_per_second`.

    Raises:
        ArgumentError: An argument does not fit the program.
    """
    accumulate, epochs = whole(accumulate, "accumulate"), whole(epochs, "epochs", 0)
    if not isinstance(callbacks, Iterable) or any(isinstance(c, type) or not hasattr(c, "on_epoch") for c in callbacks):
        raise ArgumentError(f"callbacks takes a list of members of onnx_convgrad.callbacks, not {callbacks!r}.")
    m = trainer.manifest
    source = as_batches(data, m, batch_size=batch_size, shuffle=shuffle, seed=trainer.seed)
    held_out = None if validation is None else as_batches(validation, m, batch_size=batch_size, shuffle=False)
    counted = resolve_metrics(metrics, m)
    trainer.engine.prepare(*(("step",) if accumulate == 1 else ("accumulate", "update")))
    run = Run(trainer, epochs, source, tuple(callbacks), display(progress))
    with run:
        while trainer.progress.epoch < epochs and not run.stopped:
            if run.epoch(counted, accumulate):
                run.close_epoch({} if held_out is None else _validation(trainer, held_out, counted))
    return trainer.progress.history


class Run:
    """One call of `fit`, as callbacks see it.

    Attributes:
        trainer: What is trained.
        epochs: Number of epochs to be done in all.
        batches: Number of batches of an epoch, where it is known.
        reason: Why the run was stopped, if it was.
    """

    def __init__(
        self, trainer: Trainer, epochs: int, source: Batches, callbacks: tuple[Callback, ...], shown: Display
    ) -> None:
        self.trainer, self.epochs, self.source = trainer, epochs, source
        self.batches = _length(source)
        self.reason = ""
        self.shown = shown
        self.callbacks: tuple[Callback, ...] = callbacks
        self._named = dict(_names(callbacks))

    @property
    def rate(self) -> float:
        """Learning rate of the last update."""
        return float(self.trainer.schedule(max(self.trainer.progress.steps - 1, 0)))

    @property
    def stopped(self) -> bool:
        """Whether the run ends after the step under way."""
        return self.trainer.stopped

    def stop(self, reason: str = "") -> None:
        """End the run after the step under way."""
        self.reason = reason
        self.trainer.stop()

    def __enter__(self) -> Self:
        trainer, described = self.trainer, self.source.describe()
        before = trainer.progress.data
        if trainer.restored and before not in (None, described):
            warn(f"The data are not those of the restored run: {described}, then {before}.")
        trainer.progress.data = described
        for name, callback in self._named.items():
            if trainer.restored and name in trainer.progress.callbacks:
                callback.restore(trainer.progress.callbacks[name])
        trainer.restored = trainer.stopped = False
        for callback in self.callbacks:
            callback.on_begin(self)
        trainer.on_save = self._note
        self.shown.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._note()
        self.trainer.on_save = None
        try:
            for callback in self.callbacks:
                callback.on_end(self)
        finally:
            self.shown.end(self)

    def _note(self) -> None:
        """Callbacks' state to the progress, of which a checkpoint is made."""
        self.trainer.progress.callbacks.update({name: c.state() for name, c in self._named.items()})

    def epoch(self, metrics: Sequence[Metric], accumulate: int) -> bool:
        """Go on to the end of the epoch; whether that was reached."""
        trainer, progress, m = self.trainer, self.trainer.progress, self.trainer.manifest
        outputs = _needed(metrics, m.outputs)
        batches = map(trainer.fitting, self.source.epoch_iterator(progress.epoch, progress.position))
        start, before = time.perf_counter(), progress.seconds
        for group in _groups(batches, accumulate):
            results = trainer.step(*group, outputs=outputs)
            progress.position += len(group)
            progress.samples += sum(samples(m, batch) for batch in group)
            for part in parts(m, results, *group):
                progress.count(*part)
            if metrics:
                whole = group[0] if len(group) == 1 else {k: joined(k, [b[k] for b in group]) for k in group[0]}
                _measure(progress, metrics, results, whole)
            progress.seconds = before + time.perf_counter() - start
            self.shown.step(self)
            for callback in self.callbacks:
                callback.on_step(self, results)
            if self.stopped:
                return False
        if progress.position == 0:
            raise ArgumentError(f"The data give no batches in epoch {progress.epoch + 1}.")
        return True

    def close_epoch(self, validation: Mapping[str, float]) -> None:
        """Add a row to the history, and begin the next epoch."""
        progress = self.trainer.progress
        row: Row = {"epoch": progress.epoch + 1, "step": progress.steps, **progress.averages()}
        row |= {f"val_{name}": value for name, value in validation.items()}
        row |= {"learning_rate": self.rate, "seconds": progress.seconds}
        row["samples_per_second"] = progress.samples / max(progress.seconds, 1e-9)
        progress.close_epoch(row)
        self.shown.epoch(self, row)
        for callback in sorted(
            self.callbacks, key=lambda c: isinstance(c, Checkpoints)
        ):  # they save what the others know
            callback.on_epoch(self, row)


def validate(
    trainer: Trainer, data: Any, metrics: Iterable[MetricLike] | MetricLike, **options: Any
) -> dict[str, float]:
    """See `Trainer.validate`."""
    source = as_batches(data, trainer.manifest, **{"shuffle": False, **options})
    return _validation(trainer, source, resolve_metrics(metrics, trainer.manifest))


def _validation(trainer: Trainer, source: Batches, metrics: Sequence[Metric]) -> dict[str, float]:
    """Averages over the data in inference mode."""
    found, m = Progress(), trainer.manifest
    outputs = _needed(metrics, m.outputs)
    for batch in map(trainer.fitting, source.epoch_iterator(0, 0)):
        results = trainer.evaluate(batch, outputs=outputs)
        for part in parts(m, results, batch):
            found.count(*part)
        _measure(found, metrics, results, batch)
    if not found.sums:
        raise ArgumentError("The data to evaluate on give no batches.")
    return found.averages()


def _measure(progress: Progress, metrics: Sequence[Metric], results: Row, batch: Mapping[str, np.ndarray]) -> None:
    for metric in metrics:
        progress.count(metric.name, *metric(results, batch))


def _needed(metrics: Sequence[Metric], outputs: Sequence[str]) -> list[str]:
    """The outputs that the metrics look at."""
    wanted = {name for metric in metrics for name in (outputs if metric.outputs is None else metric.outputs)}
    return [name for name in outputs if name in wanted]


def _groups(items: Iterator[T], size: int) -> Iterator[tuple[T, ...]]:
    """Tuples of `size` items, the last one perhaps shorter."""
    while group := tuple(islice(items, size)):
        yield group


def _length(source: Batches) -> int | None:
    try:
        return len(source)  # type: ignore[arg-type]
    except TypeError:
        return None


def _names(callbacks: Sequence[Callback]) -> Iterator[tuple[str, Callback]]:
    """A name for each: that of its class, with a number from the second of a class on."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] += 1
        yield (name if counts[name] == 1 else f"{name}_{counts[name]}"), callback
