"""Differentiate an operator through an equivalent subgraph: a rule's expansion, or the ONNX function body.

The forward node stays; the subgraph is emitted after it, and a later stage removes the parts that no gradient uses.
"""

from __future__ import annotations

from typing import Any, cast

import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter


def _schema(node: ir.Node) -> Any:  # the stubs of onnx lack the attributes of function bodies
    if node.domain:
        return None
    try:
        return onnx.defs.get_schema(node.op_type, CANONICAL_OPSET)
    except onnx.defs.SchemaError:
        return None


def has_body(node: ir.Node) -> bool:
    """Whether ONNX defines a function body for the operator."""
    schema = _schema(node)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def _body(node: ir.Node, schema: Any) -> onnx.FunctionProto:
    if schema.has_function:
        return cast(onnx.FunctionProto, schema.function_body)
    types = []
    for value in node.inputs:
        if value is None:
            types.append(onnx.TypeProto().SerializeToString())
            continue
        if value.dtype is None:
            raise UnsupportedCase(f"its function body depends on the dtype of {value.name!r}, which is unknown.")
        shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
        types.append(onnx.helper.make_tensor_type_proto(int(value.dtype), shape).SerializeToString())
    proto = ir.to_proto(node)
    del proto.output[:]
    proto.output.extend(f"out{i}" for i in range(len(node.outputs)))
    try:
        text = schema.get_context_dependent_function(proto.SerializeToString(), types)
    except (ValueError, RuntimeError, onnx.shape_inference.InferenceError) as problem:
        # its operands are of other types
        raise UnsupportedCase(f"its function body cannot be built: {problem}.") from None
    function = onnx.FunctionProto()
    function.ParseFromString(text)
    return function


def equivalent(e: Emitter, call: Call, rule: Rule | None) -> list[ir.Value | None]:
    """Emit the rule's expansion, or else the operator's function body; returns its results."""
    results = rule.function(e, call) if rule is not None and rule.function else _inline(e, call)
    return [results] if isinstance(results, ir.Value) else list(results)


def _check_axes(call: Call, schema: Any) -> None:
    """Refuse axes beyond the rank of the first operand: the operator's own kernel may ignore them, its body does not."""
    x = call.inputs[0] if call.inputs else None
    if "axes" not in schema.attributes or x is None or x.shape is None:
        return
    axes, rank = call.ints("axes") or tuple(schema.attributes["axes"].default_value.ints), len(x.shape)
    if any(not -rank <= axis < rank for axis in axes):
        raise UnsupportedCase(f"its axes are {list(axes)}, and its operand has rank {rank}.")


def _inline(e: Emitter, call: Call) -> list[ir.Value | None]:
    """Emit the operator's function body on its operands."""
    node = call.node
    schema = _schema(node)
    _check_axes(call, schema)
    function = _body(node, schema)
    values: dict[str, ir.Value | None] = dict.fromkeys(function.input)
    values.update(zip(function.input, node.inputs, strict=False))
    values[""] = None
    defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
    for step in function.node:
        if any(a.type == onnx.AttributeProto.GRAPH for a in step.attribute):
            raise UnsupportedCase("its function body has nested graphs.")
        attributes = {}
        for attr in step.attribute:
            if attr.ref_attr_name:
                if attr.ref_attr_name in node.attributes:
                    attributes[attr.name] = node.attributes[attr.ref_attr_name].value
                elif attr.ref_attr_name in defaults:
                    attributes[attr.name] = ir.serde.deserialize_attribute(defaults[attr.ref_attr_name]).value
            else:
                attributes[attr.name] = ir.from_proto(attr).value
        inputs = [values[name] for name in step.input]
        results = e.ops(step.op_type, *inputs, outputs=len(step.output), domain=step.domain, **attributes)
        values.update(zip(step.output, results, strict=True))
    return [values.get(name) for name in function.output]
