"""Inline functions: those of the model, and the bodies that the standard defines for operators newer than opset 21."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.base.boundary import root_cause
from onnx_convgrad.errors import ModelError, UnsupportedCase
from onnx_convgrad.frontend.gate import expanded_nodes
from onnx_convgrad.ir.nodes import all_nodes, nested_graphs
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.ir.writer import CANONICAL_OPSET


class InlineFunctions(GraphPass):
    """Replace calls of functions by their nodes; ONNX's own inliner converts those of another opset than the model's.

    Raises:
        ModelError: Some function cannot be inlined.
    """

    def rewrite(self, model: ir.Model) -> bool:
        if not model.functions:
            return False
        try:
            if expanded_nodes(model) > _MANY:
                _inline_by_onnx(model)
            else:
                try:
                    common.InlinePass()(model)
                except ValueError:
                    _inline_by_onnx(model)
        except Exception as problem:
            raise ModelError(f"The model's functions cannot be inlined: {root_cause(problem)}.") from problem
        return True


_MANY = 1000
"""Smallest number of nodes for which ONNX's inliner is used: the time of onnx_ir's grows with their square."""


def _inline_by_onnx(model: ir.Model) -> None:
    stored = {name: value.const_value for name, value in model.graph.initializers.items()}
    result = ir.from_proto(onnx.inliner.inline_local_functions(ir.to_proto(model), convert_version=True))
    for name, value in result.graph.initializers.items():  # external ones know their folder
        value.const_value = stored.get(name, value.const_value)
    model.graph = result.graph
    model.functions.clear()


def standard_body(node: ir.Node, version: int, overload: str) -> ir.Function:
    """Make a function of the body that the standard gives the operator of `node` at opset `version`.

    The node becomes a call of it, which onnx_ir's InlinePass replaces.

    Raises:
        UnsupportedCase: There is no body, or it depends on a type or a rank that is unknown.
    """
    schema, proto = _schema_and_body(node, version)
    # The body omits the results that the call does not want, but still declares them.
    computed = {name for step in proto.node for name in step.output}
    wanted = [index for index, output in enumerate(node.outputs) if output.name]
    if not computed.issuperset(proto.output[index] for index in wanted):
        raise UnsupportedCase("the body that the standard gives it lacks one of its outputs")
    for index, output in enumerate(node.outputs):
        if index not in wanted:
            proto.output[index] = proto.output[wanted[0]]
            output.name = output.shape = output.type = None  # or the inliner would give them to the wanted output
    del proto.output[len(node.outputs) :]
    proto.domain, proto.name, proto.overload = "", node.op_type, overload
    body = ir.serde.deserialize_function(proto)
    stem = node.outputs[wanted[0]].name
    values = [v for graph in nested_graphs(body.graph) for v in (*graph.inputs, *graph.initializers.values())]
    for inner in all_nodes(body.graph):
        inner.version = body.opset_imports.get("", version)
        values += [v for v in inner.outputs if v.name]
    for value in values:
        value.name = f"{stem}_{value.name}"  # nested graphs must not share names with those around them
    body.opset_imports.clear()
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            node.attributes.add(ir.serde.deserialize_attribute(attribute.default_value))
    node.overload = overload
    return body


def _schema_and_body(node: ir.Node, version: int) -> tuple[Any, onnx.FunctionProto]:
    try:
        # Any, since the stubs of onnx omit function bodies.
        schema: Any = onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        raise UnsupportedCase("ai.onnx has no such operator") from None
    versions = schema.context_dependent_function_opset_versions or schema.function_opset_versions
    fitting = max((v for v in versions if v <= version), default=None)
    if fitting is None or schema.deprecated:
        raise UnsupportedCase(f"opset {CANONICAL_OPSET} has no such operator and the standard gives no body for it")
    if schema.has_context_dependent_function:
        call = ir.to_proto(node).SerializeToString()
        text = schema.get_context_dependent_function_with_opset_version(fitting, call, _input_types(node, schema))
    else:
        text = schema.get_function_with_opset_version(fitting)
    proto = onnx.FunctionProto.FromString(text)
    if not proto.node:
        raise UnsupportedCase("its replacement by a body needs a rank that is unknown: run shape inference first")
    return schema, proto


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
                f"its replacement needs the element type of {value.name!r}: run shape inference first"
            )
        shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
        types.append(onnx.helper.make_tensor_type_proto(int(dtype), shape).SerializeToString())
    return types
