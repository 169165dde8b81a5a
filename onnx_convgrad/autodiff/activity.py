"""Activity analysis: the nodes that a derivative passes through, and the operands of a node that carry it.

A node is active if it is reachable forward from a source and backward from a value in `of`, along floating operands that its
rule differentiates. No derivative is emitted for other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Rule, lookup
from onnx_convgrad.errors import Problem, UnsupportedCase
from onnx_convgrad.ir.call import Call, stem
from onnx_convgrad.ir.nodes import captured_values
from onnx_convgrad.ir.notes import is_detach

_FLOATS = frozenset(
    (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16, ir.DataType.COMPLEX64)
)


def floating(value: ir.Value) -> bool:
    """Whether the value is a floating tensor; an unknown dtype counts as floating."""
    return value.dtype is None or value.dtype in _FLOATS


MISFIT = (ArithmeticError, AssertionError, IndexError, TypeError, ValueError)
"""Errors that built-in rules raise where attributes, ranks and sizes of a node contradict one another."""


def misfit(fault: Exception) -> UnsupportedCase:
    """The problem of a node on which a built-in rule raised one of `MISFIT`."""
    return UnsupportedCase(
        f"its attributes and operands do not fit together ({type(fault).__name__}: {fault}).",
        hint="If ONNX Runtime runs the model, please report this error with it.",
    )


def rule_of(node: ir.Node) -> Rule | None:
    """The rule of the node's operator, or `None`."""
    return lookup(node.domain, node.op_type)


def carriers(node: ir.Node, rule: Rule | None) -> Iterator[tuple[str, ir.Value]]:
    """The operands of `node` that carry a derivative, by name; every floating operand if there is no rule."""
    if rule is None or rule.kind == "not_differentiable":
        for i, value in enumerate(node.inputs):
            if value is not None and floating(value):
                yield f"inputs.{i}", value
        for value in captured_values(node):
            if floating(value):
                yield "captured", value
        return
    if rule.kind == "zero" or is_detach(node):
        return
    for name, value in zip(Call(node).names[0], node.inputs, strict=False):
        if value is not None and stem(name) in rule.wrt and floating(value):
            yield name, value
    if rule.kind == "expansion":
        for value in dict.fromkeys(captured_values(node)):
            if floating(value):
                yield "captured", value


def ancestors(targets: Iterable[ir.Value], within: Container[ir.Node], stop: Collection[ir.Value] = ()) -> set[ir.Node]:
    """The nodes `within` a graph that a derivative of `targets` may depend on, not followed beyond `stop`."""
    result: set[ir.Node] = set()
    stack = [v for v in targets if floating(v)]
    seen: set[ir.Value] = set(stack)
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None or node in result or node not in within or value in stop:
            continue
        result.add(node)
        for _, operand in carriers(node, rule_of(node)):
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return result


@dataclass(frozen=True, slots=True)
class Activity:
    """The active nodes in topological order, the values that depend on the sources, and the differentiated values."""

    nodes: tuple[ir.Node, ...]
    varied: frozenset[ir.Value]
    targets: tuple[ir.Value, ...]

    @classmethod
    def between(
        cls,
        sources: Collection[ir.Value],
        targets: Collection[ir.Value],
        order: dict[ir.Node, int],
        *,
        partial: bool = False,
        held: Collection[ir.Value] = (),
    ) -> Activity:
        """Activity from `sources` to `targets`; `order` gives the position of each node.

        With `partial` the sources are independent of each other: a dependency of one on another is ignored, and the values
        `held` are constants.
        """
        upstream = ancestors(targets, order, stop={*sources, *held} if partial else ())
        varied = set(sources)
        active: list[ir.Node] = []
        for node in sorted(upstream, key=order.__getitem__):
            if any(operand in varied for _, operand in carriers(node, rule_of(node))):
                active.append(node)
                varied.update(v for v in node.outputs if floating(v) and v not in held)
        return cls(tuple(active), frozenset(varied), tuple(targets))

    def path(self, blocked: ir.Node) -> tuple[str, ...]:
        """The names of the values on a route from a target back to `blocked` and to a source, for messages."""
        ways = (_walk_back(target, lambda v: v.producer() is blocked, self.varied) for target in self.targets)
        down = next(filter(None, ways), [])
        if not down:
            return ()
        rest: list[str] = []
        for _, operand in carriers(blocked, None):
            if operand in self.varied:
                rest = _walk_back(operand, lambda v: v.producer() is None, self.varied) or [operand.name or "?"]
                break
        return (*down, *rest)


def jumps_between(source: ir.Value, targets: Iterable[ir.Value], order: dict[ir.Node, int]) -> list[ir.Node]:
    """Nodes before the `targets` that use a differentiable function of `source` but have derivative zero.

    These are roundings, comparisons and the like; functions of the shape are left out.
    """
    ahead: set[ir.Node] = set()
    stack = [v.producer() for v in targets]
    while stack:
        node = stack.pop()
        if node is not None and node in order and node not in ahead:
            ahead.add(node)
            stack.extend(v.producer() for v in node.inputs if v is not None)
    smooth, jumps = {source}, []
    for node in sorted(ahead, key=order.__getitem__):
        rule = rule_of(node)
        if any(operand in smooth for _, operand in carriers(node, rule)):
            smooth.update(v for v in node.outputs if floating(v))
        elif any(v in smooth for v in node.inputs) and not (rule is not None and rule.is_of_shape):
            jumps.append(node)
    return jumps


def _walk_back(start: ir.Value, done: Callable[[ir.Value], bool], varied: frozenset[ir.Value]) -> list[str]:
    """The names on the shortest route from a value back to an ancestor that is `done`, inside `varied`."""
    parent: dict[ir.Value, ir.Value | None] = {start: None}
    queue = [start]
    for value in queue:
        if done(value):
            names: list[str] = []
            step: ir.Value | None = value
            while step is not None:
                names.append(step.name or "?")
                step = parent[step]
            return names[::-1]
        node = value.producer()
        for _, operand in carriers(node, rule_of(node)) if node is not None else ():
            if operand in varied and operand not in parent:
                parent[operand] = value
                queue.append(operand)
    return []


# -- messages ----------------------------------------------------------------------------------------------------------


def node_label(node: ir.Node) -> str:
    """The name of a node in messages."""
    return node.name or f"<unnamed, output {node.outputs[0].name!r}>"


def problem(graph: ir.Graph, node: ir.Node, reason: str, path: tuple[str, ...], hint: str) -> Problem:
    """The record of a node that cannot be differentiated."""
    operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    return Problem(node_label(node), operator, graph.opset_imports.get(node.domain, 0), reason, path, hint)
