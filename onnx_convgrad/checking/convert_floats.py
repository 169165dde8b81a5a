"""Convert all floating values of a graph to one type."""

from __future__ import annotations

import onnx_ir as ir

_FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE))
_TYPE_ATTRIBUTES = {"Cast": "to", "RandomNormal": "dtype", "RandomUniform": "dtype", "EyeLike": "dtype"}


def convert_floats(graph: ir.Graph, dtype: ir.DataType) -> None:
    """Give every floating value, constant and conversion the type `dtype`; the scales of Resize stay float32."""
    for g in (graph, *graph.subgraphs()):
        for value in (*g.inputs, *g.initializers.values()):
            _convert(value, dtype)
    for node in list(graph.all_nodes()):
        for value in node.outputs:
            _convert(value, dtype)
        for name, attr in node.attributes.items():
            if attr.type == ir.AttributeType.TENSOR and attr.value.dtype in _FLOATS:
                converted = ir.Tensor(attr.value.numpy().astype(dtype.numpy()), name=attr.value.name)
                node.attributes[name] = ir.AttrTensor(name, converted)
            elif attr.name == _TYPE_ATTRIBUTES.get(node.op_type) and ir.DataType(attr.value) in _FLOATS:
                node.attributes[name] = ir.AttrInt64(name, int(dtype))
        if node.op_type == "Resize" and dtype != ir.DataType.FLOAT:
            _keep_float32(node, 2)


def _convert(value: ir.Value, dtype: ir.DataType) -> None:
    if value.dtype in _FLOATS and value.dtype != dtype:
        value.type = ir.TensorType(dtype)  # a clone shares its type object with the original
        if value.const_value is not None:
            value.const_value = ir.Tensor(value.const_value.numpy().astype(dtype.numpy()), name=value.name)


def _keep_float32(node: ir.Node, index: int) -> None:
    value = node.inputs[index] if len(node.inputs) > index else None
    if value is None or node.graph is None:
        return
    cast = ir.Node("", "Cast", [value], {"to": ir.AttrInt64("to", int(ir.DataType.FLOAT))}, num_outputs=1)
    cast.outputs[0].name = f"{node.name}__float32_{index}"
    cast.outputs[0].dtype = ir.DataType.FLOAT
    node.graph.insert_before(node, cast)
    node.replace_input_with(index, cast.outputs[0])
