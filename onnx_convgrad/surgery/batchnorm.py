"""Insert BatchNormalization behind convolutions, so that inference computes the same as before, or exchange it.

Deployed files have BatchNormalization folded into the convolution before it. With the mean and variance that the
convolution's results have on some data as running statistics, their root as scale and the mean as bias, a
BatchNormalization is the identity in inference mode, and normalizes by the batch in training mode.

Where samples must not mix, BatchNormalization is exchanged for GroupNormalization, which treats each sample by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.layers import convolves
from onnx_convgrad.base.names import select_able
from onnx_convgrad.base.numbers import limited, whole
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.replace import become

EPSILON = 1e-5


def convolutions(graph: ir.Graph, layers: str | Iterable[str]) -> list[ir.Node]:
    """The convolutions that a BatchNormalization can follow, among those that `layers` names.

    Args:
        graph: The main graph.
        layers: Names and globs of nodes, weights or results. Those that only globs match are left out silently where
            they cannot be followed.

    Raises:
        ArgumentError: Nothing matches, a layer named in full cannot be followed, or none can.
    """
    names = {n: _names(n) for n in graph.all_nodes() if convolves(n)}
    if not names:
        raise ArgumentError("The model has no convolution.", hint="unfold_batchnorm is for convolutional networks.")
    return select_able(
        layers, names, lambda node: _obstacle(node, graph), what="convolution in layers:",
        refusal="No BatchNormalization can follow", hint="Choose others in layers.",
    )  # fmt: skip


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
    A channel that is constant (variance 0) stays the same too, because epsilon is below both roots. Mean and variance are
    those of each channel of its result, bias included.
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
    layer, dot, kind = (weight.name or "" if weight else "").rpartition(".")
    stem = f"{layer if dot and kind == 'weight' else node.name or y.name or 'conv'}.bn"
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


# -- GroupNormalization in its place -----------------------------------------------------------------------------------


@transformation
def replace_batchnorm(model: AnyModel, *, groups: int = 32) -> ir.Model:
    """Exchange every BatchNormalization for a GroupNormalization with the same scale and bias.

    GroupNormalization (Wu and He 2018, arXiv:1803.08494) normalizes each sample by itself over groups of channels, so that
    the model can be trained with privacy, or on small batches. The model computes other numbers than before, until it is
    trained: its running statistics are gone.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        groups: Most groups of a layer; the greatest divisor of its channels up to this is taken.

    Returns:
        The model at opset 21, with the same inputs and outputs. Scale and bias keep their names.

    Raises:
        ArgumentError: The model has no BatchNormalization.
        ModelError: The model cannot be read, or the number of channels of a layer is unknown.
    """
    groups = whole(groups, "groups")
    changed = cloned(load(model).canonical)
    nodes = [n for n in changed.graph.all_nodes() if is_op(n, "BatchNormalization")]
    if not nodes:
        raise ArgumentError(
            "The model has no BatchNormalization.",
            hint="Converters fold it into the convolution before it; such a file needs no replacement.",
        )
    for node in nodes:
        _replace(node, groups)
    for name in [name for name, v in changed.graph.initializers.items() if not (v.uses() or v.is_graph_output())]:
        del changed.graph.initializers[name]
    return changed


def _replace(node: ir.Node, groups: int) -> None:
    x, scale, bias = node.inputs[:3]
    size = scale.shape[0] if scale is not None and scale.shape is not None and len(scale.shape) == 1 else None
    if not isinstance(size, int):
        raise ModelError(f"The number of channels of the BatchNormalization {node.name!r} is unknown.")
    if any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        raise ModelError(f"The statistics of the BatchNormalization {node.name!r} are used elsewhere.")
    number = max(g for g in range(1, min(groups, size) + 1) if size % g == 0)
    attributes = [ir.AttrInt64("num_groups", number), ir.AttrFloat32("epsilon", Call(node).float("epsilon", 1e-5))]
    become(node, "GroupNormalization", [x, scale, bias], attributes)
