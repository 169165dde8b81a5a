"""Learning-rate schedules: functions of the step number and of finished epochs, evaluated outside the graph.

A program takes the result as its input `learning_rate`, so that one graph serves every schedule. The formulas are those of
`torch.optim.lr_scheduler`, in closed form.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

from onnx_convgrad.base.best import Best, Mode
from onnx_convgrad.base.names import one_of
from onnx_convgrad.base.numbers import Check, above_zero, below_one, check_fields, natural, positive, share, whole
from onnx_convgrad.errors import ArgumentError


class Schedule(ABC):
    """A learning rate that depends on the step."""

    checks: ClassVar[Mapping[str, Check]] = {}
    """Option of a dataclass -> its check."""

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def __call__(self, step: int) -> float:
        """The learning rate after `step` finished steps.

        Args:
            step: Number of finished steps.
        """

    def after(self, history: Sequence[Mapping[str, Any]]) -> Schedule:  # noqa: ARG002 - the signature of every schedule
        """The schedule of the epoch that follows these; itself, unless it depends on what they measured.

        Args:
            history: One row for each finished epoch, as `Trainer.fit` returns them.
        """
        return self

    def to_json(self) -> dict[str, Any]:
        """Name and options as JSON values, from which `schedule_from` recreates the schedule."""
        if type(self) not in _BY_NAME.values():
            return {"name": type(self).__name__}
        own = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        plain = {k: v.to_json() if isinstance(v, Schedule) else v for k, v in own.items()}
        return {"name": type(self).__name__, **{k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}}


@dataclass(frozen=True, slots=True)
class Constant(Schedule):
    """A constant learning rate.

    Args:
        lr: The learning rate.
    """

    lr: float

    checks: ClassVar = {"lr": positive}

    def __call__(self, step: int) -> float:  # noqa: ARG002 - the signature of every schedule
        return self.lr


@dataclass(frozen=True, slots=True)
class Step(Schedule):
    """`lr gamma^floor(step / step_size)`; with `milestones`, `gamma` to the number of milestones reached.

    Args:
        lr: The first learning rate.
        step_size: Steps between two drops; 0 if `milestones` are given.
        gamma: Factor of each drop.
        milestones: Steps of the drops.
    """

    lr: float
    step_size: int = 0
    gamma: float = 0.1
    milestones: tuple[int, ...] = ()

    checks: ClassVar = {"lr": positive, "gamma": positive}

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.milestones, Iterable):
            raise ArgumentError(f"milestones must be a list of steps, not {self.milestones!r}.")
        object.__setattr__(self, "milestones", tuple(sorted(whole(m, "a milestone", 0) for m in self.milestones)))
        if bool(whole(self.step_size, "step_size", 0)) == bool(self.milestones):
            raise ArgumentError("A Step schedule takes either step_size (at least 1) or milestones, not both.")

    def __call__(self, step: int) -> float:
        drops = step // self.step_size if self.step_size else sum(step >= m for m in self.milestones)
        return float(self.lr * self.gamma**drops)


@dataclass(frozen=True, slots=True)
class Cosine(Schedule):
    """Half a cosine from `lr` down to `minimum` in `steps` steps, then `minimum`.

    Args:
        lr: The first learning rate.
        steps: Length of the descent.
        minimum: The last learning rate.
    """

    lr: float
    steps: int
    minimum: float = 0.0

    checks: ClassVar = {"lr": positive, "minimum": positive, "steps": whole}

    def __call__(self, step: int) -> float:
        share = min(step, self.steps) / self.steps
        return self.minimum + (self.lr - self.minimum) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True, slots=True)
class Warmup(Schedule):
    """Linear warm-up from `start` times the first rate of `schedule` to all of it in `steps` steps, then the schedule.

    The schedule begins after the warm-up, so a `Cosine` of n steps takes n steps more.

    Args:
        schedule: The schedule or constant rate that follows the warm-up.
        steps: Steps of linear warm-up before the schedule.
        start: First rate, as a share of the rate that the schedule starts with.
    """

    schedule: Schedule | float
    steps: int
    start: float = 0.0

    checks: ClassVar = {"steps": whole, "start": share}

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "schedule", as_schedule(self.schedule))

    def after(self, history: Sequence[Mapping[str, Any]]) -> Schedule:
        return replace(self, schedule=as_schedule(self.schedule).after(history))

    def __call__(self, step: int) -> float:
        schedule = as_schedule(self.schedule)
        if step >= self.steps:
            return schedule(step - self.steps)
        return schedule(0) * (self.start + (1 - self.start) * step / self.steps)


@dataclass(frozen=True, slots=True)
class OneCycle(Schedule):
    """From `lr / div` up to `lr` during the share `rise` of all steps, then down to `lr / (div * final_div)`.

    Smith and Topin, "Super-convergence" (2019), in PyTorch's two-phase form; momentum is not cycled.

    Args:
        lr: The highest learning rate.
        steps: Length of the whole cycle.
        rise: Share of the steps until the highest rate.
        div: The highest rate divided by the first one.
        final_div: The first rate divided by the last one.
        anneal: `"cos"` or `"linear"`: the form of both parts.
    """

    lr: float
    steps: int
    rise: float = 0.3
    div: float = 25.0
    final_div: float = 1e4
    anneal: Literal["cos", "linear"] = "cos"

    checks: ClassVar = {
        "lr": positive,
        "steps": whole,
        "div": above_zero,
        "final_div": above_zero,
        "rise": partial(share, zero=False, one=False),
        "anneal": one_of("cos", "linear"),
    }

    def __call__(self, step: int) -> float:
        first, last = self.lr / self.div, self.lr / self.div / self.final_div
        top = self.rise * self.steps - 1
        if step <= top:
            return self._blend(first, self.lr, step / top if top > 0 else 1.0)
        return self._blend(self.lr, last, min(1.0, (step - top) / max(self.steps - 1 - top, 1.0)))

    def _blend(self, start: float, end: float, share: float) -> float:
        if self.anneal == "linear":
            return start + (end - start) * share
        return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True, slots=True)
class Plateau(Schedule):
    """Multiply the rate by `factor` when a value has not improved for more than `patience` epochs.

    Equal to `torch.optim.lr_scheduler.ReduceLROnPlateau`. The rate follows from the history of `Trainer.fit`, which every
    checkpoint contains. If a checkpoint was saved under another `lr`, the epochs before it do not count.

    A loop of `Trainer.step` measures no epochs, so the rate stays at `lr`. There, keep rows of your own and set the rate
    after each of them: `trainer.learning_rate = plateau.after(rows)(trainer.progress.steps)`.

    Args:
        lr: The first learning rate.
        monitor: Column of the history.
        mode: Whether smaller (`"min"`) or larger (`"max"`) is better; `"auto"`: smaller if the name contains `loss`.
        factor: Factor of the learning rate, below 1.
        patience: Number of epochs without improvement that are tolerated.
        threshold: Smallest change that counts as an improvement: a share of the best value, or with
            `threshold_mode="abs"` a difference to it.
        threshold_mode: `"rel"` or `"abs"`.
        cooldown: Number of epochs after a reduction that do not count.
        min_lr: Smallest learning rate.
        eps: The learning rate stays if it would change by no more than this.
    """

    lr: float
    _: KW_ONLY
    monitor: str = "val_loss"
    mode: Mode = "auto"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8

    checks: ClassVar = {
        **dict.fromkeys(("lr", "min_lr", "eps"), positive),
        "factor": below_one,
        "threshold_mode": one_of("rel", "abs"),
        "patience": natural,
        "cooldown": natural,
    }

    def __post_init__(self) -> None:
        check_fields(self)
        self._best()

    def __call__(self, step: int) -> float:  # noqa: ARG002 - the signature of every schedule
        return self.lr

    def after(self, history: Sequence[Mapping[str, Any]]) -> Schedule:
        """The constant rate of the epoch that follows these; earlier rows without the value do not count.

        Args:
            history: One row for each finished epoch, as `Trainer.fit` returns them.

        Raises:
            ArgumentError: The last row does not have the value.
        """
        if not history:
            return self
        self._best().read(history[-1])
        return Constant(_reduced(self, tuple(row[self.monitor] for row in history if self.monitor in row)))

    def _best(self) -> Best:
        return Best(self.monitor, self.mode, self.threshold, relative=self.threshold_mode == "rel")


@lru_cache(maxsize=16)  # the rate of every step of an epoch
def _reduced(plateau: Plateau, values: tuple[float, ...]) -> float:
    """The rate after epochs with these values."""
    best, rate = plateau._best(), plateau.lr  # noqa: SLF001 - a part of the class, whose results are cached
    waited = cooling = 0
    for value in values:
        waited = 0 if best.improves(value) else waited + 1
        if cooling:
            cooling, waited = cooling - 1, 0
        if waited > plateau.patience:
            reduced = max(rate * plateau.factor, plateau.min_lr)
            rate = reduced if rate - reduced > plateau.eps else rate
            cooling, waited = plateau.cooldown, 0
    return rate


_BY_NAME: dict[str, type[Schedule]] = {c.__name__: c for c in (Constant, Step, Cosine, Warmup, OneCycle, Plateau)}


def schedule_from(options: Mapping[str, Any]) -> Schedule | None:
    """Recreate a schedule from a result of its `to_json`; `None` if it is, or contains, one of a custom class.

    Raises:
        ArgumentError: They do not fit.
    """
    name = options.get("name")
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    values = {k: schedule_from(v) if isinstance(v, Mapping) else v for k, v in options.items() if k != "name"}
    if kind is None or None in values.values():
        return None
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except TypeError as problem:
        raise ArgumentError(f"{problem}.") from problem


def first_rate(description: Mapping[str, Any]) -> tuple[object, object]:
    """Name and `lr` of a described schedule, or of the one that follows its warm-up."""
    inner = description.get("schedule")
    return first_rate(inner) if isinstance(inner, Mapping) else (description.get("name"), description.get("lr"))


def as_schedule(lr: Schedule | float) -> Schedule:
    """Convert a number to a constant schedule."""
    return lr if isinstance(lr, Schedule) else Constant(lr)


def describe_schedule(schedule: Callable[[int], float]) -> dict[str, Any]:
    """Describe a schedule or a function as JSON values."""
    return schedule.to_json() if isinstance(schedule, Schedule) else {"name": getattr(schedule, "__qualname__", "?")}
