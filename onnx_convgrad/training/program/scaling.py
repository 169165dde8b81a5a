"""Dynamic loss scaling inside the graph: float16 gradients are kept away from zero, and steps that overflow are skipped.

The loss is differentiated times a scale, and the gradients are divided by it. When one of them is not finite, parameters
and optimizer stay as they are and the scale shrinks; after enough good steps in a row it grows. Defaults are those of
`torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.training.optim.optimizers import joint_square

__all__ = ["LossScale", "finite", "rescale", "unless"]


@dataclass(frozen=True, slots=True)
class LossScale:
    """How the scale begins and moves.

    Args:
        initial: The first scale.
        growth: Factor after `interval` good steps in a row.
        backoff: Factor after a step that overflowed.
        interval: Number of good steps until the scale grows.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.initial < float("inf"):
            raise ArgumentError(f"initial must be above 0, not {self.initial!r}.")
        if self.growth < 1 or not 0 < self.backoff <= 1 or self.interval < 1:
            raise ArgumentError(
                "A loss scale grows by at least 1, backs off by at most 1, and waits at least one step."
            )

    def options(self) -> dict[str, Any]:
        """The options as JSON values."""
        return asdict(self)


def finite(e: Emitter, gradients: Iterable[ir.Value]) -> ir.Value:
    """Whether no entry of any gradient is infinite or NaN: a bool scalar."""
    total = joint_square(e, list(gradients))
    return e.op("Not", e.op("Or", e.op("IsNaN", total), e.op("IsInf", total)))


def rescale(e: Emitter, rule: LossScale, scale: ir.Value, good: ir.Value, ok: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The next scale, and the next number of good steps in a row."""
    count = e.where(ok, e.add(good, 1), 0)
    full = e.compare("GreaterOrEqual", count, rule.interval)
    larger = e.mul(scale, rule.growth)
    grown = e.where(e.op("And", full, e.op("Not", e.op("IsInf", larger))), larger, scale)
    return e.where(ok, grown, e.mul(scale, rule.backoff)), e.where(full, e.scalar(0, count), count)


def unless(
    e: Emitter, ok: ir.Value, following: Mapping[str, ir.Value], current: Mapping[str, ir.Value]
) -> dict[str, ir.Value]:
    """The next values where the step counts, and the current ones where it is skipped."""
    return {name: e.typed(e.where(ok, value, current[name]), current[name]) for name, value in following.items()}
