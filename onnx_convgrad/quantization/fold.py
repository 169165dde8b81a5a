"""Fold BatchNormalization into the convolution before it, so that a quantizer sees the weights of inference."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.layers import WeightLayer, layer_of
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op, sole_producer


def fold_batchnorm(graph: ir.Graph) -> int:
    """Fold each BatchNormalization in inference mode into the convolution that it alone reads, in place.

    With f = scale / sqrt(variance + epsilon) per channel: w' = f w and b' = f (b - mean) + bias (Jacob et al. 2018,
    section 3.2).

    Returns:
        How many were folded. Those behind other operators, or with operands that are not stored, stay.
    """
    names, folded = Namespace.of_values(graph), 0
    for node in [node for node in graph if is_op(node, "BatchNormalization")]:
        layer = layer_of(sole_producer(node.inputs[0]))
        if layer is None or not layer.convolves or not layer.takes_bias or Call(node).int("training_mode", 0):
            continue
        stored = [*node.inputs[1:], *layer.node.inputs[1:]]
        if any(v is not None and (v.const_value is None or v.is_graph_input()) for v in stored):
            continue
        _fold(graph, layer, node, names)
        folded += 1
    return folded


def _fold(graph: ir.Graph, layer: WeightLayer, norm: ir.Node, names: Namespace) -> None:
    scale, bias, mean, variance = (_numbers(v) for v in norm.inputs[1:5])
    conv, features, weight = layer.node, layer.features, layer.weight
    old = conv.inputs[2] if len(conv.inputs) > 2 else None
    assert features is not None, "a convolution has an axis of features"
    factor = scale / np.sqrt(variance + Call(norm).float("epsilon", 1e-5))
    before, groups, dtype = _numbers(weight), features.parts, (weight.dtype or ir.DataType.FLOAT).numpy()
    if groups == 1:
        scaled = before * factor.reshape([-1 if i == features.of_weight else 1 for i in range(before.ndim)])
    else:  # [C, M / group, *kernel]: the rows of a group have its factors
        rows = factor.reshape(groups, 1, -1).repeat(before.shape[0] // groups, 1).reshape(before.shape[:2])
        scaled = before * rows.reshape(*rows.shape, *[1] * (before.ndim - 2))
    shift = factor * ((0 if old is None else _numbers(old)) - mean) + bias
    name = weight.name or "weight"
    for place, value, array, new in (
        (1, weight, scaled, name),
        (2, old, shift, f"{name.removesuffix('.weight')}.bias"),
    ):
        array = array.astype(dtype)  # noqa: PLW2901
        if value is not None and len(value.uses()) == 1:
            value.const_value = ir.Tensor(array, name=value.name)
        else:
            conv.resize_inputs(3)
            conv.replace_input_with(place, store(graph, names.claim(new), array))
    result, through = norm.outputs[0], conv.outputs[0]
    name_after, result.name = result.name, None
    result.replace_all_uses_with(through, replace_graph_outputs=True)
    through.name = name_after
    operands = {v.name: v for v in norm.inputs[1:] if v is not None}
    graph.remove(norm, safe=True)
    for stored_name, value in operands.items():
        if stored_name and not value.uses() and not value.is_graph_output():
            graph.initializers.pop(stored_name, None)


def _numbers(value: ir.Value | None) -> np.ndarray:
    assert value is not None, "the operand is given"
    assert value.const_value is not None, "the operand is stored"
    return value.const_value.numpy().astype(np.float64)
