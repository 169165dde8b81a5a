"""Replace Gradient nodes by the derivatives that they compute.

Each is replaced by a reverse walk, emitted at its place, in topological order: a Gradient of the result of another Gradient
then differentiates ordinary nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.autodiff.reverse import DETOUR, backward
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import DifferentiationError, Problem, first_few
from onnx_convgrad.frontend.gradient_edges import GRADIENT, GradientCall, label, refuse
from onnx_convgrad.ir.broadcasting import shapes_differ
from onnx_convgrad.ir.constants import mark_varying
from onnx_convgrad.ir.emit import DOMAIN, Emitter, dims_equal
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import captured_values


@dataclass(frozen=True, slots=True)
class GradientResult:
    """One result of a Gradient node."""

    node: str
    y: str
    x: str
    output: str


class Expansion:
    """Replaces every bound Gradient node of a graph."""

    def __init__(self, e: Emitter) -> None:
        self.e = e
        self.names = Namespace.of_nodes(e.graph)
        self.taken: set[ir.Value] = set()
        self.problems: list[Problem] = []
        self.derivatives: list[GradientResult] = []

    def run(self) -> list[GradientResult]:
        """Replace all nodes; raises `DifferentiationError` with the problems of all of them."""
        graph = self.e.graph
        calls = [GradientCall.of(node) for node in graph if (node.domain, node.op_type) == (DOMAIN, GRADIENT)]
        mark_varying(graph, (v for call in calls for v in (*call.given, *call.named) if floating(v)))
        for call in calls:
            self.e.anchor = call.node
            self.e.order = {n: i for i, n in enumerate(graph)}
            self._expand(GradientCall.of(call.node))
            graph.remove(call.node, safe=True)
        self.e.anchor = None
        if self.problems:
            raise DifferentiationError(list(dict.fromkeys(self.problems)))
        return self.derivatives

    def _expand(self, call: GradientCall) -> None:
        wanted = {i: out for i, out in enumerate(call.node.outputs) if out.uses() or out.is_graph_output()}
        if not wanted:
            return
        self._check(call, wanted)
        leaves, y = self._evaluated(call)
        sources = {leaves[i]: None for i in wanted}
        cotangents: dict[ir.Value, ir.Value] = {}
        try:
            seed = {y: self.e.full_like(y, 1)}
            cotangents = backward(self.e, seed, sources, partial=True, held=set(leaves) - sources.keys())
        except DifferentiationError as problem:
            remedy = f"Choose y of Gradient node {label(call.node)} before it or its xs after it"
            self.problems += [replace(p, hint=p.hint.replace(DETOUR, remedy)) for p in problem.problems]
        else:
            missing = [repr(call.xs[i]) for i in wanted if leaves[i] not in cotangents]
            if missing:
                reason = f"{call.y_name!r} does not depend on {first_few(missing)}"
                warn(f"Gradient node {label(call.node)} returns zeros: {reason}.")
        emitted = set(self.e.emitted)
        self.e.origin = call.node.name or ""
        for i, out in wanted.items():
            result = cotangents[leaves[i]] if leaves[i] in cotangents else self.e.zeros_like(call.given[i])
            name = out.name or ""
            self._replace(out, result, emitted)
            self.derivatives.append(GradientResult(call.node.name or "", call.y_name, call.xs[i], name))
        self.e.origin = ""

    def _check(self, call: GradientCall, wanted: dict[int, ir.Value]) -> None:
        """Check that all tensors of derivatives are floating, and that operands have the dtypes of the named tensors."""
        for i in wanted:
            if not floating(call.named[i]):
                reason = f"differentiates by {call.xs[i]!r}, which is {_dtype(call.named[i])}."
                refuse(call.node, reason, "Name it in zs instead of xs.")
        if not floating(call.y):
            reason = f"differentiates {call.y_name!r}, which is {_dtype(call.y)}."
            refuse(call.node, reason, "Choose y before the Cast.")
        for given, named in zip(call.given, call.named, strict=True):
            if None not in (given.dtype, named.dtype) and given.dtype != named.dtype:
                reason = (
                    f"takes {given.name!r}, which is {_dtype(given)}, for {named.name!r}, which is {_dtype(named)}."
                )
                refuse(call.node, reason, "Insert a Cast.")

    # -- the point at which a gradient is taken ------------------------------------------------------------------------

    def _evaluated(self, call: GradientCall) -> tuple[list[ir.Value], ir.Value]:
        """The variables, and y as a function of them: the values of the model, or recomputed from other values."""
        pairs = zip(call.given, call.named, strict=True)
        leaves = [named if given is named else self._leaf(given, named) for given, named in pairs]
        replaced = {named: leaf for named, leaf in zip(call.named, leaves, strict=True) if leaf is not named}
        if not replaced:
            return leaves, call.y
        same_shapes = all(_same_shape(leaf, named) for named, leaf in replaced.items())
        for node in self._between(call):
            if any(v in replaced for v in (*node.inputs, *captured_values(node))):
                replaced.update(zip(node.outputs, self._copy(node, replaced, same_shapes=same_shapes), strict=True))
        return leaves, replaced.get(call.y, call.y)

    def _leaf(self, given: ir.Value, named: ir.Value) -> ir.Value:
        """A new variable with a given value, which may also be the value of another variable."""
        leaf = self.e.copied(given)
        if leaf.dtype is None and named.dtype is not None:
            leaf.dtype = named.dtype
        return leaf

    def _between(self, call: GradientCall) -> list[ir.Node]:
        """The nodes between the named tensors and y."""
        order, cut = self.e.order, set(call.named)
        seen: set[ir.Node] = set()
        stack = [call.y]
        while stack:
            value = stack.pop()
            node = None if value in cut else value.producer()
            if node is not None and node in order and node not in seen:
                seen.add(node)
                stack.extend(v for v in (*node.inputs, *captured_values(node)) if v is not None)
        return sorted(seen, key=order.__getitem__)

    def _copy(self, node: ir.Node, replaced: dict[ir.Value, ir.Value], *, same_shapes: bool) -> list[ir.Value]:
        """Emit a copy of the node with replaced operands; returns its results."""
        inputs = [replaced.get(v, v) if v is not None else None for v in node.inputs]
        attributes = [_copied(a, replaced) for a in node.attributes.values()]
        copy = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
        copy.metadata_props.update(node.metadata_props)
        if node.name:
            copy.name = self.names.claim(f"{node.name}/anew")
        self.e.place(copy)
        self.e.infer(copy)
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            if same_shapes:
                self.e.typed(new, old)
            elif new.dtype is None and old.dtype is not None:
                new.dtype = old.dtype
        return list(copy.outputs)

    # -- results -------------------------------------------------------------------------------------------------------

    def _replace(self, old: ir.Value, new: ir.Value, emitted: set[ir.Node]) -> None:
        """Replace a result by `new`, under the name of the result."""
        if new.producer() not in emitted or new in self.taken:
            new = self.e.copied(new)
        self.taken.add(new)
        if new.shape is None or (old.is_graph_output() and old.shape is not None and not shapes_differ(new, old)):
            new.shape = old.shape
        name, old.name = old.name, None
        new.name = name
        old.replace_all_uses_with(new, replace_graph_outputs=True)


def _dtype(value: ir.Value) -> str:
    return value.dtype.name if value.dtype is not None else "?"


def _copied(attribute: ir.Attr, replaced: dict[ir.Value, ir.Value]) -> ir.Attr:
    """An attribute; a copy whose body captures the replaced values, if it is a body."""
    if attribute.type != ir.AttributeType.GRAPH:
        return attribute
    body = attribute.as_graph().clone(allow_outer_scope_values=True)
    for node in body.all_nodes():
        for index, value in enumerate(node.inputs):
            if value in replaced:
                node.replace_input_with(index, replaced[value])
    return ir.AttrGraph(attribute.name, body)


def _same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values have provably equal shapes, and are floating, so that no shape is computed from them."""
    if a.shape is None or b.shape is None or not floating(a):
        return False
    return len(a.shape) == len(b.shape) and all(map(dims_equal, a.shape, b.shape))
