"""Replace the abstract operators of a differentiated graph by standard ones."""

from __future__ import annotations

from onnx_convgrad.backends.cpu.pooled_slopes import MoveSlopesBehindPools
from onnx_convgrad.backends.cuda.channel_factors import MoveChannelFactors
from onnx_convgrad.backends.narrow_gradients import NarrowWeightGradients
from onnx_convgrad.base.progress import announce
from onnx_convgrad.frontend.quantized import unmark_quantized
from onnx_convgrad.ir.passes import RemoveUnused, run_passes
from onnx_convgrad.lowering.candidates import Policy
from onnx_convgrad.lowering.lower import lower as lower_operators
from onnx_convgrad.memory.recompute import mark_boundary
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
