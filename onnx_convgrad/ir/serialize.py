"""Convert models to protos with all weights, or without the large ones, and back.

Protobuf holds more than 2 GB in memory, but does not serialize it. Beyond this limit, the large weights of a proto are
in its memory and marked as external, with the name of a file that does not exist yet. That is the form that
`onnx.external_data_helper.convert_model_to_external_data` makes: `onnx.save(model, path)` writes the file beside `path`.
"""

from __future__ import annotations

import math
import uuid
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.base.boundary import root_cause
from onnx_convgrad.errors import ModelError
from onnx_convgrad.ir.nodes import nested_graphs

PROTO_LIMIT = 2**31 - 2**24
"""Bytes of weights that fit into a proto: 2 GB without a reserve for the nodes."""

_SMALL = 1024


def stored_tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    """The tensors of all initializers, including those of nested graphs."""
    tensors = (v.const_value for g in (model.graph, *nested_graphs(model.graph)) for v in g.initializers.values())
    return [t for t in tensors if t is not None]


def external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    """The tensors whose data are in a separate file."""
    return [t for t in stored_tensors(model) if isinstance(t, ir.ExternalTensor)]


def check_present(model: ir.Model) -> None:
    """Raise `ModelError` if a file of external weights, which was there when the model was read, is gone."""
    for tensor in external_tensors(model):
        if not Path(tensor.path).is_file():
            raise ModelError(f"The weight {tensor.name!r} was in the file {tensor.path!r}, {GONE}.", hint=REMEDY)


GONE = "which has been moved or deleted since the model was read"
REMEDY = "Put the file back, or read the model again."


def fits(model: ir.Model, limit: int | None = None, *, memory: bool = False) -> bool:
    """Whether the weights of the model, or those in `memory`, fit into one file of `limit` bytes: by default 2 GB."""
    counted = (t for t in stored_tensors(model) if not (memory and isinstance(t, ir.ExternalTensor)))
    return sum(t.nbytes for t in counted) <= (PROTO_LIMIT if limit is None else limit)


def held(model: ir.Model) -> ir.Model:
    """A copy of the model that refers to no file: external weights are views of their files, which are mapped."""
    result = model.clone()
    for graph in (result.graph, *nested_graphs(result.graph)):
        for value in graph.initializers.values():
            if isinstance(tensor := value.const_value, ir.ExternalTensor):
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
    return result


def whole_proto(model: ir.Model, limit: int | None = None) -> onnx.ModelProto:
    """The model as a proto that holds all weights, so that it can be saved and run anywhere.

    Raises:
        ModelError: The file of external weights is no longer there.
    """
    proto = ir.to_proto(held(model) if external_tensors(model) else model)
    if not fits(model, limit):
        location = f"weights-{uuid.uuid4().hex[:12]}.data"  # onnx.save appends to a file that exists
        for tensor in proto.graph.initializer:
            if tensor.HasField("raw_data") and _nbytes(tensor) > _SMALL:
                tensor.data_location = onnx.TensorProto.EXTERNAL
                tensor.external_data.add(key="location", value=location)
    return proto


def model_of(proto: onnx.ModelProto) -> ir.Model:
    """Convert a proto, also one with weights in its memory that are marked as external; they are not copied.

    Raises:
        ModelError: Such a weight has too few or too many bytes.
    """
    model = ir.from_proto(proto)
    for tensor in filter(_is_marked, proto.graph.initializer):
        model.graph.initializers[tensor.name].const_value = _in_memory(tensor)
    return model


def is_large(proto: onnx.ModelProto) -> bool:
    """Whether a proto holds more weights than can be serialized, or some that are marked as external."""
    stored = proto.graph.initializer
    return any(map(_is_marked, stored)) or sum(map(_nbytes, stored)) > PROTO_LIMIT


def _is_marked(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL and tensor.HasField("raw_data")


def _nbytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the elements, without a look at them."""
    external = tensor.data_location == onnx.TensorProto.EXTERNAL and not tensor.HasField("raw_data")
    if external or tensor.data_type not in {*map(int, ir.DataType)} - {onnx.TensorProto.STRING, 0}:
        return 0
    return int(math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth // 8)


def _in_memory(marked: onnx.TensorProto) -> ir.LazyTensor:
    """The tensor as if it were not marked. Its bytes are copied when they are read: protobuf gives no view of them."""
    dtype, shape = ir.DataType(marked.data_type), ir.Shape(marked.dims)

    def unmarked() -> ir.TensorProtocol:
        if dtype.bitwidth >= 8:
            return ir.Tensor(np.frombuffer(marked.raw_data, dtype.numpy()).reshape(shape.numpy()), dtype=dtype)
        return ir.TensorProtoTensor(
            onnx.TensorProto(data_type=marked.data_type, dims=marked.dims, raw_data=marked.raw_data)
        )

    tensor = ir.LazyTensor(unmarked, dtype, shape, name=marked.name, doc_string=marked.doc_string)
    if len(marked.raw_data) != tensor.nbytes:
        raise ModelError(f"The weight {marked.name!r} takes {tensor.nbytes} bytes, not {len(marked.raw_data)}.")
    return tensor


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
    if external_tensors(model) or not fits(model):
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
