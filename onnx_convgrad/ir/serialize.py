"""Models as protos that hold their weights, within protobuf's limit of 2 GB."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

__all__ = ["PROTO_LIMIT", "external_tensors", "in_memory_bytes", "stored_tensors", "whole_proto"]


PROTO_LIMIT = 2**31 - 2**24
"""Protobuf stops at 2 GB; some of it is left for the nodes."""


def stored_tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    """The tensors of all initializers, those of nested graphs too."""
    tensors = (v.const_value for g in model.graphs() for v in g.initializers.values())
    return [t for t in tensors if t is not None]


def external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    """The tensors whose data are in a file of their own."""
    return [t for t in stored_tensors(model) if isinstance(t, ir.ExternalTensor)]


def in_memory_bytes(model: ir.Model) -> int:
    """Bytes of the tensors that are not external."""
    return sum(t.nbytes for t in stored_tensors(model) if not isinstance(t, ir.ExternalTensor))


def whole_proto(model: ir.Model, limit: int = PROTO_LIMIT) -> onnx.ModelProto:
    """The model as a proto that holds its external weights too, if `limit` bytes are enough.

    A proto does not know the folder that its external weights are relative to, so it could not be run from elsewhere.
    """
    external = external_tensors(model)
    size = in_memory_bytes(model) + sum(t.nbytes for t in external)
    if not external or size > limit or not all(Path(t.path).exists() for t in external):
        return ir.to_proto(model)
    return ir.to_proto(ir.external_data.load_to_model(model.clone()))


_SMALL = 1024


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto whose large and external weights are inputs, so that checking never copies or reads them."""
    graph = model.graph
    large = {
        name: value
        for name, value in graph.initializers.items()
        if value.const_value is not None and _apart(value.const_value)
    }
    added = [value for value in large.values() if not value.is_graph_input()]
    for name in large:
        del graph.initializers[name]
    graph.inputs.extend(added)
    try:
        return ir.to_proto(model)
    finally:
        for _ in added:  # onnx_ir takes for an input what `del` has taken away
            graph.inputs.pop()
        for name, value in large.items():
            graph.initializers[name] = value


def _apart(tensor: ir.TensorProtocol) -> bool:
    return tensor.size > _SMALL or isinstance(tensor, ir.ExternalTensor)
