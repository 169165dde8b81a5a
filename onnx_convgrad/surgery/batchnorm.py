"""Insert BatchNormalization behind convolutions, so that inference computes the same as before.

Deployed files have BatchNormalization folded into the convolution before it. With the mean and variance that the
convolution's results have on some data as running statistics, their root as scale and the mean as bias, a
BatchNormalization is the identity in inference mode, and normalizes by the batch in training mode.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.names import as_names, select
from onnx_convgrad.base.numbers import limited
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op

EPSILON = 1e-5

_CONVOLUTIONS = ("Conv", "ConvTranspose")


def convolutions(graph: ir.Graph, layers: str | Iterable[str]) -> list[ir.Node]:
    """The convolutions that a BatchNormalization can follow, among those that `layers` names.

    Args:
        graph: The main graph.
        layers: Names and globs of nodes, weights or results. Those that only globs match are left out silently where
            they cannot be followed.

    Raises:
        ArgumentError: Nothing matches, a layer named in full cannot be followed, or none can.
    """
    names = {n: _names(n) for n in graph.all_nodes() if is_op(n, *_CONVOLUTIONS)}
    if not names:
        raise ArgumentError("The model has no convolution.", hint="unfold_batchnorm is for convolutional networks.")
    layers = as_names(layers, "layers")
    known = [name for several in names.values() for name in several]
    matched = set(select(layers, {name: [name] for name in known}, what="convolution in layers:"))
    nodes = {node: _obstacle(node, graph) for node, own in names.items() if matched.intersection(own)}
    refused = [f"{names[node][0]!r}, because {reason}" for node, reason in nodes.items()
               if reason and set(layers).intersection(names[node])]  # fmt: skip
    chosen = [node for node, reason in nodes.items() if not reason]
    if not chosen:
        refused = [f"{names[node][0]!r}, because {reason}" for node, reason in nodes.items()]
    if refused:
        raise ArgumentError(f"No BatchNormalization can follow {first_few(refused)}.", hint="Choose others in layers.")
    return chosen


def _names(node: ir.Node) -> list[str]:
    """The names by which `layers` can name a convolution."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    return [n for n in (node.name, weight.name if weight else None, node.outputs[0].name) if n]


def _obstacle(node: ir.Node, graph: ir.Graph) -> str:
    """The reason why a BatchNormalization cannot follow a convolution; empty if it can."""
    y = node.outputs[0]
    if node.graph is not graph:
        return "it is in the body of an If, Loop or Scan"
    if y.is_graph_output():
        return "its result is an output of the model"
    if any(is_op(use.node, "BatchNormalization") for use in y.uses()):
        return "a BatchNormalization follows it already"
    return "" if y.uses() else "nothing reads its result"


def insert(model: ir.Model, node: ir.Node, mean: np.ndarray, variance: np.ndarray) -> None:
    """Let a BatchNormalization with such running statistics follow a convolution, in place.

    The convolution's bias moves into it, as it was before folding; one that is computed or shared stays.
    A channel that is constant (variance 0) stays the same too, because epsilon is below both roots.

    Args:
        model: The model with `node` in its main graph.
        node: The convolution.
        mean: Mean of each channel of its result, bias included.
        variance: Variance of each channel.
    """
    graph, y, weight = model.graph, node.outputs[0], node.inputs[1]
    names = Namespace.of_values(graph)
    dtype = np.dtype((y.dtype or (weight.dtype if weight else None) or ir.DataType.FLOAT).numpy())
    variance = limited(variance, dtype.name)
    values = {
        "weight": np.sqrt(variance + np.asarray(EPSILON, dtype)),
        "bias": mean,
        "running_mean": mean - _taken_bias(graph, node),
        "running_var": variance,
    }
    stem = f"{_stem(node)}.bn"
    stored = [store(graph, names.claim(f"{stem}.{name}"), np.asarray(v, dtype)) for name, v in values.items()]
    if model.ir_version < 4:  # in which stored values must be inputs too
        graph.inputs.extend(stored)
    new = ir.Node("", "BatchNormalization", [y, *stored], [ir.AttrFloat32("epsilon", EPSILON)], name=None)
    new.name = Namespace.of_nodes(graph).claim(f"{node.name or y.name}/BatchNormalization")
    result = new.outputs[0]
    result.name, result.type, result.shape = names.claim(f"{y.name}_normalized"), y.type, y.shape
    y.replace_all_uses_with(result)
    new.replace_input_with(0, y)
    graph.insert_after(node, new)


def _taken_bias(graph: ir.Graph, node: ir.Node) -> np.ndarray | float:
    """Take the stored bias from a convolution, if nothing else reads it; return its numbers, or 0."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None or bias.const_value is None or not bias.is_initializer() or len(bias.uses()) != 1:
        return 0.0
    if bias.is_graph_input() or bias.is_graph_output() or bias.name is None or bias.name not in graph.initializers:
        return 0.0
    node.resize_inputs(2)
    del graph.initializers[bias.name]
    return np.asarray(bias.const_value.numpy(), np.float64)


def _stem(node: ir.Node) -> str:
    """The name of a layer: that of its weight without the last part, or that of its node."""
    weight = node.inputs[1]
    stem, dot, kind = (weight.name or "" if weight else "").rpartition(".")
    return stem if dot and kind == "weight" else node.name or node.outputs[0].name or "conv"
