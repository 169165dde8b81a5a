"""Emit every node that depends on a batched value once more, for all examples at once.

A batched value has the axis of the examples first. Values that no example differs in stay as they are and are computed once.
An operator with factors is emitted once: on operands with one more axis in front (`in_front`), or with the examples folded
into its first axis (`folded`). Forms that do not follow from the factors stand beside the rules, declared with `batched`.
Any other operator runs in a Scan over the examples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import problem, rule_of
from onnx_convgrad.autodiff.factors import Factors, behind
from onnx_convgrad.autodiff.registry import batched_rule
from onnx_convgrad.errors import DifferentiationError, Problem, UnsupportedCase, require
from onnx_convgrad.ir.call import Call, signature
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.loop_bodies import Layout, Slices, emit_loop, emit_nodes, placeholder
from onnx_convgrad.ir.nodes import captured_values
from onnx_convgrad.ir.samples import cut_samples, with_samples


def require_rule(condition: object) -> None:
    """Leave a form whose operands are not as it needs them: the next form is tried, and at last a Scan."""
    require(bool(condition), "it has no form for all examples.")


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
            for count, added in enumerate(self.e.emitted[start:] if node.name else ()):
                added.name = f"{node.name}/{count}" if count else node.name
        if problems:
            raise DifferentiationError(problems)

    def _results(self, node: ir.Node) -> dict[ir.Value, ir.Value]:
        special = batched_rule(node.domain, node.op_type)
        ways = [in_front, folded] if special is None else [special, in_front, folded]
        for way in () if any(captured_values(node)) else ways:
            start = len(self.e.emitted)
            try:
                return dict(zip(node.outputs, way(self, Call(node)), strict=False))
            except UnsupportedCase:
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
        scanned = {}
        for v, own in single.items():  # a Scan refuses zero turns
            whole = self.values[v]
            scanned[own] = Slices(with_samples(e, whole, [self.size, *e.dims(whole)[1:]]))
        _, joined = emit_loop(e, start, [], scanned, [(values[v], Layout()) for v in wanted])
        return dict(zip(wanted, (cut_samples(e, whole, self.size) for whole in joined), strict=True))

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

    def fold(self, value: ir.Value) -> ir.Value:
        """`[B, N, ...]` as `[B N, ...]`."""
        whole = self.all(value)
        sizes = self.e.dims(whole)
        return self.e.reshape(whole, [self.e.size_mul(*sizes[:2]), *sizes[2:]])

    def unfold(self, value: ir.Value) -> ir.Value:
        """`[B N, ...]` as `[B, N, ...]`."""
        e, sizes = self.e, self.e.dims(value)
        return e.reshape(value, [self.size, e.size_div(sizes[0], e.size_max(self.size, 1)), *sizes[1:]])


def _factors_of(n: Call) -> Factors:
    rule = rule_of(n.node)
    if rule is None or rule.factors is None:
        raise UnsupportedCase("it has no index notation.")
    return rule.factors(n)


def in_front(b: Batched, n: Call) -> Sequence[ir.Value]:
    """Emit the node on operands with the axis of the examples in front; options that count axes are shifted."""
    factors, e = _factors_of(n), b.e
    if factors.order is not None:
        return [_moved(b, n, factors.order)]
    way = factors.ahead
    if way is None:
        raise UnsupportedCase("its index notation does not say what it is with one more axis in front.")
    require_rule(all(v not in b or i in way.operands for i, v in enumerate(n.inputs)))
    inputs = list(n.inputs)
    having = {i: v for i in way.operands if (v := inputs[i]) is not None}
    shaped = [v for v in n.node.outputs if factors.broadcasts and v.shape is not None]
    rank = max(b.rank(v) for v in (*having.values(), *shaped))
    for i, value in having.items():
        whole = b.aligned(value, rank) if factors.broadcasts else b.all(value)
        inputs[i] = e.unsqueeze(whole, [1]) if rank < way.rank else whole
    attributes = {**n.attributes(), **way.options(e, b.size)}
    for i, name in enumerate(signature(n.node.domain, n.node.op_type)[0]):
        if name in attributes:
            inputs += [None] * (i + 1 - len(inputs))
            inputs[i] = attributes.pop(name)
    results = b.e.again(n.node, inputs, attributes)
    if rank < way.rank:
        results = [e.reshape(result, [b.size]) for result in results]
    for result, one in zip(results, n.node.outputs, strict=False):
        _type(result, one, [b.size if isinstance(b.size, int) else None, *(one.shape or ())])
        require_rule(one.shape is None or result.shape is None or len(result.shape) == len(one.shape) + 1)
    return results


def _type(result: ir.Value, one: ir.Value, sizes: Sequence[int | ir.SymbolicDim | None]) -> None:
    """Give a result its type where that of one example is known and inference does not find it."""
    if result.shape is None and one.shape is not None:
        result.shape = ir.Shape(sizes)
    if result.dtype is None and one.dtype is not None:
        result.dtype = one.dtype


def _moved(b: Batched, n: Call, order: Sequence[int]) -> ir.Value:
    """The operand with its axes in the order of `Factors.order`, behind that of the examples."""
    x = n.inputs[0]
    require_rule(x in b and not any(v in b for v in n.inputs[1:]))
    assert x is not None
    kept = sorted(axis for axis in order if axis >= 0)
    value = b.e.squeeze(b[x], [behind(axis) for axis in range(b.rank(x)) if axis not in kept])
    value = b.e.transpose(value, [0, *(behind(kept.index(axis)) for axis in order if axis >= 0)])
    return b.e.unsqueeze(value, [behind(place) for place, axis in enumerate(order) if axis < 0])


def folded(b: Batched, n: Call) -> Sequence[ir.Value]:
    """Emit the node with the examples folded into the first axis, along which it treats each index by itself."""
    factors = _factors_of(n)
    sides = list(zip(n.inputs, factors.operands, strict=False))
    first = {axes[0] if axes else "" for v, axes in sides if v in b}
    factor = first.pop() if len(first) == 1 else ""
    having = [axes for axes in (*factors.operands, *factors.results) if axes is not None and factor in axes]
    require_rule(factor and factors.does(factor).kind == "each" and not factors.counts_all)
    require_rule(all(axes.index(factor) == 0 for axes in having))
    require_rule(all(axes is not None and factor in axes for axes in factors.results))
    along = [v is not None and axes is not None and factor in axes for v, axes in sides]
    sizes = {
        v.shape[0] if v.shape else None for v, found in zip(n.inputs, along, strict=False) if v is not None and found
    }
    require_rule(len(sizes) == 1 or not factors.broadcasts)  # one row would have to be stretched before it is folded
    inputs = [b.fold(v) if v is not None and found else v for v, found in zip(n.inputs, along, strict=False)]
    results = b.e.again(n.node, inputs, n.attributes())
    for result, one in zip(results, n.node.outputs, strict=False):
        _type(result, one, [None, *(one.shape or ())[1:]])
    return [b.unfold(result) for result in results]
