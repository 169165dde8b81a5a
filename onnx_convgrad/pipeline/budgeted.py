"""Builds with a memory budget: what must be known for one, and what is tried if the first build does not fit."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError, ConvGradError
from onnx_convgrad.ir.shape_hints import input_shape_option
from onnx_convgrad.ir.targets import Target
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.memory.budget import Attempt, BudgetError, MemoryBudget, MemoryPlan
from onnx_convgrad.memory.timeline import timeline, value_bytes
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.runtime import session

T = TypeVar("T")


_BUILDS, _OVER = 3, 1.02
"""Builds that are tried at most, and how far the memory of ONNX Runtime's graph may exceed the budget."""

_NEAR = 1.25
"""Largest need of a refused model, in budgets, for which plans of about the least memory are loaded first."""

_MORE = (1.04, 1.08)
"""Budgets for plans of about the least memory, as multiples of the least that is predicted."""


def within_budget(
    options: Options, target: Target, run: Callable[[Options, Target], T], model: Callable[[T], ir.Model]
) -> T:
    """Run a build; run it again where it turns out that it does not keep the budget, or perhaps could.

    If the budget is too small, loops store less. On the CPU, ONNX Runtime then loads the model: if the graph that it
    makes of it needs more than predicted, predictions are raised by so much. If no plan fits, but almost, plans that need
    about the least are built, and the first whose graph in ONNX Runtime fits is taken.

    Args:
        options: What is asked for.
        target: The target.
        run: The build.
        model: The model of a result.

    Raises:
        BudgetError: The budget is too small.
    """
    target, budget = replace(target, tried={}), options.memory_budget
    if not isinstance(budget, int) or target.name != "cpu":
        return _fitted(options, target, run)
    for left in reversed(range(_BUILDS)):
        try:
            found = _fitted(options, target, run)
        except BudgetError as tight:
            if tight.fixed:
                raise
            return _least(tight, options, target, run, model)
        needed = rewritten_bytes(model(found)) if left else None
        if needed is None or needed <= _OVER * budget:
            break
        target = replace(target, memory_factor=needed / timeline(model(found).graph).peak)
    return found


def _least(
    tight: BudgetError,
    options: Options,
    target: Target,
    run: Callable[[Options, Target], T],
    model: Callable[[T], ir.Model],
) -> T:
    """A build that needs about the least, if the graph that ONNX Runtime makes of it fits, against the prediction.

    Each budget bounds workspaces differently, and so leads to other plans.
    """
    least = tight.least
    budgets: tuple[MemoryBudget, ...] = ()
    if least <= _NEAR * tight.wanted:
        budgets = (least, *(int(more * least) for more in _MORE), "min")
    for budget in budgets:
        try:
            found = _fitted(replace(options, memory_budget=budget), target, run)
        except BudgetError:
            continue
        needed = rewritten_bytes(model(found)) or least
        if needed <= _OVER * tight.wanted:
            return found
        least = min(least, needed)
    raise BudgetError(tight.wanted, least)


def _fitted(options: Options, target: Target, run: Callable[[Options, Target], T]) -> T:
    sparing = replace(target, stored=None)
    if options.memory_budget == "min":
        return run(options, sparing)
    try:
        return run(options, target)
    except BudgetError as tight:
        if not tight.loops:
            raise
        return run(replace(options, memory_budget=tight.wanted), sparing)


def remembered(attempt: Attempt, target: Target) -> Attempt:
    """The attempt with the memory factor of the target, and a memo: each plan is tried once in the builds of a model."""
    tried = {} if target.tried is None else target.tried

    def again(plan: MemoryPlan) -> tuple[int, float] | None:
        key = plan, target.stored is None
        if key not in tried:
            with _without_collection():
                tried[key] = attempt(plan)
        found = tried[key]
        return None if found is None else (round(target.memory_factor * found[0]), found[1])

    return again


@contextmanager
def _without_collection() -> Iterator[None]:
    """Do not search for garbage: an attempt makes a large graph, which is searched again and again, and drops it last."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def rewritten_bytes(model: ir.Model) -> int | None:
    """The predicted memory of runs of the graph that ONNX Runtime makes of a model, in bytes.

    It fuses nodes, merges equal ones, moves images into blocks of channels, and so changes the order. `None` if the runtime
    is not installed or does not load the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rewritten.onnx"
        try:
            session(model, rewritten=str(path))
        except ConvGradError:
            return None
        graph = ir.load(path).graph
        notes = {v.name: dict(v.metadata_props) for v in model.graph.outputs}
        for output in graph.outputs:  # the runtime does not keep them
            output.metadata_props.update(notes[output.name])
        for node in graph:
            if node.op_type.startswith("Reorder") and node.outputs[0].shape is None and node.inputs[0] is not None:
                node.outputs[0].shape = node.inputs[0].shape  # of about the same size
        found = timeline(graph, list(graph))
    return found.fixed + found.resident


def check_possible(graph: ir.Graph, budget: MemoryBudget) -> None:
    """Refuse a number of bytes for a graph whose sizes are not known, or whose inputs and stored values exceed it.

    Raises:
        ArgumentError: A size is not known.
        BudgetError: The budget is too small for any plan.
    """
    unknown = next((v for v in graph.inputs if v.shape is None or any(not isinstance(d, int) for d in v.shape)), None)
    if unknown is not None and isinstance(budget, int):
        raise ArgumentError(
            f"memory_budget is a number of bytes, but the sizes of the input {unknown.name!r} are not known.",
            hint=f"Give them, as in {input_shape_option(graph.inputs)}, or a share such as memory_budget=0.5.",
        )
    if isinstance(budget, int):
        sizes = TypicalSizes(graph)
        fixed = sum(value_bytes(v, sizes) for v in dict.fromkeys((*graph.inputs, *graph.initializers.values())))
        if fixed > budget:
            raise BudgetError(budget, fixed, fixed=True)
