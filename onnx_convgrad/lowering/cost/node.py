"""The predicted time of one node: a roofline of multiplications and passes over memory, and a constant.

    seconds = node + max(flops / rate(shape), bytes / bandwidth(bytes) + runs * run + items * item)

The terms of each operator are given in the tables of `products` and `movement`; the speeds are those of `Rates`. Sizes must
be static, as they are in a `sketch`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.ir.constants import is_folded
from onnx_convgrad.ir.nodes import is_op, values_read
from onnx_convgrad.ir.targets import Rates
from onnx_convgrad.lowering.cost.movement import MOVEMENT
from onnx_convgrad.lowering.cost.passes import shape_of, traffic, value_bytes
from onnx_convgrad.lowering.cost.products import PRODUCTS, folds
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes

_MODELS = PRODUCTS | MOVEMENT


def body_of(node: ir.Node) -> ir.Graph | None:
    """The body of a Scan."""
    return node.attributes["body"].as_graph() if is_op(node, "Scan") else None


def entering_seconds(trips: int, rates: Rates) -> float:
    """Seconds for entering the body of a loop so often: no loop takes less.

    They include that small kernels wait for their threads more than large ones do, on machines under other load.
    """
    return trips * 120 * rates.node


def _loop(node: ir.Node, body: ir.Graph, rates: Rates) -> float:
    """Seconds of a loop: the body for every slice of the last operand, and the time for entering it."""
    trips = (*shape_of(node.inputs[-1]), 1)[0]  # an unknown number counts as 1
    inside = sum(node_seconds(n, rates) for n in body if not folds(n.outputs[0]))
    return trips * inside + entering_seconds(trips, rates)


def _is_free(node: ir.Node) -> bool:
    return is_view(node) or is_op(node, "Constant", "Shape", "Size")


_UNCOMPARED = frozenset(kind for kind in ir.AttributeType if "GRAPH" in kind.name or "TYPE_PROTO" in kind.name)
"""Attributes whose nodes are priced each time."""


class NodePrices:
    """Predicted seconds of nodes of typical sizes, on one target; those that are equal but for names are priced once."""

    def __init__(self) -> None:
        self._found: dict[Any, float] = {}

    def total(self, nodes: Iterable[ir.Node], sizes: TypicalSizes, rates: Rates) -> float:
        """Seconds of all these nodes."""
        return sum(self._seconds(node, sizes, rates) for node in nodes if not _is_free(node))

    def _seconds(self, node: ir.Node, sizes: TypicalSizes, rates: Rates) -> float:
        if any(a.type in _UNCOMPARED for a in node.attributes.data.values()):
            return node_seconds(sizes.node(node), rates)
        operands = [None if v is None else (sizes.shape(v), v.dtype, v.const_value) for v in node.inputs]
        attributes = [(a.name, a.value) for a in node.attributes.data.values()]
        results = map(sizes.shape, node.outputs)
        key = (node.domain, node.op_type, tuple(operands), tuple(attributes), tuple(results))
        if key not in self._found:
            self._found[key] = node_seconds(sizes.node(node), rates)
        return self._found[key]


def node_seconds(node: ir.Node, rates: Rates) -> float:
    """Predicted seconds of one node with static sizes. A node that reads only constants costs nothing.

    A node with an operand or first result of unknown rank counts as a pass over the others.
    """
    body = body_of(node)
    if body is not None:
        return rates.node + _loop(node, body, rates)
    if _is_free(node) or all(map(is_folded, node.inputs)):
        return 0.0
    if node.outputs[0].dtype == ir.DataType.INT64 and math.prod(shape_of(node.outputs[0])) <= 64:
        return rates.node / 3  # arithmetic on sizes
    ranked = all(v is None or v.shape is not None for v in (*node.inputs, node.outputs[0]))
    model = _MODELS.get(node.op_type) if ranked else None
    try:
        return rates.node + (model(node, rates) if model else traffic(node, rates))
    except ZeroDivisionError:  # an operand without elements
        return rates.node


def worth_storing(
    rates: Rates, graph: ir.Graph, nodes: Iterable[ir.Node], read: Collection[ir.Value], passes: int
) -> set[ir.Value]:
    """The results of the nodes of a body that take longer to compute again than to store.

    A result is computed again from operands that are stored or computed again, whichever takes less; for the operands that
    the derivative reads itself, that is spent anyway. Operands that no node computes cost nothing.

    Args:
        rates: Speeds of the target.
        graph: The graph with the symbols of all sizes.
        nodes: The nodes of one turn, in order.
        read: The results that the derivative reads.
        passes: Number of times that storing and reading a result moves it through memory.
    """
    sizes = TypicalSizes(graph)
    spent: dict[ir.Value, float] = {}
    stored = set()
    for node in nodes:
        operands = set(values_read(node))
        again = node_seconds(sizes.node(node), rates) + sum(spent.get(v, 0.0) for v in operands)
        for value in node.outputs:
            storing = passes * (rates.node / 2 + value_bytes(sizes.value(value)) / rates.memory)
            if again > storing and isinstance(value.type, ir.TensorType):
                stored.add(value)
            spent[value] = 0.0 if value in read else min(again, storing)
    return stored
