"""The schedule of a trainer and the learning rate of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnx_convgrad.base.boundary import CallersCode
from onnx_convgrad.base.numbers import positive
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.metrics.progress import Progress
from onnx_convgrad.programs.optim.schedules import Schedule, as_schedule
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.training.protocols import Row


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
