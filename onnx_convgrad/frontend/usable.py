"""Refuse models that cannot be used, with the reason and the remedy."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.gradient_edges import GRADIENT, TRAINING_DOMAIN, label

_RUNTIME_LAYOUTS = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})
"""Domains of ONNX Runtime's own layouts, which optimization level "all" writes."""


def refuse_unusable_model(model: ir.Model) -> None:
    """Refuse an empty model and one in a layout of ONNX Runtime.

    An empty or truncated file is a valid protobuf message without a graph. A weight that ONNX Runtime has rearranged for
    the registers of one machine cannot be restored, since the file does not say how it was rearranged.
    """
    graph = model.graph
    if not (graph.inputs or graph.outputs or len(graph)):
        raise ModelError("The model is empty: it has no node, no input and no output. The file may be cut off.")
    blocked = [node for node in graph.all_nodes() if node.domain in _RUNTIME_LAYOUTS]
    if blocked:
        first = blocked[0]
        raise ModelError(
            f"{len(blocked)} nodes are in a layout that ONNX Runtime made for one machine,"
            f" the first {first.name or first.outputs[0].name!r} ({first.domain}::{first.op_type}).",
            hint="Use the model from before this optimization, or one optimized with"
            " graph_optimization_level=ORT_ENABLE_EXTENDED at most.",
        )


def refuse_unusable_graph(graph: ir.Graph) -> None:
    """Refuse Gradient nodes, whose names of tensors are not kept up to date here, and values that nothing defines."""
    gradients = [n for n in graph.all_nodes() if (n.domain, n.op_type) == (TRAINING_DOMAIN, GRADIENT)]
    if gradients:
        raise ModelError(
            f"{len(gradients)} of the model's nodes, the first {label(gradients[0])}, are Gradient of {TRAINING_DOMAIN}.",
            hint="Apply onnx_convgrad.lower_gradient_ops to the model first, or `onnx-convgrad lower`.",
        )
    defined = {*graph.inputs, *graph.initializers.values()}
    for output in graph.outputs:
        if output.producer() is None and output not in defined:
            raise ModelError(
                f"The output {output.name!r} is neither an input, nor an initializer, nor the result of a node."
            )
    for node in graph:
        for value in node.inputs:
            if value is not None and value.producer() is None and value not in defined:
                raise ModelError(
                    f"Node {node.name or node.outputs[0].name!r} ({node.op_type}) reads {value.name!r}, which is neither an"
                    " input, nor an initializer, nor the result of a node.",
                    hint="Define it; onnx.checker.check_model lists what else the model lacks.",
                )
