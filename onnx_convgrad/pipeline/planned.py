"""Lower a differentiated graph and fit it to its provider, as a memory plan says; try plans on copies of the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import onnx_ir as ir

from onnx_convgrad.backends.compared_clamps import CompareInsteadOfClamping
from onnx_convgrad.backends.cpu.fast_forms import UseFastForms
from onnx_convgrad.backends.cpu.widen_bfloat16 import WidenBfloat16
from onnx_convgrad.backends.cuda.batched_updates import BatchUpdates
from onnx_convgrad.backends.cuda.staged_sums import StageSums
from onnx_convgrad.backends.missing_operators import ReplaceMissingOperators
from onnx_convgrad.backends.runtime_faults import AvoidRuntimeFaults, SeparateTransposes
from onnx_convgrad.backends.unsupported_forms import ReplaceUnsupportedForms
from onnx_convgrad.errors import LoweringError
from onnx_convgrad.frontend.files import cloned
from onnx_convgrad.ir.passes import RemoveUnused, run_passes, watched_steps
from onnx_convgrad.ir.targets import Target
from onnx_convgrad.lowering.candidates import Policy
from onnx_convgrad.lowering.cost.node import graph_seconds
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.lowering.lower import lower as lower_operators
from onnx_convgrad.memory.activation_precision import NarrowActivations
from onnx_convgrad.memory.budget import Attempt, MemoryPlan
from onnx_convgrad.memory.in_place import WriteInPlace
from onnx_convgrad.memory.order import SortByDepth
from onnx_convgrad.memory.recompute import RecomputeValues, Selection, mark_boundary
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.pipeline.options import Options


def lower_graph(
    graph: ir.Graph, options: Options, target: Target, max_workspace: int | None, *, compare: bool = False
) -> list[Choice]:
    """Replace the abstract operators of a graph, in place."""
    return lower_operators(graph, target, Policy(options.lowering, max_workspace, options.training, compare))


def narrow_activations(m: ir.Model, options: Options, target: Target, mark: ir.Node | None) -> None:
    """Keep forward values in the type that is asked for, in place; `mark` stands before the backward part."""
    if mark is not None and options.activation_precision is not None:
        run_passes(m, [NarrowActivations(target, mark, options.activation_precision)])


def fit_provider(m: ir.Model, options: Options, target: Target, recomputing: RecomputeValues | None) -> None:
    """Recompute values, and rewrite what the provider lacks or is slow at, in place."""
    if recomputing is not None:
        run_passes(m, [recomputing])
    fast = [WidenBfloat16(target), UseFastForms(target, training=options.training)] if target.on_cpu else []
    fast += [CompareInsteadOfClamping(target)] if target.slow_clamps else []
    forms = [
        AvoidRuntimeFaults(target),
        ReplaceMissingOperators(target),
        ReplaceUnsupportedForms(target),
        StageSums(target),
    ]
    run_passes(m, [*forms, *fast, SeparateTransposes(target), BatchUpdates(target)])


def attempts(
    m: ir.Model, options: Options, target: Target, forward: Collection[ir.Node], following: Mapping[str, str]
) -> Attempt:
    """Try plans on copies of a model; plans with the same lowerings share what is lowered."""
    before = set(forward)
    places = [i for i, node in enumerate(m.graph) if node in before]
    lowered: dict[Any, tuple[ir.Model, Selection]] = {}  # by workspace and by choices

    def copy_of(limit: int | None) -> tuple[ir.Model, Selection]:
        if limit not in lowered:
            copy = cloned(m)
            nodes = list(copy.graph)
            mark = mark_boundary(copy.graph, [nodes[i] for i in places])
            choices = tuple(choice.way for choice in lower_graph(copy.graph, options, target, limit))
            if choices not in lowered:
                narrow_activations(copy, options, target, mark)
                lowered[choices] = copy, Selection(target, copy.graph, mark)
            lowered[limit] = lowered[choices]
        return lowered[limit]

    def attempt(plan: MemoryPlan) -> tuple[int, float] | None:
        with watched_steps(lambda *_: None):
            try:
                whole, selection = copy_of(plan.max_workspace)
            except LoweringError:
                if plan.max_workspace == options.max_workspace:
                    raise
                return None
            chosen = selection.places(plan.recompute) if plan.recompute else None
            key = chosen, plan.in_place
            if key in selection.tried:
                return selection.tried[key]
            copy = cloned(whole)
            fit_provider(copy, options, target, None if chosen is None else selection.recomputing(copy.graph, chosen))
            writing = [WriteInPlace(following)] if plan.in_place else []
            run_passes(copy, [RemoveUnused(), *writing, SortByDepth()])
        sizes = TypicalSizes(copy.graph)
        seconds = graph_seconds(copy.graph, sizes, target.rates)
        selection.tried[key] = timeline(copy.graph, sizes=sizes).peak, seconds
        return selection.tried[key]

    return attempt
