"""The progress of a training run: counts, running averages and history, stored in checkpoints as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from onnx_convgrad.base.forms import NATURAL, NUMBER, Is
from onnx_convgrad.base.notebook import table_html

PART = "\n"
"""Separates the name of an average from that of one of its terms, each averaged by itself; no metric's name has it."""


_ROW = {
    "epoch": NATURAL, "step": NATURAL, "loss": float, "learning_rate": float, "seconds": float,
    "samples_per_second": float, str: (float, list),
}  # fmt: skip
_RATE = Is("a finite number, at least 0", lambda v: NUMBER.test(v) and v >= 0)
_SUM = Is("two numbers", lambda v: isinstance(v, list) and len(v) == 2 and all(isinstance(x, (int, float)) for x in v))
_NUMBERS = Is("an array of numbers", lambda v: isinstance(v, list) and _array(v) is not None)
PROGRESS = {
    "steps": NATURAL, "epoch": NATURAL, "position": NATURAL, "sums": {str: _SUM}, "samples": NATURAL,
    "collected": {str: [_NUMBERS]},
    "seconds": NUMBER, "history": [_ROW], "callbacks": {str: {str: object}}, "data": (None, {str: object}),
    "learning_rate": (None, _RATE), "scheduled_from": NATURAL, "draws": [_SUM],
}  # fmt: skip
"""The form of a progress in JSON."""


_BESIDE = ("arrays", "states")
"""Fields that are stored beside the JSON."""


class History(list[dict[str, Any]]):
    """One row for each finished epoch: the name of each quantity -> its number. A notebook shows a table."""

    def _repr_html_(self) -> str:
        return table_html(self)


@dataclass
class Progress:
    """Counts and records of a run; `position`, `sums`, `collected`, `samples` and `seconds` are of the current epoch.

    Attributes:
        steps: Updates done.
        epoch: Epochs done.
        position: Batches done.
        sums: Name -> weighted sum and total weight of an average.
        collected: Name -> what a metric of all samples has collected.
        samples: Samples done.
        seconds: Time spent.
        history: One row for each finished epoch.
        callbacks: State of the callbacks of `fit`, by name.
        arrays: Arrays of the callbacks, by name, which are stored beside the JSON.
        states: Input -> state of the streams after the last batch, which are stored beside the JSON.
        data: Description of the data of `fit`.
        learning_rate: The learning rate that was set in place of the schedule, if any.
        scheduled_from: Epochs that were done when the schedule began.
        draws: Sampling rates of private training, each with its number of updates.
    """

    steps: int = 0
    epoch: int = 0
    position: int = 0
    sums: dict[str, list[float]] = field(default_factory=dict)
    collected: dict[str, list[np.ndarray]] = field(default_factory=dict)
    samples: int = 0
    seconds: float = 0.0
    history: History = field(default_factory=History)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    arrays: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    states: dict[str, np.ndarray] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    learning_rate: float | None = None
    scheduled_from: int = 0
    draws: list[list[float]] = field(default_factory=list)

    def resume(self, steps: int, epoch: int, draws: list[list[float]]) -> None:
        """Go on from the counts of another trainer, whose last epoch is finished."""
        self.steps, self.epoch, self.draws = steps, epoch, draws

    def drawn(self, rate: float) -> None:
        """Record an update of private training."""
        if self.draws and self.draws[-1][0] == rate:
            self.draws[-1][1] += 1
        else:
            self.draws.append([rate, 1])

    def count(self, name: str, value: float, weight: float) -> None:
        """Add a weighted value to an average over the epoch."""
        self.add(name, value * weight if weight else 0.0, weight)  # the mean over no labels is NaN

    def add(self, name: str, total: float, weight: float) -> None:
        """Add a weighted sum of values, and the sum of their weights, to an average over the epoch."""
        entry = self.sums.setdefault(name, [0.0, 0.0])
        entry[0] += total
        entry[1] += weight

    def collect(self, name: str, array: np.ndarray, *, summed: bool) -> None:
        """Add an array of a batch: to the sum, or to the list of all."""
        parts = self.collected.setdefault(name, [])
        if summed and parts:
            parts[0] = parts[0] + array
        elif array.size:
            parts.append(array)

    def averages(self) -> dict[str, float]:
        """The averages so far; the averages of terms are added up."""
        averages: dict[str, float] = {}
        for key, (total, weight) in self.sums.items():
            name = key.partition(PART)[0]
            averages[name] = averages.get(name, 0.0) + (total / weight if weight else float("nan"))
        return averages

    def close_epoch(self, row: dict[str, Any]) -> None:
        """Add a row to the history and start the next epoch."""
        self.history.append(row)
        self.epoch += 1
        self.position = self.samples = 0
        self.sums, self.collected, self.seconds = {}, {}, 0.0

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, without the arrays of callbacks and the states of streams."""
        lists = {name: [part.tolist() for part in parts] for name, parts in self.collected.items()}
        plain = asdict(replace(self, collected={}, arrays={}, states={}))
        return {**{name: value for name, value in plain.items() if name not in _BESIDE}, "collected": lists}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        """Create from JSON values of the form `PROGRESS`."""
        arrays = {name: [np.asarray(part) for part in parts] for name, parts in values["collected"].items()}
        plain = {f.name: values[f.name] for f in fields(cls) if f.name not in ("collected", *_BESIDE)}
        return cls(**{**plain, "history": History(values["history"])}, collected=arrays)


def _array(values: list[Any]) -> np.ndarray | None:
    """The array of nested lists; `None` unless they are regular and hold numbers."""
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    return array if array.dtype.kind in "if" else None
