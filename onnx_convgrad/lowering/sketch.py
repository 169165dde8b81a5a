"""Predict time and workspace of a lowering by emitting it into an empty graph with static sizes.

So no lowering states its cost: time is the sum over the nodes that it emits, and workspace is the largest sum of the
values between them that are held at the same time. A lowering that turns out too slow is not emitted to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.errors import LimitError
from onnx_convgrad.ir.constants import mark_constant, mark_folded
from onnx_convgrad.ir.emit import Emitter, empty_graph
from onnx_convgrad.ir.nodes import ancestors, values_read
from onnx_convgrad.ir.targets import TargetInfo
from onnx_convgrad.lowering.cost.node import body_of, node_seconds
from onnx_convgrad.lowering.cost.passes import value_bytes
from onnx_convgrad.lowering.cost.products import folds, may_fold


@dataclass(frozen=True, slots=True)
class Sketch:
    """Predicted seconds, peak bytes held besides operands and result, and the number of nodes, including those of loops.

    `cached` are the seconds that it would take if all values were in the cache, where it holds more than a part of that.
    """

    seconds: float
    workspace: int
    nodes: int = 0
    cached: float = 0.0


SHARES = (4, 8, 16)
"""Divisors of the cache: for each, chunks are tried whose workspace fits into that part."""

MOST_NODES = 6000
"""Most nodes of one lowering: it is declined before more are emitted."""


_ENDLESS = 2.0**80
"""Bytes of a cache that holds everything."""

_LARGE = 2**20
"""Smallest number of bytes of constants that is compared with the limits."""


class _Bounded(Emitter):
    """An emitter that stops a lowering which grows with the numbers in a model, or takes more than `most` seconds."""

    most = math.inf
    """The most seconds that the nodes may take."""

    spent = 0.0
    """The least seconds that the nodes so far take. A Scan is left out: the nodes of its body are counted, once."""

    stored = 0
    """Bytes of the constants asked for."""

    def __init__(self, graph: ir.Graph, **options: Any) -> None:
        super().__init__(graph, **options)
        self.prices: dict[ir.Node, float] = {}

    def place(self, node: ir.Node) -> None:
        if len(self.emitted) >= MOST_NODES:
            raise LimitError(f"it takes more than {MOST_NODES:,} nodes")
        super().place(node)
        mark_folded([node])

    def infer(self, node: ir.Node) -> None:
        super().infer(node)
        if node.op_type != "Scan" and not may_fold(node):
            price = self.prices[node] = node_seconds(node, self.target.rates)
            self.spent += price
            if self.spent > self.most:
                raise LimitError(f"it takes more than {1e3 * self.most:.3f} ms")

    def price(self, node: ir.Node) -> float:
        """Seconds of a node, once all readers of its operands are known: it may be a product that folds a Transpose."""
        known = None if node.op_type == "MatMul" else self.prices.get(node)
        return node_seconds(node, self.target.rates) if known is None else known

    def const(self, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
        value = super().const(array, dtype)
        self.stored += value.const_value.nbytes if value.const_value is not None else 0
        if self.stored > _LARGE:
            self.check_bytes(self.stored, "It")
        return value


def sketch(
    node: ir.Node,
    shapes: Mapping[int, tuple[int, ...]],
    target: TargetInfo,
    emit: Callable[[Emitter, ir.Node], ir.Value],
    constant: Collection[int] = (),
    *,
    ends: bool = False,
    most: float = math.inf,
) -> Sketch:
    """Emit a lowering of `node` with the operand shapes `shapes` (by position) and price its nodes.

    `constant` are the positions of operands that are known when the model is loaded: nodes that read only these are free.
    A result that `ends` its graph is copied if it is a view of another value.

    Raises:
        LimitError: The lowering takes more than `MOST_NODES` nodes, `most` seconds, or a constant beyond the limits.
    """
    graph = empty_graph("sketch")
    operands: list[ir.Value | None] = []
    for position, value in enumerate(node.inputs):
        if value is None:
            operands.append(None)
            continue
        kind = ir.TensorType(value.dtype or ir.DataType.FLOAT)
        operand = ir.Value(name=f"operand_{position}", shape=ir.Shape(shapes[position]), type=kind)
        if position in constant:
            mark_constant(operand)
        else:
            graph.inputs.append(operand)
        operands.append(operand)
    copy = ir.Node(node.domain, node.op_type, operands, list(node.attributes.values()), num_outputs=len(node.outputs))
    e = _Bounded(graph, target=target)
    e.most = most
    result = emit(e, copy)
    live = ancestors(result)
    emitted = [n for n in e.emitted if n in live]
    priced = [n for n in emitted if not folds(n.outputs[0])]
    seconds = sum(map(e.price, priced))
    last = result.producer()
    if ends and is_view(last):
        seconds += 2 * value_bytes(result) / target.rates.memory
    workspace = _workspace(emitted, result)
    cached = 0.0
    if workspace > target.rates.cache / SHARES[-1]:
        fast = replace(target.rates, memory=target.rates.cached, cache=_ENDLESS)
        cached = sum(node_seconds(n, fast) for n in priced)
    return Sketch(seconds, workspace, _count(emitted), cached)


def _count(nodes: Iterable[ir.Node]) -> int:
    return sum(1 + _count(body_of(node) or ()) for node in nodes)


def _workspace(nodes: list[ir.Node], result: ir.Value) -> int:
    """The peak of the bytes held between the nodes. A view holds the value that it is a view of."""
    owner: dict[ir.Value, ir.Value] = {}
    last: dict[ir.Value, int] = {}
    for at, node in enumerate(nodes):
        for value in node.outputs:
            source = node.inputs[0] if is_view(node) or folds(value) else None
            owner[value] = owner.get(source, source) if source is not None else value
        for operand in values_read(node):
            if operand in owner:
                last[owner[operand]] = at
    held = peak = 0
    kept = owner.get(result)
    for at, node in enumerate(nodes):
        held += sum(value_bytes(v) for v in node.outputs if owner[v] is v and v is not kept)
        peak = max(peak, held + _inside(node))
        ended = {owner[v] for v in values_read(node) if v in owner}
        held -= sum(value_bytes(v) for v in ended if last[v] == at and v is not kept)
    return peak


def _inside(node: ir.Node) -> int:
    """The bytes that the body of a loop holds; its result is part of the loop's."""
    body = body_of(node)
    return 0 if body is None else _workspace(list(body), body.outputs[0])
