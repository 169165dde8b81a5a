"""Write the nodes of a graph in an order in which ONNX Runtime, which starts from the ends, holds less memory."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.nodes import captured_values
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.memory.timeline import order_from_ends, timeline


class SortByDepth(GraphPass):
    """Sort nodes by their distance from the inputs, and the ends of the graph the other way round, if that holds less.

    ONNX Runtime goes from the last end to its operands, the last of them first (see `memory.timeline`). So the deepest
    operand comes first, and what takes few steps, such as a transposed weight, is made when it is needed. Of the gradients,
    those of the last layers come first.

    Attributes:
        peak: The predicted memory of the last graph that was sorted.
    """

    peak = 0

    def rewrite(self, model: ir.Model) -> bool:
        """Sort the main graph; bodies run as they are written."""
        graph = model.graph
        nodes = list(graph)
        wanted = _by_depth(nodes)
        sizes = TypicalSizes(graph)
        before, after = (timeline(graph, order_from_ends(order), sizes).peak for order in (nodes, wanted))
        self.peak = min(before, after)
        if after >= before:
            return False
        graph.remove(nodes)
        graph.extend(wanted)
        return True


def _by_depth(nodes: list[ir.Node]) -> list[ir.Node]:
    depth: dict[ir.Node, int] = {}
    read: set[ir.Node] = set()
    for node in nodes:
        producers = [v.producer() for v in (*node.inputs, *captured_values(node)) if v is not None]
        known = [p for p in producers if p is not None and p in depth]
        read.update(known)
        depth[node] = 1 + max((depth[p] for p in known), default=0)
    inner = sorted((n for n in nodes if n in read), key=depth.__getitem__)
    ends = sorted((n for n in nodes if n not in read), key=depth.__getitem__, reverse=True)
    return [*inner, *ends]
