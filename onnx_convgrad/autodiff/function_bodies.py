"""Write an operator with others: by the expansion of its rule, or the function body that ONNX gives it.

For a derivative the forward node stays; the subgraph is emitted after it, and a later stage removes the parts that no
gradient uses.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.ir.loop_bodies import emit_nodes
from onnx_convgrad.ir.nodes import all_nodes


def _schema(node: ir.Node, version: int) -> Any:  # the stubs of onnx lack the attributes of function bodies
    if node.domain:
        return None
    try:
        return onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        return None


def has_body(node: ir.Node) -> bool:
    """Whether ONNX defines a function body for the operator."""
    schema = _schema(node, CANONICAL_OPSET)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def equivalent(e: Emitter, call: Call, rule: Rule | None) -> list[ir.Value | None]:
    """Emit the rule's expansion, or else the operator's function body; returns its results."""
    if rule is None or not rule.function:
        return emit_body(e, call, CANONICAL_OPSET)[0]
    results = rule.function(e, call)
    return [results] if isinstance(results, ir.Value) else list(results)


def emit_body(e: Emitter, call: Call, version: int) -> tuple[list[ir.Value | None], int]:
    """Emit the function body that ONNX gives the operator of a node at an opset, on the operands of the node.

    Returns:
        Its results, `None` for some that the node does not want, and the opset of the nodes that were emitted.

    Raises:
        UnsupportedCase: ONNX gives the operator no body, or one that depends on a type or a rank that is unknown.
    """
    node, schema = call.node, _schema(call.node, version)
    if schema is None:
        raise UnsupportedCase("ai.onnx has no such operator.")
    _check_axes(call, schema)
    proto = _body(node, schema, version)
    declared, computed = list(proto.output), {name for step in proto.node for name in step.output}
    del proto.output[:]  # it may declare results that it does not compute, since the node does not want them
    proto.output.extend(name for name in declared if name in computed)
    body = ir.serde.deserialize_function(proto)
    for inner in all_nodes(body.graph):
        for name, attribute in list(inner.attributes.items()):
            if attribute.ref_attr_name is not None:
                given = _given(node, schema, attribute.ref_attr_name)
                del inner.attributes[name]
                if given is not None:
                    inner.attributes[name] = ir.Attr(name, given.type, given.value)
    values: dict[Any, Any] = dict.fromkeys(body.inputs)
    values.update(zip(body.inputs, node.inputs, strict=False))
    emit_nodes(e, body.graph, values)
    results = {v.name: values[v] for v in body.outputs}
    return [results.get(name) for name in declared], body.opset_imports.get("", version)


def _given(node: ir.Node, schema: Any, name: str) -> ir.Attr | None:
    """An attribute of a node, or its default."""
    default = schema.attributes[name].default_value
    return node.attributes.get(name) or (ir.serde.deserialize_attribute(default) if default.name else None)


def _body(node: ir.Node, schema: Any, version: int) -> onnx.FunctionProto:
    versions = schema.context_dependent_function_opset_versions or schema.function_opset_versions
    fitting = max((v for v in versions if v <= version), default=None)
    if fitting is None or schema.deprecated:
        raise UnsupportedCase("the standard gives no body for it.")
    text = schema.get_function_with_opset_version(fitting)
    if schema.has_context_dependent_function:
        call, types = ir.to_proto(node).SerializeToString(), _input_types(node, schema)
        try:
            text = schema.get_context_dependent_function_with_opset_version(fitting, call, types)
        except (ValueError, RuntimeError, onnx.shape_inference.InferenceError) as problem:
            # its operands are of other types
            raise UnsupportedCase(f"its function body cannot be built: {problem}.") from None
    body = onnx.FunctionProto()
    body.ParseFromString(text)
    if not body.node:
        raise UnsupportedCase("its replacement by a body needs a rank that is unknown: run shape inference first.")
    return body


def _input_types(node: ir.Node, schema: onnx.defs.OpSchema) -> list[bytes]:
    """Types of the operands; an unknown one is that of another operand or result with the same type variable."""
    formals = [*schema.inputs, *[schema.inputs[-1]] * len(node.inputs)] if schema.inputs else []
    by_variable: dict[str, ir.DataType] = {}
    for formal, value in (*zip(formals, node.inputs, strict=False), *zip(schema.outputs, node.outputs, strict=False)):
        if value is not None and value.dtype is not None:
            by_variable.setdefault(formal.type_str, value.dtype)
    types = []
    for formal, value in zip(formals, node.inputs, strict=False):
        if value is None:
            types.append(onnx.TypeProto().SerializeToString())
            continue
        dtype = value.dtype or by_variable.get(formal.type_str)
        if dtype is None:
            raise UnsupportedCase(
                f"its replacement needs the element type of {value.name!r}: run shape inference first."
            )
        shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
        types.append(onnx.helper.make_tensor_type_proto(int(dtype), shape).SerializeToString())
    return types


def _check_axes(call: Call, schema: Any) -> None:
    """Refuse axes beyond the rank of the first operand: the operator's own kernel may ignore them, its body does not."""
    x = call.inputs[0] if call.inputs else None
    if "axes" not in schema.attributes or x is None or x.shape is None:
        return
    axes, rank = call.ints("axes") or tuple(schema.attributes["axes"].default_value.ints), len(x.shape)
    if any(not -rank <= axis < rank for axis in axes):
        raise UnsupportedCase(f"its axes are {list(axes)}, and its operand has rank {rank}.")
