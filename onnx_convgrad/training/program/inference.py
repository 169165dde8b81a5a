"""The model that a training program was made of, in inference mode: what a trained model is exported as.

It is the graph as it came in, with its own opset, inputs and outputs, wherever the trained values can be stored in it under
the names that the program knows them by; else the canonical one, which computes the same at opset 21.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnx_convgrad.frontend.files import check_destination, write
from onnx_convgrad.ir.serialize import PROTO_LIMIT
from onnx_convgrad.training.program import modes

__all__ = ["export", "inference_model"]

_OLDEST = 7
"""Before, BatchNormalization and Dropout said in an attribute which mode they are in."""


def inference_model(given: ir.Model, base: ir.Model, names: Iterable[str]) -> ir.Model:
    """A copy of `given`, or else of `base`, that stores the values called `names` as initializers.

    Args:
        given: The model as it came in.
        base: Its canonical form, with the values that training starts from.
        names: Parameters and running statistics.
    """
    m = given.clone()
    start = {name: base.graph.initializers[name].const_value for name in names}
    if given.functions or given.opset_imports.get("", _OLDEST) < _OLDEST or not _place(m.graph, start):
        m = base.clone()
    for graph in m.graphs():
        modes.inference_mode(graph)
    return m


def _place(graph: ir.Graph, start: Mapping[str, ir.TensorProtocol | None]) -> bool:
    """Make every value an initializer, in place; whether each is one of the graph's constants, with just these numbers."""
    made = {v.name: node for node in graph for v in node.outputs if v.name in start}
    for name, tensor in start.items():
        value = graph.initializers.get(name)
        if value is None and name in made:
            value = _stored(graph, made[name])
        if value is None or tensor is None or value.const_value is None or not _same(value.const_value, tensor):
            return False
        value.const_value = tensor  # one copy in memory, and in the file that a program's graphs share
    return True


def _stored(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """The result of a Constant, or of an Identity of an initializer, as an initializer."""
    old = node.outputs[0]
    source = node.inputs[0] if node.op_type == "Identity" and node.inputs else None
    if node.op_type == "Constant" and "value" in node.attributes:
        tensor = node.attributes["value"].as_tensor()
    elif source is not None and source.const_value is not None:
        tensor = source.const_value
    else:
        return None
    name, old.name = old.name, None
    new = ir.Value(name=name, shape=old.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    graph.register_initializer(new)
    return new


def _same(a: ir.TensorProtocol, b: ir.TensorProtocol) -> bool:
    if a is b:
        return True
    return a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape) and np.array_equal(a.numpy(), b.numpy())


def export(
    model: ir.Model, values: Mapping[str, np.ndarray], path: str | os.PathLike[str], limit: int = PROTO_LIMIT
) -> None:
    """Write an inference model with other values in its initializers; more than `limit` bytes go to `<path>.data`.

    Raises:
        ArgumentError: The path is a folder, or cannot be written.
        ModelError: Writing failed.
    """
    output = Path(path)
    check_destination(output)
    m = model.clone()
    for name, array in values.items():
        m.graph.initializers[name].const_value = ir.Tensor(np.asarray(array, order="C"), name=name)
    for value in m.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):  # the file must not depend on where the program lies
            value.const_value = ir.Tensor(value.const_value.numpy().copy(), name=value.name)
    write(m, output, limit)
