"""Emit every node that depends on a batched value once more, for all examples at once.

A batched value has the axis of the examples first. Values that no example differs in stay as they are and are computed once.
An operator with factors is emitted once: on aligned operands, or with the examples folded into its first axis. Where its
attributes or operands count axes, a rule shifts them. Any other operator runs in a Scan over the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import problem, rule_of
from onnx_convgrad.autodiff.registry import Decorator, F
from onnx_convgrad.errors import DifferentiationError, Problem, UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.loop_bodies import Layout, Slices, emit_loop, emit_nodes, placeholder
from onnx_convgrad.ir.nodes import captured_values

BatchRule = Callable[["Batched", Call], Sequence[ir.Value]]
"""`rule(batched, call)`: the batched results, in order. It raises `NoRule` for operands that it does not cover."""

_RULES: dict[str, BatchRule] = {}


class NoRule(Exception):  # noqa: N818 - it is caught inside this package
    """The rule of an operator does not cover these operands; a Scan does."""


def batch_rule(*op_types: str) -> Decorator:
    """Declare how operators of ai.onnx take one more axis. Elementwise operators with a derivative need no rule."""

    def decorate(function: F) -> F:
        _RULES.update(dict.fromkeys(op_types, function))
        return function

    return decorate


def require_rule(condition: object) -> None:
    """Leave a rule whose operands are not as it needs them."""
    if not condition:
        raise NoRule


class Batched:
    """The batched values so far.

    Args:
        e: Emitter positioned after every node of the graph.
        values: Value of the graph -> the same for all examples, `[B, *shape]`.
        size: The number of examples.
    """

    def __init__(self, e: Emitter, values: Mapping[ir.Value, ir.Value], size: Dim) -> None:
        self.e, self.size = e, size
        self.values = dict(values)
        self.results: Collection[ir.Value] = ()
        self.replaced: dict[ir.Value, ir.Value] = {}
        """Sizes of examples -> the same, read from batched values."""

    def __contains__(self, value: ir.Value | None) -> bool:
        return value in self.values

    def __getitem__(self, value: ir.Value) -> ir.Value:
        """The batched value, or the value itself if no example differs in it."""
        return self.values.get(value, value)

    def run(self, nodes: Sequence[ir.Node], results: Collection[ir.Value]) -> None:
        """Emit the nodes that depend on batched values; `results` are wanted even where no node reads them.

        Raises:
            DifferentiationError: Listing the nodes that neither a rule nor a Scan covers.
        """
        problems: list[Problem] = []
        self.results = results
        for node in nodes:
            read = [v for v in (*node.inputs, *captured_values(node)) if v is not None]
            if not any(v in self.values for v in read):
                continue
            start = len(self.e.emitted)
            try:
                if node.op_type in ("Shape", "Size") and not node.domain:
                    self._measure(node)
                else:
                    self.values.update(self._results(node))
            except UnsupportedCase as case:
                problems.append(problem(self.e.graph, node, case.message, (node.outputs[0].name or "?",), case.hint))
                self.values.update({v: v for v in node.outputs})
            for count, added in enumerate(self.e.emitted[start:]):
                added.name = f"{node.name}/{count}" if count else node.name
        if problems:
            raise DifferentiationError(problems)

    def _results(self, node: ir.Node) -> dict[ir.Value, ir.Value]:
        ways: list[BatchRule] = [by_factors]
        if not node.domain and node.op_type in _RULES:
            ways.insert(0, _RULES[node.op_type])
        for way in () if any(captured_values(node)) else ways:
            start = len(self.e.emitted)
            try:
                return dict(zip(node.outputs, way(self, Call(node)), strict=False))
            except (NoRule, UnsupportedCase):
                abandoned = self.e.emitted[start:]
                self.e.forget(abandoned)
                self.e.graph.remove(abandoned, safe=False)
        return self._in_loop(node)

    def _measure(self, node: ir.Node) -> None:
        """Read the sizes of one example from the batched value, for every reader: they are the same for all examples."""
        e, call, value = self.e, Call(node), node.inputs[0]
        assert value is not None
        if node.op_type == "Size":
            found = e.op("ReduceProd", e.op("Shape", self.values[value], start=1), keepdims=0)
        else:
            rank = self.rank(value)
            start, end = (
                min(max(a + rank if a < 0 else a, 0), rank) for a in (call.int("start", 0), call.int("end", rank))
            )
            found = e.op("Shape", self.values[value], start=start + 1, end=end + 1)
        self.replaced[call.y] = e.typed(found, call.y)
        call.y.replace_all_uses_with(found)

    def _in_loop(self, node: ir.Node) -> dict[ir.Value, ir.Value]:
        """The results of any node, by a Scan over the examples."""
        e = self.e
        if "Scan" in e.target.missing:
            raise UnsupportedCase(f"{node.op_type} has no form for all examples, and {e.target.name} has no Scan.")
        read = dict.fromkeys(v for v in (*node.inputs, *captured_values(node)) if v is not None and v in self.values)
        start = len(e.emitted)
        single = {v: placeholder(e, v, v.shape) for v in read}
        values = dict(single)
        emit_nodes(e, [node], values)
        wanted = [v for v in node.outputs if v.name and (v.uses() or v in self.results)]
        for value in wanted:
            if not isinstance(value.type, (ir.TensorType, type(None))):
                raise UnsupportedCase("its result is a sequence or an optional value, which has no axis of examples.")
            e.typed(values[value], value)
        scanned = {own: Slices(self.values[v]) for v, own in single.items()}
        _, joined = emit_loop(e, start, [], scanned, [(values[v], Layout()) for v in wanted])
        return dict(zip(wanted, joined, strict=True))

    # -- for rules -----------------------------------------------------------------------------------------------------

    def rank(self, value: ir.Value) -> int:
        """The rank of the value of one example."""
        require_rule(value.shape is not None)
        return len(value.shape or ())

    def all(self, value: ir.Value) -> ir.Value:
        """The value with the axis of the examples, repeated if no example differs in it."""
        if value in self.values:
            return self.values[value]
        sizes: list[Dim] = [self.size, *([1] * self.rank(value))]
        return self.e.op("Expand", self.e.unsqueeze(value, [0]), self.e.vector(sizes))

    def aligned(self, value: ir.Value, rank: int) -> ir.Value:
        """The value such that it broadcasts against batched values of examples of this rank."""
        missing = rank - self.rank(value) if value in self.values else 0
        return self.e.unsqueeze(self[value], [*range(1, 1 + missing)]) if missing > 0 else self[value]

    def only(self, n: Call, *batched: str) -> None:
        """Leave the rule if operands other than these are batched."""
        for name, value in zip(n.names[0], n.inputs, strict=True):
            require_rule(value not in self.values or name in batched)

    def constant(self, value: ir.Value | None) -> np.ndarray:
        """The numbers of an operand that is known while building."""
        numbers = None if value in self.values else constant_of(value)
        if numbers is None:
            raise NoRule
        return numbers

    def fold(self, value: ir.Value) -> ir.Value:
        """`[B, N, ...]` as `[B N, ...]`."""
        whole = self.all(value)
        sizes = self.e.dims(whole)
        return self.e.reshape(whole, [self.e.size_mul(*sizes[:2]), *sizes[2:]])

    def unfold(self, value: ir.Value) -> ir.Value:
        """`[B N, ...]` as `[B, N, ...]`."""
        e, sizes = self.e, self.e.dims(value)
        if isinstance(self.size, int) and self.size:
            first: list[Dim] = [self.size, e.size_div(sizes[0], self.size)]
        else:
            first = [self.size, e.size_div(sizes[0], e.size_max(self.size, 1))]
        return e.reshape(value, [*first, *sizes[1:]])


def by_factors(b: Batched, n: Call) -> Sequence[ir.Value]:
    """One node for all examples: with aligned operands, or with the examples folded into the first axis."""
    rule = rule_of(n.node)
    require_rule(rule is not None and rule.factors is not None)
    assert rule is not None
    assert rule.factors is not None
    factors = rule.factors(n)
    sides = list(zip(n.inputs, factors.operands, strict=False))
    require_rule(all(axes is not None for v, axes in sides if v in b))
    if factors.aligned:
        rank = max(b.rank(v) for v, axes in sides if v is not None and axes is not None)
        inputs = [v if v is None or axes is None else b.aligned(v, rank) for v, axes in sides]
        return b.e.ops(n.node.op_type, *inputs, outputs=len(n.node.outputs), **n.attributes(), domain=n.node.domain)
    first = {axes[0] if axes else "" for v, axes in sides if v in b and axes is not None}
    factor = first.pop() if len(first) == 1 else ""
    axes_of_all = [axes for axes in (*factors.operands, *factors.results) if axes is not None and factor in axes]
    require_rule(factor and factors.does(factor).kind == "each" and not factors.counts_all)
    require_rule(all(axes.index(factor) == 0 for axes in axes_of_all))
    require_rule(all(axes is not None and factor in axes for axes in factors.results))
    sizes = {
        v.shape[0] if v.shape else None for v, axes in sides if v is not None and axes is not None and factor in axes
    }
    require_rule(len(sizes) == 1 or not factors.broadcasts)  # one row would have to be stretched before it is folded
    inputs = [b.fold(v) if v is not None and axes is not None and factor in axes else v for v, axes in sides]
    results = b.e.ops(n.node.op_type, *inputs, outputs=len(n.node.outputs), **n.attributes(), domain=n.node.domain)
    return [b.unfold(r) for r in results]


def shifted(axis: int, rank: int) -> int:
    """An axis of one example, as an axis of the batched value."""
    return axis % rank + 1 if rank else 1
