"""The training loop: epochs and batches, averages, validation and callbacks."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING, Any, Self, TypeVar

from onnx_convgrad.base.boundary import CallersCode, from_caller
from onnx_convgrad.base.warn import warn
from onnx_convgrad.data.batches import Batches, Loader
from onnx_convgrad.data.inputs import Batch
from onnx_convgrad.data.poisson import PoissonLoader
from onnx_convgrad.data.shards import shards_of
from onnx_convgrad.errors import ArgumentError, DivergenceError
from onnx_convgrad.metrics.batch_weights import loss_sum
from onnx_convgrad.metrics.metric import Metric
from onnx_convgrad.metrics.progress import Progress
from onnx_convgrad.metrics.tally import Tally, needed
from onnx_convgrad.programs.privacy import private_options
from onnx_convgrad.training.callbacks import Callback, Checkpoints
from onnx_convgrad.training.checkpoint import numbered
from onnx_convgrad.training.divergence import check_values, diverged
from onnx_convgrad.training.engine import Results
from onnx_convgrad.training.learning_rates import rate_at, scheduled
from onnx_convgrad.training.protocols import TrainerLike
from onnx_convgrad.training.stream_states import StreamStates

if TYPE_CHECKING:
    from onnx_convgrad.privacy import Accountant

T = TypeVar("T")


class TrainingRun:
    """One call of `Trainer.fit`: the `Run` that callbacks and displays see. It begins and ends as a context manager."""

    def __init__(
        self,
        trainer: TrainerLike,
        epochs: int,
        source: Batches,
        callbacks: Sequence[Callback],
        metrics: Sequence[Metric],
        display: Callback,
        accumulate: int = 1,
        steps: int | None = None,
    ) -> None:
        ranks, privacy = trainer.ranks, private_options(trainer.manifest)
        self.accountant: Accountant | None = None
        if privacy is not None:
            from onnx_convgrad.privacy import Accountant  # a tool, loaded for private runs alone

            self.accountant = Accountant(privacy)
        self.trainer, self.epochs, self.source = trainer, epochs, shards_of(source, ranks.rank, ranks.size)
        self.accumulate, self.most = accumulate, None if steps is None else steps * accumulate
        lengths = [length for length in (length_hint(source) or None, self.most) if length is not None]
        self.batches = min(lengths, default=None)
        self.reason = ""
        self._stop = self._open = False
        self._rate: float | None = None
        self._scaled = any(s.slot == "loss_scale" for s in trainer.manifest.state)
        self._taken = 0
        self.metrics, self._tally = metrics, Tally(trainer.engine.counts, metrics, ranks, whole=True)
        self._named = {name: c for name, c in _names(callbacks) if ranks.leader or not getattr(c, "leader_only", False)}
        self.callbacks = (*self._named.values(), display)

    @property
    def rate(self) -> float:
        """Learning rate of the last update."""
        if self._rate is None:  # no update since a checkpoint was restored
            progress = self.trainer.progress
            self._rate = rate_at(self.trainer.schedule, progress, max(progress.steps - 1, 0))
        return self._rate

    @property
    def epsilon(self) -> float | None:
        """The epsilon that private training has spent so far; `None` in any other."""
        return None if self.accountant is None else self.accountant.epsilon(self.trainer.progress.draws)

    def stop(self, reason: str = "") -> None:
        """End the run after the current step; a first reason is kept."""
        self.reason, self._stop = self.reason or reason, True

    def to_save(self) -> Progress:
        """The progress for a checkpoint; while the run trains, that of all ranks, with the state of the callbacks."""
        progress = self.trainer.progress
        if not self._open:
            return progress
        self._store_callbacks()
        return replace(progress, collected=self._tally.collected(progress))

    def train(self, validation: Batches | None) -> None:
        """Run the remaining epochs, each followed by a validation."""
        trainer = self.trainer
        try:
            while trainer.progress.epoch < self.epochs and not self._stopped():
                if not self._finish_epoch():
                    return
                values = trainer.engine.own()
                check_values(values, trainer.engine, trainer.progress.steps)
                trainer.engine.check_ranks()
                means = None if validation is None else evaluate(trainer, validation, self.metrics, self._stopped)
                if not self._stopped():  # else the validation is repeated when the run goes on
                    self._close_epoch(means or {})
        except DivergenceError as problem:
            raise DivergenceError(f"{problem.message}{self._last_good()}", hint=problem.hint) from None

    def _stopped(self) -> bool:
        """Whether the run was stopped, on any rank: all decide alike."""
        if not self.trainer.ranks.any(self._stop):
            return False  # a signal that has arrived since counts at the next decision
        self._stop = True
        return True

    def _agree(self) -> None:
        """Make sure that all ranks run the same training."""
        progress = self.trainer.progress
        facts = {
            "description of the data": self.source.describe(),
            "content of the first samples": self.source.probe() if isinstance(self.source, Loader) else None,
            "number of epochs": self.epochs,
            "number of batches per update": self.accumulate,
            "list of metrics": [metric.name for metric in self.metrics],
            "number of finished steps": [progress.steps, progress.epoch, progress.position],
        }
        self.trainer.ranks.agree(
            facts, "Give every rank the same data and options: it takes its own shard of each batch by itself."
        )

    def _last_good(self) -> str:
        """A sentence that names the newest checkpoint; those of a run that diverged are never saved."""
        folders = [c.folder for c in self.callbacks if isinstance(c, Checkpoints)]
        paths = [path for folder in folders if folder.is_dir() for _, path in numbered(folder)]
        return f" The last good checkpoint is {str(paths[-1])!r}." if paths else ""

    def __enter__(self) -> Self:
        self._agree()
        trainer, description = self.trainer, self.source.describe()
        before = trainer.progress.data
        if trainer.restored and before not in (None, description):
            warn(f"The data are not those of the restored run: {description}, then {before}.")
        trainer.progress.data = description
        for name, callback in self._named.items():
            if trainer.restored and name in trainer.progress.callbacks:
                with CallersCode(callback):
                    callback.arrays = trainer.progress.arrays.get(name, {})
                    callback.restore(trainer.progress.callbacks[name])
        self._call("on_begin")
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._store_callbacks()
        self._open = False
        with ExitStack() as stack:  # every callback is called, even if another one raises
            for callback in reversed(self.callbacks):
                stack.callback(self._call, "on_end", callbacks=[callback])

    def _call(self, method: str, *values: Any, callbacks: Iterable[Callback] | None = None) -> None:
        """Call a method of callbacks, by default of all."""
        for callback in self.callbacks if callbacks is None else callbacks:
            with CallersCode(callback):
                getattr(callback, method)(self, *values)

    def _store_callbacks(self) -> None:
        """Copy the state of the callbacks to the progress, which checkpoints contain."""
        for name, callback in self._named.items():
            with CallersCode(callback):
                self.trainer.progress.callbacks[name] = callback.state()
                self.trainer.progress.arrays[name] = dict(getattr(callback, "arrays", {}))

    def _finish_epoch(self) -> bool:
        """Train on the remaining batches of the epoch; return False if the run was stopped before the end."""
        trainer, progress, m = self.trainer, self.trainer.progress, self.trainer.manifest
        outputs = needed((*self.metrics, *self._named.values()), m.outputs)
        found = self.source.epoch_iterator(progress.epoch, progress.position)
        left = None if self.most is None else max(self.most - progress.position, 0)
        batches = (trainer.inputs(batch) if batch else {} for batch in islice(found, left))
        if not progress.position and not getattr(self.source, "goes_on", False):
            progress.states.clear()
        start, before = time.perf_counter(), progress.seconds
        while group := self._next(batches):
            self._rate = trainer.learning_rate
            results = trainer.step(*group, outputs=outputs)
            if isinstance(self.source, PoissonLoader):
                progress.drawn(self.source.rate)
            self._check_loss(results, group)
            progress.position += len(group)
            self._tally.add(progress, results, [batch for batch in group if batch])
            for name in filter(results.__contains__, m.grad_norms()):
                norm = float(results[name])  # of an update that float16 skips, it is not finite
                progress.count(name, norm, float(not self._scaled or math.isfinite(norm)))
            progress.seconds = before + time.perf_counter() - start
            self._call("on_step", results)
            if self._stopped():
                return False
        if progress.position == 0:
            raise ArgumentError(
                f"The data give no batches in epoch {progress.epoch + 1}.",
                hint="Give more samples, or a function that returns batches for every epoch.",
            )
        return True

    def _next(self, batches: Iterator[Batch]) -> list[Batch]:
        with CallersCode(self.source):
            return list(islice(batches, self.accumulate))

    def _check_loss(self, results: Results, group: Sequence[Batch]) -> None:
        progress, rows = self.trainer.progress, getattr(self.source, "rows", None)
        number, several = progress.position, len(group) > 1
        loss = loss_sum(results["loss"])
        if not math.isfinite(loss):
            batches = f"batches {number + 1} to {number + len(group)}" if several else f"batch {number + 1}"
            where = f"at step {progress.steps} (epoch {progress.epoch + 1}, {batches})"
            numbers = [None if rows is None else rows(progress.epoch, number + i) for i in range(len(group))]
            named = list(zip(group, numbers, strict=True))
            raise diverged(loss, where, progress.steps, named, self.trainer.engine)
        self._taken += 1
        if self._taken & (self._taken - 1) == 0:  # 1, 2, 4, 8, ...: reading all values takes time
            values = self.trainer.engine.own()
            check_values(values, self.trainer.engine, progress.steps, [batch for batch in group if batch])

    def _close_epoch(self, validation: Mapping[str, float]) -> None:
        """Add a row to the history and call the callbacks, `Checkpoints` last: they save the state of the others."""
        progress = self.trainer.progress
        row = {"epoch": progress.epoch + 1, "step": progress.steps, **self._tally.values(progress)}
        row |= {f"val_{name}": value for name, value in validation.items()}
        if self.epsilon is not None:
            row["epsilon"] = self.epsilon
        row |= {"learning_rate": self.rate, "seconds": progress.seconds}
        row["samples_per_second"] = progress.samples / max(progress.seconds, 1e-9)
        scheduled(self.trainer.schedule, [row])  # refuses a row without the value that the schedule depends on
        progress.close_epoch(row)
        self._call("on_epoch", row, callbacks=sorted(self.callbacks, key=lambda c: isinstance(c, Checkpoints)))


def evaluate(
    trainer: TrainerLike, source: Batches, metrics: Sequence[Metric], stopped: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Average loss and metrics over all batches in inference mode, or over those until it is `stopped`.

    Of several ranks, each takes its shard of every batch.

    Raises:
        ArgumentError: There are no batches.
    """
    sums, m, ranks = Progress(), trainer.manifest, trainer.ranks
    outputs, tally = needed(metrics, m.outputs), Tally(trainer.engine.counts, metrics, ranks, whole=False)
    shards, states = shards_of(source, ranks.rank, ranks.size), StreamStates(m)

    def compute(batch: Batch, names: Sequence[str]) -> Results:
        return trainer.evaluate_batch(batch, outputs=names)

    for found in from_caller(source, lambda: shards.epoch_iterator(0, 0)):
        batch = trainer.inputs(found) if found else {}
        tally.add(sums, states.run(compute, batch, outputs) if batch else {}, [batch] if batch else [])
        if stopped():
            break
    if not sums.sums:
        raise ArgumentError(
            "The data to evaluate on give no batches.", hint="Give at least one sample, or leave validation out."
        )
    return tally.values(sums)


def tell_of_data(source: Batches) -> None:
    """Warn if pixels are scaled in a way that the model's file does not name."""
    if isinstance(source, Loader) and source.dataset.source.assumed:
        warn(
            "The model's file does not say how pixels become numbers: they are scaled to [0, 1]. A model that was "
            'trained with others needs those: give --preprocessing imagenet (in Python, preprocessing="imagenet"; '
            "or clip, inception, raw), or mean and std. The preprocessing named unit means [0, 1]."
        )


def tell_of_epochs(progress: Progress, epochs: int) -> None:
    """Warn if so many epochs are finished already."""
    if 0 < epochs <= progress.epoch:
        warn(
            f"Nothing is trained: {progress.epoch} epochs are finished already, and fit was called with epochs="
            f"{epochs}, which counts all epochs of this trainer. Give epochs={progress.epoch + epochs} to go on."
        )


def check_callbacks(callbacks: object) -> None:
    """Raise `ArgumentError` unless `callbacks` is a list of callbacks."""
    if not isinstance(callbacks, Iterable) or any(isinstance(c, type) or not hasattr(c, "on_epoch") for c in callbacks):
        raise ArgumentError(
            f"callbacks takes a list of members of onnx_convgrad.callbacks, not {callbacks!r}.",
            hint="For example callbacks=[onnx_convgrad.callbacks.Log('history.csv')].",
        )


def _names(callbacks: Sequence[Callback]) -> Iterator[tuple[str, Callback]]:
    """A name for each callback: that of its class, numbered from the second of a class on."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] += 1
        yield (name if counts[name] == 1 else f"{name}_{counts[name]}"), callback
