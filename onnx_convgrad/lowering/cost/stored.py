"""The results of a body that its derivative reads from memory; it computes the others again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from onnx_convgrad.ir.nodes import captured_values
from onnx_convgrad.ir.targets import Rates
from onnx_convgrad.lowering.cost.node import node_seconds
from onnx_convgrad.lowering.cost.passes import value_bytes
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes


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
        operands = {v for v in (*node.inputs, *captured_values(node)) if v is not None}
        again = node_seconds(sizes.node(node), rates) + sum(spent.get(v, 0.0) for v in operands)
        for value in node.outputs:
            storing = passes * (rates.node / 2 + value_bytes(sizes.value(value)) / rates.memory)
            if again > storing and isinstance(value.type, ir.TensorType):
                stored.add(value)
            spent[value] = 0.0 if value in read else min(again, storing)
    return stored
