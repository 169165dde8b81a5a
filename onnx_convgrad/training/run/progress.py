"""Where a training run has got to, besides its values: what a checkpoint holds as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["PART", "Progress"]

PART = "\n"
"""Between the name of a value and that of a part of it which is averaged by itself; no metric's name has it."""


@dataclass
class Progress:
    """Counts and records of a run.

    Attributes:
        steps: Updates done.
        epoch: Epochs done.
        position: Batches done of the epoch under way.
        sums: Of the epoch under way: name -> sum and weight of what is averaged over it.
        samples: Of the epoch under way.
        seconds: Of the epoch under way.
        history: One row for each epoch done.
        callbacks: State of the callbacks of `fit`, by name.
        data: Description of the data, as `fit` was given them.
    """

    steps: int = 0
    epoch: int = 0
    position: int = 0
    sums: dict[str, list[float]] = field(default_factory=dict)
    samples: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: dict[str, Any] | None = None

    def count(self, name: str, value: float, weight: float) -> None:
        """Add to an average over the epoch."""
        entry = self.sums.setdefault(name, [0.0, 0.0])
        if weight:  # the mean over no targets is NaN
            entry[0] += value * weight
            entry[1] += weight

    def averages(self) -> dict[str, float]:
        """The averages so far; parts of a value are added up."""
        found: dict[str, float] = {}
        for name, (total, weight) in self.sums.items():
            whole = name.partition(PART)[0]
            found[whole] = found.get(whole, 0.0) + (total / weight if weight else float("nan"))
        return found

    def close_epoch(self, row: dict[str, Any]) -> None:
        """Add a row to the history, and begin the next epoch."""
        self.history.append(row)
        self.epoch += 1
        self.position = self.samples = 0
        self.sums, self.seconds = {}, 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Progress:
        """From JSON values; raises KeyError where some are missing."""
        return cls(**{f.name: found[f.name] for f in fields(cls)})
