"""The learning rate of a step, and the search for a good one.

The search trains a few steps with rates that grow exponentially, and sees where the loss falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from onnx_convgrad.base.boundary import CallersCode
from onnx_convgrad.base.numbers import positive, whole
from onnx_convgrad.data.batches import Batches
from onnx_convgrad.data.inputs import Batch
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.metrics.progress import Progress
from onnx_convgrad.programs.optim.schedules import Schedule, as_schedule
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.training.protocols import Row, TrainerLike
from onnx_convgrad.training.stream_states import StreamStates

_BETA = 0.98
"""Weight of the past in the smoothed loss."""

_DIVERGED = 4.0
"""Stop once the smoothed loss is this many times its minimum."""


def schedule_of(
    program: TrainingProgram, schedule: Schedule | Callable[[int], float] | float | None
) -> Callable[[int], float]:
    """The schedule that was passed, or else that of the program."""
    if isinstance(schedule, (int, float)):
        return as_schedule(schedule)
    if schedule is not None and not callable(schedule):
        raise ArgumentError(
            f"schedule takes a learning rate or a function of the step, not {schedule!r}.",
            hint="Schedules are in onnx_convgrad.schedules.",
        )
    if schedule is None and program.schedule is None:
        name = program.manifest.optimizer["schedule"]["name"]
        raise ArgumentError(
            f"The program was built with a schedule of the custom class {name}, which its files do not contain.",
            hint="Pass it again: Trainer(program, schedule=...).",
        )
    return program.schedule if schedule is None else schedule  # type: ignore[return-value]


def scheduled(schedule: Callable[[int], float], history: Sequence[Row]) -> Callable[[int], float]:
    """The schedule of the epoch that follows those of the history.

    Raises:
        ArgumentError: The last row lacks a value that the schedule depends on.
    """
    return schedule.after(history) if isinstance(schedule, Schedule) else schedule


def rate_at(schedule: Callable[[int], float], progress: Progress, step: int) -> float:
    """The learning rate of a step: the one that was set in place of the schedule, or else that of the schedule."""
    if progress.learning_rate is not None:
        return progress.learning_rate
    with CallersCode(schedule):
        rate = scheduled(schedule, progress.history[progress.scheduled_from :])(step)
    positive(rate, f"The learning rate of step {step}")
    return float(rate)


def term_weights(program: TrainingProgram, progress: Progress) -> dict[str, float]:
    """The weights of the terms of the loss that follow schedules, for the next step.

    Raises:
        ArgumentError: A schedule gives a number that is not finite, or its class is not known.
    """
    weights = {}
    for name, schedule in program.term_schedules.items():
        if schedule is None:
            raise ArgumentError(
                f"The weight {name!r} of a term follows a schedule of a custom class, which the files of the program do not "
                "contain.",
                hint="Build the program in the session that trains it, or use a schedule of onnx_convgrad.schedules.",
            )
        with CallersCode(schedule):
            weights[name] = float(scheduled(schedule, progress.history)(progress.steps))
        if not math.isfinite(weights[name]):
            raise ArgumentError(f"The weight {name!r} of a term must be finite, not {weights[name]!r}.")
    return weights


# -- the search ---------------------------------------------------------------------------------------------------------


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
    batches, states = map(trainer.inputs, _endless(source)), StreamStates(trainer.manifest)
    if states.pairs and accumulate > 1:
        raise ArgumentError("A model with states takes one batch for each update.", hint="Leave accumulate out.")
    try:
        for step in range(steps):
            group = list(islice(batches, accumulate))
            if len(group) < accumulate:
                break
            rate = lowest * (highest / lowest) ** (step / (steps - 1))
            results = engine.step([*map(states.fed, group)], rate, states.with_states(engine.losses))
            states.taken(results, ())
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
