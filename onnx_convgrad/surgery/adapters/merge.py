"""Merge low-rank adapters into the weights that they adapt."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.files import AnyModel, read
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.notes import ADAPTERS
from onnx_convgrad.surgery.adapters.notes import Adapter, adapters_of


@transformation
def merge_adapters(model: AnyModel) -> ir.Model:
    """Add the product of every adapter to its weight, and remove the adapters: `W + (alpha / rank) B A` in one weight.

    The result has the nodes, inputs and outputs that the model had before `add_adapters`. A weight that other nodes read
    too is copied first.

    Args:
        model: A path, an `onnx.ModelProto` or an `onnx_ir.Model` with adapters. Never changed.

    Raises:
        ArgumentError: The model has no adapters, or the weight of one is quantized and would have to be rounded.
        ModelError: The metadata of the adapters do not fit the model.
    """
    loaded = read(model)
    adapters = adapters_of(loaded)
    if not adapters:
        raise ArgumentError(
            "The model has no adapters to merge.", hint="Adapters are added with og.transforms.add_adapters."
        )
    quantized = [repr(a.layer.weight.root.name) for a in adapters if a.layer.weight.changed]
    if quantized:
        raise ArgumentError(
            f"The adapters of {first_few(quantized)} cannot be merged: these weights are quantized, and merging would round"
            " the adapters away.",
            hint="Keep them beside the weights, or merge into the file from before quantization.",
        )
    names = Namespace.of_values(loaded.graph)
    for adapter in adapters:
        _merge(loaded.graph, adapter, names)
        _remove(loaded.graph, adapter)
    del loaded.metadata_props[ADAPTERS]
    return loaded


def _merge(graph: ir.Graph, adapter: Adapter, names: Namespace) -> None:
    """Change the weight of an adapter's layer, in place."""
    layer = adapter.layer
    assert adapter.a.const_value is not None
    assert adapter.b.const_value is not None
    change = adapter.scale * layer.product(adapter.a.const_value.numpy(), adapter.b.const_value.numpy())
    if layer.transposed:
        change = change.T
    root, numbers = layer.weight.root, layer.weight.tensor.numpy()
    if not layer.weight.shared and root.is_initializer() and not root.is_graph_input():
        for perm in layer.weight.perms:
            change = change.transpose(np.argsort(perm))
        root.const_value = ir.Tensor(_sum(numbers, change), dtype=layer.weight.tensor.dtype, name=root.name)
        return
    for perm in reversed(layer.weight.perms):
        numbers = numbers.transpose(perm)
    merged = store(graph, names.claim(f"{root.name}_merged"), _sum(numbers, change))
    layer.node.replace_input_with(layer.operand, merged)


def _sum(numbers: np.ndarray, change: np.ndarray) -> np.ndarray:
    """The sum, computed in float64."""
    total: np.ndarray = (numbers.astype(np.float64) + change).astype(numbers.dtype)
    return total


def _remove(graph: ir.Graph, adapter: Adapter) -> None:
    """Remove the nodes and weights of an adapter, in place."""
    y, total = adapter.layer.y, adapter.path[-1].outputs[0]
    named = total.is_graph_output()
    name, total.name = total.name, None
    total.replace_all_uses_with(y, replace_graph_outputs=True)
    if named:
        y.name = name
    stored = [v for node in adapter.path for v in node.inputs if v is not None and v.is_initializer()]
    graph.remove(adapter.path, safe=True)
    for value in dict.fromkeys(stored):
        if value.uses() or value.name is None:
            continue
        if value.is_graph_input():
            graph.inputs.remove(value)
        del graph.initializers[value.name]
