"""Convert models to protos, within protobuf's limit of 2 GB: with all weights, or without the large ones."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from onnx_convgrad.base.boundary import root_cause
from onnx_convgrad.errors import ModelError

PROTO_LIMIT = 2**31 - 2**24
"""Bytes of weights that fit into a proto: 2 GB without a reserve for the nodes."""


def stored_tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    """The tensors of all initializers, including those of nested graphs."""
    tensors = (v.const_value for g in model.graphs() for v in g.initializers.values())
    return [t for t in tensors if t is not None]


def external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    """The tensors whose data are in a separate file."""
    return [t for t in stored_tensors(model) if isinstance(t, ir.ExternalTensor)]


def in_memory_bytes(model: ir.Model) -> int:
    """Bytes of the tensors that are not external."""
    return sum(t.nbytes for t in stored_tensors(model) if not isinstance(t, ir.ExternalTensor))


def whole_proto(model: ir.Model, limit: int = PROTO_LIMIT) -> onnx.ModelProto:
    """The model as a proto that includes its external weights, if they fit into `limit` bytes.

    A proto does not know the folder of its external weights, so without them it could only be run from there.
    """
    external = external_tensors(model)
    size = in_memory_bytes(model) + sum(t.nbytes for t in external)
    if not external or size > limit or not all(Path(t.path).exists() for t in external):
        return ir.to_proto(model)
    return ir.to_proto(ir.external_data.load_to_model(model.clone()))


_SMALL = 1024


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto whose large and external weights are inputs, so that a check never copies or reads them."""
    graph = model.graph
    large = {
        name: value
        for name, value in graph.initializers.items()
        if value.const_value is not None and _is_large(value.const_value)
    }
    added = [value for value in large.values() if not value.is_graph_input()]
    for name in large:
        del graph.initializers[name]
    graph.inputs.extend(added)
    try:
        return ir.to_proto(model)
    except ir.serde.SerdeError as problem:
        raise ModelError(f"The model holds what no ONNX file can: {root_cause(problem)}.") from problem
    finally:
        for _ in added:  # see quirks.DELETED_OUTPUTS: `del graph.inputs[i]` would leave them marked as inputs
            graph.inputs.pop()
        for name, value in large.items():
            graph.initializers[name] = value


def completed(proto: onnx.ModelProto, model: ir.Model) -> onnx.ModelProto:
    """Make a `skeleton` of the model, in place, what `whole_proto` returns, so that nodes are not converted twice.

    Nodes, inputs and outputs must be unchanged since; metadata may have changed.
    """
    if external_tensors(model):
        return whole_proto(model)
    graph, inputs = proto.graph, len(model.graph.inputs)
    graph.value_info.extend(graph.input[inputs:])
    del graph.input[inputs:], graph.initializer[:], proto.metadata_props[:]
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            value.const_value.name = name
            ir.serde.serialize_tensor_into(graph.initializer.add(), from_=value.const_value)
    for key in sorted(model.metadata_props):
        proto.metadata_props.add(key=key, value=model.metadata_props[key])
    return proto


def _is_large(tensor: ir.TensorProtocol) -> bool:
    return tensor.size > _SMALL or isinstance(tensor, ir.ExternalTensor)
