"""Builds with a memory budget: what is tried if the first build does not keep it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from onnx_convgrad.base.progress import details
from onnx_convgrad.errors import ConvGradError
from onnx_convgrad.ir.targets import TargetInfo
from onnx_convgrad.memory.budget import BudgetError, MemoryBudget
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.pipeline.built import Built, Trials
from onnx_convgrad.pipeline.complete import STAGES, Stage, complete
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.runtime import session

Make = Callable[[Options, TargetInfo], Built]

_BUILDS, _OVER = 3, 1.02
"""Builds that are tried at most, and how far the memory of ONNX Runtime's graph may exceed the budget."""

_NEAR = 1.25
"""Largest need of a refused model, in budgets, for which plans of about the least memory are loaded first."""

_MORE = (1.04, 1.08)
"""Budgets for plans of about the least memory, as multiples of the least that is predicted."""


def within_budget(options: Options, target: TargetInfo, make: Make, stages: Sequence[Stage] = STAGES) -> Built:
    """Build a model; build it again where it turns out that it does not keep the budget, or perhaps could.

    If the budget is too small, loops store less. On the CPU, ONNX Runtime then loads the model: if the graph that it
    makes of it needs more than predicted, predictions are raised by so much. If no plan fits, but almost, plans that need
    about the least are built, and the first whose graph in ONNX Runtime fits is taken. `make` makes the state before the
    first of the stages.

    Raises:
        BudgetError: The budget is too small.
    """
    trials, budget = Trials(), options.memory.budget

    def run(options: Options, target: TargetInfo) -> Built:
        built = make(options, target)
        built.trials = trials
        complete(built, stages)
        built.trials = Trials()  # copies of the model need not outlive the builds
        return built

    if not isinstance(budget, int) or target.name != "cpu":
        return _fitted(options, target, run)
    for left in reversed(range(_BUILDS)):
        try:
            found = _fitted(options, target, run)
        except BudgetError as tight:
            if tight.fixed:
                raise
            return _least(tight, options, target, run)
        needed = rewritten_bytes(found.model) if left else None
        if needed is None or needed <= _OVER * budget:
            break
        trials.factor = needed / timeline(found.model.graph).peak
    return found


def _least(tight: BudgetError, options: Options, target: TargetInfo, run: Make) -> Built:
    """A build that needs about the least, if the graph that ONNX Runtime makes of it fits, against the prediction.

    Each budget bounds workspaces differently, and so leads to other plans.
    """
    least = tight.least
    budgets: tuple[MemoryBudget, ...] = ()
    if least <= _NEAR * tight.wanted:
        budgets = (least, *(int(more * least) for more in _MORE), "min")
    for budget in budgets:
        try:
            found = _fitted(replace(options, memory=replace(options.memory, budget=budget)), target, run)
        except BudgetError:
            continue
        needed = rewritten_bytes(found.model) or least
        if needed <= _OVER * tight.wanted:
            return found
        least = min(least, needed)
    raise BudgetError(tight.wanted, least)


def _fitted(options: Options, target: TargetInfo, run: Make) -> Built:
    sparing = replace(target, stored=None)
    with details():
        if options.memory.budget == "min":
            return run(options, sparing)
        try:
            return run(options, target)
        except BudgetError as tight:
            if not tight.loops:
                raise
            return run(replace(options, memory=replace(options.memory, budget=tight.wanted)), sparing)


def rewritten_bytes(model: ir.Model) -> int | None:
    """The predicted memory of runs of the graph that ONNX Runtime makes of a model, in bytes.

    It fuses nodes, merges equal ones, moves images into blocks of channels, and so changes the order. `None` if the runtime
    is not installed or does not load the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rewritten.onnx"
        try:
            session(model, options={"threads": 1}, rewritten=str(path))  # nothing runs
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
