"""Find a learning rate: train a few steps with rates that grow exponentially, and see where the loss falls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from onnx_convgrad.base.numbers import positive, whole
from onnx_convgrad.data.batches import Batches
from onnx_convgrad.data.inputs import Batch
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.protocols import TrainerLike

_BETA = 0.98
"""Weight of the past in the smoothed loss."""

_DIVERGED = 4.0
"""Stop once the smoothed loss is this many times its minimum."""


@dataclass(frozen=True, slots=True)
class LearningRates:
    """The result of a search.

    Attributes:
        rates: The learning rates that were tried, in increasing order.
        losses: The loss of each step.
        smoothed: Their exponential moving average, without bias.
        suggestion: A learning rate; `None` if the loss does not fall.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None


def find_learning_rate(
    trainer: TrainerLike, source: Batches, lowest: float, highest: float, steps: int, accumulate: int
) -> LearningRates:
    """Train with growing rates; see `Trainer.find_learning_rate`. Values of the trainer are put back."""
    if trainer.ranks.several:
        raise ArgumentError(
            "Several ranks cannot search for a learning rate.", hint="Search in one process: without distributed=."
        )
    positive(lowest, "lowest", zero=False)
    positive(highest, "highest", zero=False)
    if highest <= lowest:
        raise ArgumentError(f"highest must be above lowest, {lowest!r}, not {highest!r}.")
    if whole(steps, "steps") < _FEWEST:
        raise ArgumentError(f"steps must be at least {_FEWEST}, not {steps}.")
    engine, names = trainer.engine, [entry.name for entry in trainer.manifest.moving()]
    before = engine.read(names)
    rates: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    average = 0.0
    batches = map(trainer.inputs, _endless(source))
    try:
        for step in range(steps):
            group = list(islice(batches, accumulate))
            if len(group) < accumulate:
                break
            rate = lowest * (highest / lowest) ** (step / (steps - 1))
            results = engine.step(group, rate, engine.losses)
            loss = float(np.sum(results[trainer.manifest.loss]))
            average = _BETA * average + (1 - _BETA) * loss
            current = average / (1 - _BETA ** (step + 1))
            if not math.isfinite(current):
                break
            rates.append(rate)
            losses.append(loss)
            smoothed.append(current)
            if current > _DIVERGED * min(smoothed) > 0:
                break
    finally:
        engine.write(before)
    if not rates:
        raise ArgumentError(
            "The data give no batches with a finite loss, so that no learning rate can be found.",
            hint="Check the data and the loss, or begin lower, such as lowest=1e-10.",
        )
    return LearningRates(tuple(rates), tuple(losses), tuple(smoothed), _valley(rates, smoothed, steps))


_FEWEST = 10
"""Fewest steps of a search."""


def _endless(source: Batches) -> Iterator[Batch]:
    """The batches of one epoch after another, until one has none."""
    for epoch in count():
        empty = True
        for batch in source.epoch_iterator(epoch):
            empty = False
            yield batch
        if empty:
            return


def _valley(rates: Sequence[float], losses: Sequence[float], steps: int) -> float | None:
    """The rate in the middle of the longest falling part of the losses, fastai's rule "valley".

    The first tenth of the steps and the last five are left out. The longest falling part is the longest chain of ever
    smaller losses, perhaps with others between.
    """
    part = losses[steps // 10 : -5]
    length = [1] * len(part)
    for i, loss in enumerate(part):
        length[i] += max((length[j] for j in range(i) if loss < part[j]), default=0)
    if not length or max(length) == 1:
        return None
    end = length.index(max(length))
    third = length[end] / 3
    return rates[steps // 10 + end - length[end] + int(third) + int(third / 2)]
