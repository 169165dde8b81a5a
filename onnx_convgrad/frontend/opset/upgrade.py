"""Bring a model of any ai.onnx opset from 7 to 28 to opset 21, so that one set of rules covers them all.

ONNX's own version converter needs declared shapes and a serialised model, and stops at functions, foreign domains and
2 GB of weights. This one works in place on onnx_ir, node by node, driven by the table in `adapters`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import onnx
import onnx_ir as ir

from onnx_convgrad.frontend.opset.adapters import ADAPTERS, FUSED, Step
from onnx_convgrad.frontend.opset.rewriter import Rewriter, Scope, Unsupported
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import subgraphs

__all__ = ["CANONICAL_OPSET", "NEWEST_OPSET", "OLDEST_OPSET", "upgrade"]

CANONICAL_OPSET = 21
OLDEST_OPSET = 7
NEWEST_OPSET = 28

_IR_VERSION = 10
"""The IR version that introduced opset 21."""


def upgrade(model: ir.Model) -> None:
    """Rewrite `model` in place to opset 21 without changing the values that it computes.

    Covers nested graphs, model-local functions and what ONNX Runtime fused. Graph outputs keep their names. The model is
    neither serialised nor copied, and of its weights only the `scales` and `sizes` of old Resize nodes are read.

    Raises:
        ValueError: The opset is outside 7..28, or some nodes have no equivalent at 21; the message lists all of them.
            The model is then half rewritten and of no use.
    """
    version = _opset(model.opset_imports, model.graph, "The model")
    inner = [_opset(f.opset_imports, f.graph, f"Function {f.name!r}") for f in model.functions.values()]
    _settle_ir_version(model)
    walk = _Walk(model)
    walk.visit(model.graph, version, in_function=False)
    _set_opset(model.opset_imports)
    for function, inner_version in zip(model.functions.values(), inner, strict=True):
        walk.visit(function, inner_version, in_function=True)
        _set_opset(function.opset_imports)
    if walk.problems:
        listing = "\n".join(f"  - {problem}" for problem in walk.problems)
        raise ValueError(f"{len(walk.problems)} node(s) cannot be expressed at opset {CANONICAL_OPSET}:\n{listing}")


class _Walk:
    """One pass over a model. Problems are collected, so that all of them can be reported."""

    def __init__(self, model: ir.Model) -> None:
        self._functions = model.functions
        self._scope = Scope(Namespace(_value_names(model)))
        self.problems: list[str] = []

    def visit(self, nodes: Iterable[ir.Node], version: int, *, in_function: bool) -> None:
        """Rewrite nodes of opset `version` and everything nested in them."""
        # A snapshot, for what an adapter inserts is canonical already.
        for node in list(nodes):
            for _, graph in subgraphs(node):
                self.visit(graph, version, in_function=in_function)
            fused = FUSED.get((node.domain, node.op_type))
            if (node.domain != "" and fused is None) or node.op_identifier() in self._functions:
                continue
            own, op_type = node.version or version, node.op_type
            try:
                if fused is not None:
                    fused(node, Rewriter(node, self._scope, in_function=in_function))
                else:
                    self._rewrite(node, own, in_function=in_function)
            except Unsupported as problem:
                name = node.name or f"the producer of {', '.join(str(o.name) for o in node.outputs)}"
                self.problems.append(f"{name} ({op_type}, opset {own}): {problem}.")

    def _rewrite(self, node: ir.Node, version: int, *, in_function: bool) -> None:
        helper = Rewriter(node, self._scope, in_function=in_function)
        if version > CANONICAL_OPSET:
            for step in reversed(ADAPTERS.get(node.op_type, ())):
                if CANONICAL_OPSET < step.since <= version:
                    step.adapt(node, version, helper)
        else:
            at = version
            # Looked up anew after each step, because a step may turn the node into another operator.
            while (upward := _next_step(node.op_type, at)) is not None:
                upward.adapt(node, version, helper)
                at = upward.since
        if _is_canonical(node.op_type):
            node.version = None
        else:
            self._inline(node, version, helper, in_function=in_function)

    def _inline(self, node: ir.Node, version: int, helper: Rewriter, *, in_function: bool) -> None:
        """Put the body that the standard defines for an operator in its place, itself brought to the canonical opset.

        onnx_ir's inliner would inline the model's own functions, too, and wants one opset everywhere.
        """
        function, wanted = _body(node, version)
        arguments = dict.fromkeys(function.inputs, None) | dict(zip(function.inputs, node.inputs, strict=False))
        graph, stem = helper.graph, node.outputs[0].name or node.op_type
        nodes = list(function)
        for inner in _with_nested(nodes):
            for index, value in enumerate(inner.inputs):
                if value in arguments:
                    inner.replace_input_with(index, arguments[value])
            _bind_attributes(inner, node)
            own = [v for _, nested in subgraphs(inner) for v in (*nested.inputs, *nested.initializers.values())]
            for value in (*inner.outputs, *own):
                value.name = self._scope.names.claim(f"{stem}_{value.name}")
            inner.name = inner.outputs[0].name
            inner.metadata_props.update(node.metadata_props)
        results = list(function.outputs)
        function.outputs.clear()
        function.remove(nodes)
        graph.insert_before(node, nodes)
        for index, result in zip(wanted, results, strict=True):
            helper.redirect(node.outputs[index], result)
        graph.remove(node, safe=True)
        for inner in reversed(nodes):
            if not any(output.uses() or output.is_graph_output() for output in inner.outputs):
                graph.remove(inner, safe=True)
        alive = [inner for inner in nodes if inner.graph is graph]
        self.visit(alive, function.opset_imports.get("", version), in_function=in_function)


def _next_step(op_type: str, version: int) -> Step | None:
    return next((step for step in ADAPTERS.get(op_type, ()) if version < step.since <= CANONICAL_OPSET), None)


@functools.cache
def _is_canonical(op_type: str) -> bool:
    try:
        return not onnx.defs.get_schema(op_type, CANONICAL_OPSET, "").deprecated
    except onnx.defs.SchemaError:
        return False


def _body(node: ir.Node, version: int) -> tuple[ir.Function, list[int]]:
    """The function body of an operator newer than the canonical opset, with the outputs that the node asks for."""
    try:
        # Any, since the stubs of onnx leave out what concerns function bodies.
        schema: Any = onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        raise Unsupported("ai.onnx has no such operator") from None
    versions = schema.context_dependent_function_opset_versions or schema.function_opset_versions
    fitting = max((v for v in versions if v <= version), default=None)
    if fitting is None or schema.deprecated:
        raise Unsupported(f"opset {CANONICAL_OPSET} has no such operator and the standard gives no body for it")
    if schema.has_context_dependent_function:
        call = ir.to_proto(node).SerializeToString()
        text = schema.get_context_dependent_function_with_opset_version(fitting, call, _input_types(node, schema))
    else:
        text = schema.get_function_with_opset_version(fitting)
    proto = onnx.FunctionProto.FromString(text)
    if not proto.node:
        raise Unsupported("its replacement by a body needs a rank that is unknown: run shape inference first")
    # The body leaves out what the call does not want, but still declares it.
    produced = {name for step in proto.node for name in step.output}
    wanted = [index for index, output in enumerate(node.outputs) if output.name]
    names = [proto.output[index] for index in wanted]
    if not produced.issuperset(names):
        raise Unsupported("the body that the standard gives it lacks one of its outputs")
    del proto.output[:]
    proto.output.extend(names)
    return ir.from_proto(proto), wanted


def _input_types(node: ir.Node, schema: onnx.defs.OpSchema) -> list[bytes]:
    """Types for a body that depends on them; an unknown one is that of another operand with the same type variable."""
    formals = [*schema.inputs, *[schema.inputs[-1]] * len(node.inputs)] if schema.inputs else []
    by_variable: dict[str, ir.DataType] = {}
    operands = [*zip(formals, node.inputs, strict=False), *zip(schema.outputs, node.outputs, strict=False)]
    for formal, value in operands:
        dtype = Rewriter.dtype(value)
        if dtype is not None:
            by_variable.setdefault(formal.type_str, dtype)
    types = []
    for formal, value in zip(formals, node.inputs, strict=False):
        if value is None:
            types.append(onnx.TypeProto().SerializeToString())
            continue
        dtype = Rewriter.dtype(value) or by_variable.get(formal.type_str)
        if dtype is None:
            raise Unsupported(f"its replacement needs the element type of {value.name!r}: run shape inference first")
        shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
        types.append(onnx.helper.make_tensor_type_proto(int(dtype), shape).SerializeToString())
    return types


def _bind_attributes(inner: ir.Node, call: ir.Node) -> None:
    """Resolve a body's references to the attributes of the call, or to their defaults."""
    for name, attribute in list(inner.attributes.items()):
        if not attribute.is_ref():
            continue
        parameter = str(attribute.ref_attr_name)
        source = call.attributes.get(parameter)
        if source is None:
            default = onnx.defs.get_schema(call.op_type, NEWEST_OPSET, "").attributes[parameter].default_value
            source = ir.serde.deserialize_attribute(default) if default.name else None
        if source is None:
            del inner.attributes[name]
        else:
            inner.attributes.add(ir.Attr(name, source.type, source.value, source.ref_attr_name))


def _opset(imports: dict[str, int], graph: ir.Graph, owner: str) -> int:
    version = imports.get("", imports.get("ai.onnx"))
    if version is None:
        if any(node.domain == "" and node.version is None for node in graph.all_nodes()):
            raise ValueError(f"{owner} uses operators of ai.onnx without importing an opset of it.")
        return CANONICAL_OPSET
    if version < OLDEST_OPSET:
        raise ValueError(
            f"{owner} has opset {version}; the oldest supported one is {OLDEST_OPSET}. "
            f"Convert it first: onnx.version_converter.convert_version(model, {CANONICAL_OPSET})."
        )
    if version > NEWEST_OPSET:
        raise ValueError(f"{owner} has opset {version}; the newest supported one is {NEWEST_OPSET}.")
    return version


def _set_opset(imports: dict[str, int]) -> None:
    imports.pop("ai.onnx", None)
    imports[""] = CANONICAL_OPSET


def _settle_ir_version(model: ir.Model) -> None:
    """Take the IR version that belongs to the opset: runtimes refuse newer ones than they know, needed or not."""
    if model.ir_version < 4:
        # Weights had to be listed as inputs, too. From then on that says that they can be fed.
        for value in [value for value in model.graph.inputs if value.is_initializer()]:
            model.graph.inputs.remove(value)
    if not model.device_configurations:
        model.ir_version = _IR_VERSION
    model.ir_version = max(model.ir_version, _IR_VERSION)


def _with_nested(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    for node in nodes:
        yield node
        for _, graph in subgraphs(node):
            yield from _with_nested(graph)


def _value_names(model: ir.Model) -> Iterator[str]:
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for scope in (graph, *graph.subgraphs()):
            values = (*scope.inputs, *scope.initializers.values(), *(o for node in scope for o in node.outputs))
            yield from (value.name for value in values if value.name)
