"""Time a model with its gradients at several memory budgets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from onnx_convgrad.base.progress import announce
from onnx_convgrad.bench.measure import cotangent_values, working_inputs
from onnx_convgrad.bench.timing import Bound, Turns, interleave
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.load import load, reshaped
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.pipeline.options import Memory, Options
from onnx_convgrad.pipeline.stages import build

BUDGETS: tuple[float | str | None, ...] = (None, 0.8, 0.65, 0.5, 0.4, "min")
"""Shares of the memory without a budget; `None` is that itself."""


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """One budget.

    Attributes:
        budget: The budget, as `onnx_convgrad.Memory` takes it.
        memory: Predicted bytes of a run; `None` if the budget was refused.
        seconds: Measured for a run.
        refusal: Why the budget was refused.
    """

    budget: float | str | None
    memory: int | None = None
    seconds: float | None = None
    refusal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def memory_curve(model: AnyModel, options: Options, *, threads: int, repeats: int) -> list[MemoryPoint]:
    """Time the model with its gradients at each of `BUDGETS`, in turns, `repeats` times each.

    Raises:
        ModelError: No inputs were found on which the model runs.
        ConvGradError: An error of `augment`.
    """
    announce("finding inputs")
    loaded, plain = load(model), replace(options, memory=Memory())
    first = build(loaded, plain)
    feed, results = working_inputs(first)
    loaded = reshaped(loaded, {name: list(array.shape) for name, array in feed.items()})
    points: list[MemoryPoint] = []
    runs: dict[str, Turns] = {}
    for budget in BUDGETS:
        announce(f"building for the budget {budget}" if budget else "building")
        try:
            built = build(loaded, replace(plain, memory=Memory(budget)))
        except ArgumentError as refusal:
            points.append(MemoryPoint(budget, refusal=refusal.message))
            continue
        points.append(MemoryPoint(budget, timeline(built.model.graph).peak))
        runs[str(budget)] = Turns(Bound(built.model, feed | cotangent_values(built, feed, results), threads))
    announce("timing")
    seconds = interleave(runs, repeats=repeats)
    return [replace(point, seconds=seconds.get(str(point.budget))) for point in points]
