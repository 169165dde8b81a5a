"""The stages that rewrite a differentiated graph: lower it, save memory, fit the execution provider."""

from __future__ import annotations

from onnx_convgrad.backends.compared_clamps import CompareInsteadOfClamping
from onnx_convgrad.backends.cpu.fast_forms import UseFastForms
from onnx_convgrad.backends.cpu.pooled_slopes import MoveSlopesBehindPools
from onnx_convgrad.backends.cpu.widen_bfloat16 import WidenBfloat16
from onnx_convgrad.backends.cuda.batched_updates import BatchUpdates
from onnx_convgrad.backends.cuda.channel_factors import MoveChannelFactors
from onnx_convgrad.backends.cuda.staged_sums import StageSums
from onnx_convgrad.backends.missing_operators import ReplaceMissingOperators
from onnx_convgrad.backends.narrow_gradients import NarrowWeightGradients
from onnx_convgrad.backends.runtime_faults import AvoidRuntimeFaults, SeparateTransposes, WriteFloat64
from onnx_convgrad.backends.unsupported_forms import ReplaceUnsupportedForms
from onnx_convgrad.backends.weight_copies import CopyPackedWeights
from onnx_convgrad.base.progress import announce
from onnx_convgrad.frontend.quantized import unmark_quantized
from onnx_convgrad.ir.passes import RemoveUnused, run_passes
from onnx_convgrad.lowering.candidates import Policy
from onnx_convgrad.lowering.lower import lower as lower_operators
from onnx_convgrad.memory.activation_precision import NarrowActivations
from onnx_convgrad.memory.in_place import WriteInPlace
from onnx_convgrad.memory.recompute import RecomputeValues, mark_boundary
from onnx_convgrad.memory.timeline import SortByDepth
from onnx_convgrad.pipeline.built import Built


def simplify(built: Built) -> None:
    """Move factors and slopes to where they cost least, and remove what nothing uses."""
    target = built.target
    unmark_quantized(built.model.graph)
    moves = [NarrowWeightGradients(target), MoveSlopesBehindPools(target), MoveChannelFactors(target)]
    run_passes(built.model, [*moves, RemoveUnused()])


def lower(built: Built) -> None:
    """Replace abstract operators by the cheapest of their lowerings."""
    announce("lowering")
    graph, options, forward = built.model.graph, built.options, built.forward
    if forward is not None and (built.recomputed is not None or options.memory.activations is not None):
        built.mark = mark_boundary(graph, [node for node in forward if node.graph is graph])
    policy = Policy(options.target.lowering, built.plan.max_workspace, options.training, options.compare)
    built.choices = tuple(lower_operators(graph, built.target, policy))


def narrow_activations(built: Built) -> None:
    """Keep forward values for the backward part in the type that is asked for."""
    precision = built.options.memory.activations
    if built.mark is not None and precision is not None:
        run_passes(built.model, [NarrowActivations(built.target, built.mark, precision)])


def recompute(built: Built) -> None:
    """Recompute forward values in the backward part instead of keeping them."""
    if built.mark is None or built.recomputed is None:
        return
    announce("recomputing")
    selection, built.selection = built.selection, None
    if selection is None:
        values = RecomputeValues(built.target, built.mark, built.recomputed)
    else:
        values = selection.recomputing(built.model.graph, selection.places(built.plan.recompute))
    run_passes(built.model, [values])
    built.recomputation = values.report


def fit_provider(built: Built) -> None:
    """Rewrite what the provider lacks, computes wrongly or is slow at."""
    target = built.target
    fast = [WidenBfloat16(target), UseFastForms(target, training=built.options.training)] if target.on_cpu else []
    fast += [CompareInsteadOfClamping(target)] if target.slow_clamps else []
    copies = [CopyPackedWeights(target)] if target.packs_once else []
    forms = [
        AvoidRuntimeFaults(target),
        WriteFloat64(target),
        ReplaceMissingOperators(target),
        ReplaceUnsupportedForms(target),
        StageSums(target),
    ]
    run_passes(built.model, [*forms, *fast, SeparateTransposes(target), BatchUpdates(target), *copies])


def write_in_place(built: Built) -> None:
    """Let outputs be written over the inputs that they follow."""
    if built.plan.in_place:
        run_passes(built.model, [RemoveUnused(), WriteInPlace(built.following)])


def sort_nodes(built: Built) -> None:
    """With a memory budget, write nodes in an order that holds less."""
    if built.memory is not None:
        run_passes(built.model, [SortByDepth()])
