"""Gradient nodes become what they compute.

Each is the reverse walk, run where the node stands, in topological order, so that a Gradient of a Gradient's result finds
an ordinary graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.autodiff.reverse import DETOUR, backward
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import DifferentiationError, ModelError, Problem, first_few
from onnx_convgrad.frontend.gradient_edges import GRADIENT, GradientCall, label
from onnx_convgrad.ir.broadcasting import shapes_differ
from onnx_convgrad.ir.constants import mark_varying
from onnx_convgrad.ir.emit import DOMAIN, Emitter, dims_equal
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import captured_values

__all__ = ["Derivative", "Expansion"]


@dataclass(frozen=True, slots=True)
class Derivative:
    """One result of a Gradient node."""

    node: str
    y: str
    x: str
    output: str


class Expansion:
    """Puts the derivatives in the place of every bound Gradient node of a graph."""

    def __init__(self, e: Emitter) -> None:
        self.e = e
        self.names = Namespace.of_nodes(e.graph)
        self.taken: set[ir.Value] = set()
        self.problems: list[Problem] = []
        self.derivatives: list[Derivative] = []

    def run(self) -> list[Derivative]:
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
        found: dict[ir.Value, ir.Value] = {}
        try:
            seed = {y: self.e.full_like(y, 1)}
            found = backward(self.e, seed, sources, partial=True, held=set(leaves) - sources.keys())
        except DifferentiationError as problem:
            remedy = f"Let y of Gradient node {label(call.node)} come before it or its xs after it"
            self.problems += [replace(p, hint=p.hint.replace(DETOUR, remedy)) for p in problem.problems]
        else:
            missing = [repr(call.xs[i]) for i in wanted if leaves[i] not in found]
            if missing:
                reason = f"{call.y_name!r} does not depend on {first_few(missing)}"
                text = f"Gradient node {label(call.node)} gives zeros: {reason}."
                warn(text)
        emitted = set(self.e.emitted)
        self.e.origin = call.node.name or ""
        for i, out in wanted.items():
            result = found[leaves[i]] if leaves[i] in found else self.e.zeros_like(call.given[i])
            name = out.name or ""
            self._replace(out, result, emitted)
            self.derivatives.append(Derivative(call.node.name or "", call.y_name, call.xs[i], name))
        self.e.origin = ""

    def _check(self, call: GradientCall, wanted: dict[int, ir.Value]) -> None:
        """Only floating tensors have derivatives, and a value takes the place of a tensor of its own dtype."""
        for i in wanted:
            if not floating(call.named[i]):
                self._refuse(
                    call, f"differentiates by {call.xs[i]!r}, which is {_dtype(call.named[i])}.", "Only zs may be that."
                )
        if not floating(call.y):
            self._refuse(call, f"differentiates {call.y_name!r}, which is {_dtype(call.y)}.", "Take y before the Cast.")
        for given, named in zip(call.given, call.named, strict=True):
            if None not in (given.dtype, named.dtype) and given.dtype != named.dtype:
                self._refuse(
                    call,
                    f"takes {given.name!r}, which is {_dtype(given)}, for {named.name!r}, which is {_dtype(named)}.",
                    "Insert a Cast.",
                )

    @staticmethod
    def _refuse(call: GradientCall, reason: str, hint: str) -> NoReturn:
        raise ModelError(f"Gradient node {label(call.node)} {reason}", hint=hint)

    # -- the point at which a gradient is taken ------------------------------------------------------------------------

    def _evaluated(self, call: GradientCall) -> tuple[list[ir.Value], ir.Value]:
        """The variables, and y as a function of them: as they stand, or computed anew from other values."""
        leaves = [
            named if given is named else self._leaf(given, named)
            for given, named in zip(call.given, call.named, strict=True)
        ]
        anew = {named: leaf for named, leaf in zip(call.named, leaves, strict=True) if leaf is not named}
        if not anew:
            return leaves, call.y
        alike = all(_alike(leaf, named) for named, leaf in anew.items())
        for node in self._between(call):
            if any(v in anew for v in (*node.inputs, *captured_values(node))):
                anew.update(zip(node.outputs, self._copy(node, anew, alike=alike), strict=True))
        return leaves, anew.get(call.y, call.y)

    def _leaf(self, given: ir.Value, named: ir.Value) -> ir.Value:
        """A variable of its own with the given value: that may be another variable, or the value of two of them."""
        node = ir.Node("", "Identity", [given], num_outputs=1)
        self.e.place(node)
        leaf = self.e.typed(node.outputs[0], given)
        if leaf.dtype is None and named.dtype is not None:
            leaf.dtype = named.dtype
        return leaf

    def _between(self, call: GradientCall) -> list[ir.Node]:
        """The nodes that lead from the named tensors to y."""
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

    def _copy(self, node: ir.Node, anew: dict[ir.Value, ir.Value], *, alike: bool) -> list[ir.Value]:
        """The node once more, on other operands."""
        inputs = [anew.get(v, v) if v is not None else None for v in node.inputs]
        attributes = [_copied(a, anew) for a in node.attributes.values()]
        copy = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
        copy.metadata_props.update(node.metadata_props)
        if node.name:
            copy.name = self.names.claim(f"{node.name}/anew")
        self.e.place(copy)
        self.e.infer(copy)
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            if alike:
                self.e.typed(new, old)
            elif new.dtype is None and old.dtype is not None:
                new.dtype = old.dtype
        return list(copy.outputs)

    # -- results -------------------------------------------------------------------------------------------------------

    def _replace(self, old: ir.Value, new: ir.Value, emitted: set[ir.Node]) -> None:
        """Put `new` in the place of a result, under its name."""
        if new.producer() not in emitted or new in self.taken:
            node = ir.Node("", "Identity", [new], num_outputs=1)
            self.e.place(node)
            new = self.e.typed(node.outputs[0], new)
        self.taken.add(new)
        if new.shape is None or (old.is_graph_output() and old.shape is not None and not shapes_differ(new, old)):
            new.shape = old.shape
        name, old.name = old.name, None
        new.name = name
        old.replace_all_uses_with(new, replace_graph_outputs=True)


def _dtype(value: ir.Value) -> str:
    return value.dtype.name if value.dtype is not None else "?"


def _copied(attribute: ir.Attr, anew: dict[ir.Value, ir.Value]) -> ir.Attr:
    """An attribute; a body that reads values of the graph around it reads the new ones."""
    if attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return attribute
    bodies = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs()
    copies = [body.clone(allow_outer_scope_values=True) for body in bodies]
    for body in copies:
        for node in body.all_nodes():
            for index, value in enumerate(node.inputs):
                if value in anew:
                    node.replace_input_with(index, anew[value])
    single = attribute.type == ir.AttributeType.GRAPH
    return ir.AttrGraph(attribute.name, copies[0]) if single else ir.AttrGraphs(attribute.name, copies)


def _alike(a: ir.Value, b: ir.Value) -> bool:
    """Whether the values certainly have one shape, and are none that shapes are made of."""
    if a.shape is None or b.shape is None or not floating(a):
        return False
    return len(a.shape) == len(b.shape) and all(map(dims_equal, a.shape, b.shape))
