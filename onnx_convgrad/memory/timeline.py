"""The memory of results over time: in which order ONNX Runtime runs the nodes, and how many bytes are alive at each.

ONNX Runtime 1.32 runs a graph node by node in a depth-first order from its ends (`Graph::ReverseDFSFrom`, called by
`GraphViewer`): the last node whose results no node reads comes first, with all that it needs, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.memory.arena import Arena
from onnx_convgrad.memory.flow import Flow, value_bytes

_MISSED = 1.08
"""Measured memory over that of the model of the allocator, typically: the runtime rewrites the graph, which changes the
order and so the fragmentation, and threads and first runs take some megabytes. The rewritten graph needs no factor.
"""

_RUNS = 2
"""Runs that are followed: the second finds the chunks of the first. Later ones find the same."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory of results while a graph runs.

    Attributes:
        nodes: The nodes in the order in which they run.
        held: Bytes of results alive while each of them runs, without graph inputs and stored weights.
        resident: Bytes that ONNX Runtime's allocator occupies after two runs, with its fragmentation.
        fixed: Bytes of the graph inputs and stored weights.
    """

    nodes: tuple[ir.Node, ...]
    held: tuple[int, ...]
    resident: int
    fixed: int

    @property
    def peak(self) -> int:
        """The predicted memory of a run: what the allocator occupies, the inputs and the weights."""
        return self.fixed + round(_MISSED * self.resident)


def timeline(graph: ir.Graph, order: Sequence[ir.Node] | None = None, sizes: TypicalSizes | None = None) -> Timeline:
    """Follow the memory of a graph.

    Args:
        graph: The graph, with shapes; unknown sizes take typical values.
        order: Its nodes in the order in which they run; by default that of ONNX Runtime, before its own rewriting.
        sizes: Values of symbols.
    """
    sizes = sizes or TypicalSizes(graph)
    flow = Flow(graph, list(order or graph), sizes)
    places = range(len(flow.nodes))
    return _timeline(graph, flow, places if order else _runtime_order(flow.sources, places), sizes)


def largest_results(graph: ir.Graph) -> list[tuple[ir.Value, int]]:
    """The results that are alive where a graph holds most bytes, with their bytes, the largest first."""
    flow = Flow(graph, list(graph), TypicalSizes(graph))
    lives = flow.lives(_runtime_order(flow.sources, range(len(flow.nodes))))
    held = flow.follow(lives, Arena())
    alive = flow.alive(lives, held.index(max(held))) if held else {}
    return sorted(alive.items(), key=lambda item: item[1], reverse=True)


def _timeline(graph: ir.Graph, flow: Flow, order: Sequence[int], sizes: TypicalSizes) -> Timeline:
    arena, lives = Arena(), flow.lives(order)
    held = [flow.follow(lives, arena) for _ in range(_RUNS)][-1]
    fixed = sum(value_bytes(v, sizes) for v in dict.fromkeys((*graph.inputs, *graph.initializers.values())))
    return Timeline(tuple(flow.nodes[node] for node in order), tuple(held), arena.resident, fixed)


def _runtime_order(sources: Sequence[Sequence[int]], nodes: Sequence[int]) -> list[int]:
    """The order in which ONNX Runtime runs nodes that stand in a file in this order; `sources` are those that each reads."""
    places = [0] * len(nodes)
    for place, node in enumerate(nodes):
        places[node] = place
    read = set(chain(*sources))
    stack = [node for node in nodes if node not in read]
    seen, order = [False] * len(nodes), []
    while stack:
        node = stack.pop()
        if node < 0:
            order.append(~node)  # what it reads stands before it
        elif not seen[node]:
            seen[node] = True
            stack.append(~node)
            stack += sorted([source for source in sources[node] if not seen[source]], key=places.__getitem__)
    return order


class SortByDepth(GraphPass):
    """Sort nodes by their distance from the inputs, and the ends of the graph the other way round, if that holds less.

    ONNX Runtime goes from the last end to its operands, the last of them first (see `memory.timeline`). So the deepest
    operand comes first, and what takes few steps, such as a transposed weight, is made when it is needed. Of the gradients,
    those of the last layers come first.
    """

    def rewrite(self, model: ir.Model) -> bool:
        """Sort the main graph; bodies run as they are written."""
        graph = model.graph
        before, (after, _) = list(graph), least_order(graph, TypicalSizes(graph))
        if after == before:
            return False
        graph.remove(before)
        graph.extend(after)
        return True


def least_order(graph: ir.Graph, sizes: TypicalSizes) -> tuple[list[ir.Node], int]:
    """The nodes of a graph in the order of `SortByDepth`, and the predicted memory of a run in bytes."""
    flow = Flow(graph, list(graph), sizes)
    orders = range(len(flow.nodes)), _by_depth(flow.sources)
    peaks = [_timeline(graph, flow, _runtime_order(flow.sources, order), sizes).peak for order in orders]
    return [flow.nodes[node] for node in orders[peaks[1] < peaks[0]]], min(peaks)


def _by_depth(sources: Sequence[Sequence[int]]) -> list[int]:
    depth: list[int] = []
    read: set[int] = set()
    for node, needed in enumerate(sources):
        known = [source for source in needed if source < node]
        read.update(known)
        depth.append(1 + max((depth[source] for source in known), default=0))
    inner = sorted((n for n in range(len(depth)) if n in read), key=depth.__getitem__)
    ends = sorted((n for n in range(len(depth)) if n not in read), key=depth.__getitem__, reverse=True)
    return [*inner, *ends]
