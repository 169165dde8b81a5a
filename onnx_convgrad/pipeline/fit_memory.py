"""The stage that keeps a memory budget: it tries plans of saving memory on copies of the model."""

from __future__ import annotations

import gc
from functools import partial

import onnx_ir as ir

from onnx_convgrad.base.progress import announce, listening, watched_steps
from onnx_convgrad.errors import ArgumentError, LoweringError
from onnx_convgrad.ir.nodes import subgraphs
from onnx_convgrad.ir.passes import RemoveUnused, run_passes
from onnx_convgrad.ir.shape_hints import input_shape_option
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.memory.budget import Attempt, BudgetError, MemoryBudget, MemoryPlan, fit
from onnx_convgrad.memory.flow import value_bytes
from onnx_convgrad.memory.recompute import Selection
from onnx_convgrad.memory.timeline import least_order
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.rewrites import fit_provider, lower, narrow_activations, write_in_place


def fit_memory(built: Built) -> None:
    """Choose the plan of least predicted time that keeps the memory budget."""
    graph, options, target = built.model.graph, built.options, built.target
    if options.memory.budget is None or built.forward is None:
        return
    if target.stored:
        _check_possible(graph, options.memory.budget)
    try:
        built.memory = fit(
            remembered(partial(_attempt, built), built), options.memory.budget, options.target.max_workspace
        )
    except BudgetError as tight:
        tight.loops = target.stored is not None and any(any(subgraphs(node)) for node in graph)
        raise
    built.plan = built.memory.plan
    found = _lowered(built, built.plan.max_workspace)
    built.selection = found[1] if found and built.plan.recompute else None


# -- trials of plans ---------------------------------------------------------------------------------------------------


def _lowered(built: Built, limit: int | None) -> tuple[Built, Selection] | None:
    """A lowered copy with workspaces below a limit, and the choice of what is recomputed in it; `None` if there is none."""
    lowered = built.trials.lowered.setdefault(built.target.stored is None, {})
    whole = lowered.get(None)
    if limit is not None and whole and all(choice.workspace <= limit for choice in whole[0].choices):
        return whole  # the cheapest lowerings are small enough
    if limit not in lowered:
        copy = built.copy_under(MemoryPlan(1.0, limit))  # it recomputes, so the boundary is marked
        try:
            lower(copy)
        except LoweringError:
            if limit == built.options.target.max_workspace:
                raise
            lowered[limit] = None
            return None
        choices = tuple(choice.way for choice in copy.choices)
        if choices not in lowered:
            narrow_activations(copy)
            assert copy.mark is not None
            lowered[choices] = copy, Selection(copy.target, copy.model.graph, copy.mark)
        lowered[limit] = lowered[choices]
    return lowered[limit]


def _attempt(built: Built, plan: MemoryPlan) -> tuple[int, float] | None:
    """Try a plan on a copy of a model; plans with the same lowerings share what is lowered, in earlier builds too."""
    with watched_steps(None), listening(None):
        found = _lowered(built, plan.max_workspace)
        if found is None:
            return None
        whole, selection = found
        chosen = selection.places(plan.recompute) if plan.recompute else None
        key = chosen, plan.in_place
        if key in selection.tried:
            return selection.tried[key]
        copy = whole.copy_under(plan)
        if chosen is not None:
            run_passes(copy.model, [selection.recomputing(copy.model.graph, chosen)])
        fit_provider(copy)
        if not plan.in_place:  # else `write_in_place` does so
            run_passes(copy.model, [RemoveUnused()])
        write_in_place(copy)
    sizes = TypicalSizes(copy.model.graph)
    order, peak = least_order(copy.model.graph, sizes)
    selection.tried[key] = peak, built.trials.prices.total(order, sizes, copy.target.rates)
    return selection.tried[key]


def remembered(attempt: Attempt, built: Built) -> Attempt:
    """Attempt a plan, or answer what an earlier build has found, with the factor of the trials."""
    trials = built.trials

    def again(plan: MemoryPlan) -> tuple[int, float] | None:
        key = plan, built.target.stored is None
        if key not in trials.tried:
            announce(f"fitting the memory: plan {len(trials.tried) + 1}")
            trials.tried[key] = attempt(plan)
            gc.collect(0)  # the copy
        found = trials.tried[key]
        return None if found is None else (round(trials.factor * found[0]), found[1])

    return again


def _check_possible(graph: ir.Graph, budget: MemoryBudget) -> None:
    """Refuse a number of bytes for a graph whose sizes are not known, or whose inputs and stored values exceed it.

    Raises:
        ArgumentError: A size is not known.
        BudgetError: The budget is too small for any plan.
    """
    if not isinstance(budget, int):
        return
    unknown = next((v for v in graph.inputs if v.shape is None or any(not isinstance(d, int) for d in v.shape)), None)
    if unknown is not None:
        raise ArgumentError(
            f"The memory budget is a number of bytes, but the sizes of the input {unknown.name!r} are not known.",
            hint=f"Give them, as in {input_shape_option(graph.inputs)}, or a share of the memory without it, such as 0.5.",
        )
    sizes = TypicalSizes(graph)
    fixed = sum(value_bytes(v, sizes) for v in dict.fromkeys((*graph.inputs, *graph.initializers.values())))
    if fixed > budget:
        raise BudgetError(budget, fixed, fixed=True)
