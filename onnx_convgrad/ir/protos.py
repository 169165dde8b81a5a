"""Convert models to protos as onnx_ir does, in a quarter of its time.

onnx_ir writes each field in a function of its own. Here the type of a value is written once for all values that have it,
and common attributes directly. What is rare (nodes with bodies that are references, types that are not tensors, notes of
the file) is left to onnx_ir, and so is a model that no proto can hold: its error says where.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx
import onnx_ir as ir

_KINDS = onnx.AttributeProto
_ANNOTATION = "quant_parameter_tensor_names"
"""Key of the notes of a value under which onnx_ir keeps its quantization annotation."""


def proto_of(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto, equal to that of `onnx_ir.to_proto`.

    Raises:
        onnx_ir.serde.SerdeError: No proto can hold the model.
    """
    if model.functions or model.device_configurations:
        return ir.to_proto(model)
    graph = model.graph
    shell = ir.Model(
        ir.Graph((), (), nodes=(), name=graph.name, doc_string=graph.doc_string, opset_imports=model.opset_imports),
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        domain=model.domain,
        model_version=model.model_version,
        doc_string=model.doc_string,
    )
    shell.metadata_props.update(model.metadata_props)
    shell.graph.metadata_props.update(graph.metadata_props)
    proto = ir.to_proto(shell)
    try:
        _Writer().graph(proto.graph, graph)
    except Exception:  # noqa: BLE001 - onnx_ir says what is wrong
        return ir.to_proto(model)
    return proto


class _Writer:
    """Writes graphs; the types of values are kept by dtype and sizes."""

    def __init__(self) -> None:
        self._types: dict[Any, onnx.TypeProto] = {}

    def graph(self, proto: onnx.GraphProto, graph: ir.Graph) -> None:
        """Write the values, nodes and weights of a graph, in the order of onnx_ir."""
        for value in graph.inputs:
            self._value(proto.input, value)
            if value.name not in graph.initializers:
                _annotate(proto, value)
        names = {value.name for value in graph.inputs}
        for value in graph.initializers.values():
            _annotate(proto, value)
            if value.name not in names:
                self._described(proto, value)
            if value.const_value is not None:
                value.const_value.name = value.name
                ir.serde.serialize_tensor_into(proto.initializer.add(), from_=value.const_value)
        nodes = proto.node
        for node in graph:
            self._node(nodes.add(), node)
            for value in node.outputs:
                if not value.is_graph_output():
                    _annotate(proto, value)
                    self._described(proto, value)
        for value in graph.outputs:
            self._value(proto.output, value)
            _annotate(proto, value)

    def _described(self, proto: onnx.GraphProto, value: ir.Value) -> None:
        """Write what is known of a value, if it has a name and anything is known."""
        known = value.type is not None or value.shape is not None or value.metadata_props or value.doc_string
        if known and value.name:
            self._value(proto.value_info, value)

    def _value(self, infos: Any, value: ir.Value) -> None:
        kind, shape = value.type, value.shape
        if type(kind) is not ir.TensorType or kind.denotation or value.metadata_props or value.doc_string:
            ir.serde.serialize_value_into(infos.add(), value)
            return
        dims = None if shape is None else tuple([d if isinstance(d, int) else (d.value,) for d in shape.dims])
        if shape is not None and any(map(shape.get_denotation, range(len(shape)))):
            ir.serde.serialize_value_into(infos.add(), value)
            return
        key = (kind.dtype, dims)
        info = infos.add()
        info.name = value.name
        if key in self._types:
            info.type.CopyFrom(self._types[key])
            return
        ir.serde.serialize_type_into(info.type, kind)
        if shape is not None:
            ir.serde.serialize_shape_into(info.type, shape)
        self._types[key] = info.type

    def _node(self, proto: onnx.NodeProto, node: ir.Node) -> None:
        if node.device_configurations or node.overload or node.doc_string:
            ir.serde.serialize_node_into(proto, node)
            return
        proto.op_type = node.op_type
        if node.domain:
            proto.domain = node.domain
        if node.name:
            proto.name = node.name
        for key in sorted(node.metadata_props):
            proto.metadata_props.add(key=key, value=node.metadata_props[key])
        proto.input.extend(["" if value is None else value.name for value in node.inputs])
        names = [value.name for value in node.outputs]
        while names and not names[-1]:
            names.pop()
        proto.output.extend(names)
        self._attributes(proto, node.attributes.data.values())

    def _attributes(self, proto: onnx.NodeProto, attributes: Iterable[ir.Attr]) -> None:
        for attribute in attributes:
            into, kind = proto.attribute.add(), attribute.type
            if attribute.is_ref():
                ir.serde.serialize_reference_attribute_into(into, from_=attribute)
            elif kind == ir.AttributeType.INT and not attribute.doc_string:
                into.name, into.i, into.type = attribute.name, attribute.value, _KINDS.INT
            elif kind == ir.AttributeType.INTS and not attribute.doc_string:
                into.name, into.type = attribute.name, _KINDS.INTS
                into.ints.extend(attribute.value)
            elif kind == ir.AttributeType.GRAPH and not attribute.doc_string:
                into.name, into.type = attribute.name, _KINDS.GRAPH
                body = attribute.as_graph()
                if body.name:
                    into.g.name = body.name
                if body.doc_string:
                    into.g.doc_string = body.doc_string
                for key in sorted(body.metadata_props):
                    into.g.metadata_props.add(key=key, value=body.metadata_props[key])
                self.graph(into.g, body)
            else:
                ir.serde.serialize_attribute_into(into, from_=attribute)


def _annotate(proto: onnx.GraphProto, value: ir.Value) -> None:
    """Write the quantization annotation that the file had for a value."""
    names = value.meta.get(_ANNOTATION)
    if names:
        into = proto.quantization_annotation.add(tensor_name=value.name)
        for key in sorted(names):
            into.quant_parameter_tensor_names.add(key=key, value=names[key])
