"""A model of the memory that a graph keeps for its backward part, and of the cost of recomputing a value.

The graph is a list of nodes cut in two: forward nodes, then backward ones. A forward value that a backward node reads is
*kept*: it occupies memory from the end of the forward part to its last reader. A view (Reshape and the like) shares the
memory of its operand, so values are counted in families: an owner and its views.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.emit import RANDOM
from onnx_convgrad.ir.geometry import HINT_BATCH, HINT_CHANNELS, HINT_SIZE
from onnx_convgrad.ir.nodes import subgraphs
from onnx_convgrad.ir.targets import Rates
from onnx_convgrad.lowering.cost.node import node_seconds

Nodes = dict[ir.Node, None]
Values = dict[ir.Value, None]
"""An ordered set of values: the order in which a `set` is iterated differs between processes."""

_SMALL = 8192
"""Most bytes of a value that is always kept: sizes, statistics."""


@dataclass(slots=True)
class Group:
    """Forward nodes that are run again together.

    Attributes:
        nodes: The nodes, in order.
        dropped: The families that are no longer kept, by owner.
        checkpoints: The values that the nodes start from.
        start: Position of the first backward node that reads a dropped value.
    """

    nodes: list[ir.Node] = field(default_factory=list)
    dropped: list[ir.Value] = field(default_factory=list)
    checkpoints: list[ir.Value] = field(default_factory=list)
    start: int = 0


class Retained:
    """The kept values of `graph`, whose backward part starts at position `boundary` of its nodes."""

    def __init__(self, graph: ir.Graph, boundary: int, rates: Rates) -> None:
        self.nodes = list(graph)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        self.boundary = boundary
        self.rates = rates
        self.outputs = set(graph.outputs)
        self._owner: dict[ir.Value, ir.Value] = {}
        self._seconds: dict[ir.Node, float] = {}
        self._refusals: dict[ir.Value, str | None] = {}
        self._reads: dict[ir.Node, list[tuple[ir.Value, ir.Value, bool]]] = {}
        self._alone: dict[ir.Value, float] = {}
        families: dict[ir.Value, list[ir.Value]] = {}
        for node in self.nodes[:boundary]:
            for value in node.outputs:
                families.setdefault(self.owner(value), []).append(value)
        self.families = {owner: members for owner, members in families.items() if owner.producer() is not None}
        end = len(self.nodes)
        self.last_use = {
            owner: max((self.at.get(node, end) for v in members for node in v.consumers()), default=-1)
            for owner, members in self.families.items()
        }
        self.kept = {
            owner: _bytes(owner)
            for owner, members in self.families.items()
            if self.last_use[owner] >= boundary and not any(v in self.outputs for v in members)
        }

    def owner(self, value: ir.Value) -> ir.Value:
        """The value whose memory `value` shares; itself if it is not a view."""
        if value not in self._owner:
            node = value.producer()
            source = node.inputs[0] if node is not None and is_view(node) else None
            self._owner[value] = value if source is None else self.owner(source)
        return self._owner[value]

    def readers(self, value: ir.Value) -> list[int]:
        """Positions of the backward nodes that read the value."""
        return sorted(i for node in value.consumers() if (i := self.at.get(node, -1)) >= self.boundary)

    def refusal(self, owner: ir.Value) -> str | None:
        """The reason why a family cannot be recomputed, or `None`."""
        if owner not in self._refusals:
            self._refusals[owner] = self._refusal(owner)
        return self._refusals[owner]

    def _refusal(self, owner: ir.Value) -> str | None:
        members = self.families.get(owner)
        if members is None:
            return "is not computed by the graph"
        if any(v in self.outputs for v in members):
            return "is an output of the graph"
        node = owner.producer()
        assert node is not None
        if node.op_type in RANDOM or node.domain:
            return f"is the result of {node.op_type}, which may differ when it runs again"
        if any(subgraphs(node)):
            return f"is the result of {node.op_type}, which has a body"
        if any(user not in self.at for v in members for user in v.consumers()):
            return "is read inside a nested graph"
        if not any(v is not None and not is_constant(v) for v in node.inputs):
            return "depends on constants only"
        return None

    def forward_only(self) -> set[ir.Node]:
        """The backward nodes that depend on forward values alone."""
        found: set[ir.Node] = set()
        for node in self.nodes[self.boundary :]:
            producers = [v.producer() for v in node.inputs if v is not None]
            if all(p is None or self.at[p] < self.boundary or p in found for p in producers) and any(
                p is not None for p in producers
            ):
                found.add(node)
        return found

    def _operands(self, node: ir.Node) -> list[tuple[ir.Value, ir.Value, bool]]:
        """The values that a node reads besides constants, each with its owner, and whether that is there if not dropped."""
        if node not in self._reads:
            pairs = [(v, self.owner(v)) for v in node.inputs if v is not None and not is_constant(v)]
            self._reads[node] = [(v, o, self._stays(o)) for v, o in pairs]
        return self._reads[node]

    def _stays(self, owner: ir.Value) -> bool:
        return owner in self.kept or not is_large(owner) or self.refusal(owner) is not None

    def alone(self, owner: ir.Value) -> float:
        """Predicted time of computing a family again, if no other one is dropped."""
        if owner not in self._alone:
            self._alone[owner] = sum(map(self.seconds, self.upstream(owner, (owner,))[0]))
        return self._alone[owner]

    def upstream(self, owner: ir.Value, dropped: Collection[ir.Value]) -> tuple[Nodes, Values]:
        """The nodes to run again for a dropped family, and the values that they start from."""
        nodes: Nodes = {}
        start: Values = {}
        todo = [v for v in self.families[owner] if self.readers(v)]
        while todo:
            node = todo.pop().producer()
            if node is None or node in nodes:
                continue
            nodes[node] = None
            for operand, source, stays in self._operands(node):
                if stays and source not in dropped:
                    start[operand] = None
                else:
                    todo.append(operand)
        return nodes, start

    def groups(self, dropped: Collection[ir.Value]) -> list[Group]:
        """The connected sets of nodes to run again, in the order in which the backward part reads their results."""
        connected: dict[int, tuple[Nodes, Values, list[ir.Value]]] = {}
        places: dict[ir.Node, int] = {}  # node -> its key in `connected`
        for key, owner in enumerate(dropped):
            nodes, start = self.upstream(owner, dropped)
            owners = [owner]
            for former in sorted({places[node] for node in nodes if node in places}):
                group = connected.pop(former)
                nodes, start, owners = nodes | group[0], start | group[1], owners + group[2]
            connected[key] = nodes, start, owners
            places.update(dict.fromkeys(nodes, key))
        result = []
        for nodes, start, owners in connected.values():
            first = min(self.readers(v)[0] for o in owners for v in self.families[o] if self.readers(v))
            result.append(
                Group(sorted(nodes, key=self.at.__getitem__), owners, sorted(start, key=self._position), first)
            )
        return sorted(result, key=lambda group: group.start)

    def _position(self, value: ir.Value) -> tuple[int, str]:
        node = value.producer()
        return (-1 if node is None else self.at[node]), value.name or ""

    def sizes(self, owners: Iterable[ir.Value]) -> dict[ir.Value, int]:
        """Bytes of families."""
        return {owner: _bytes(owner) for owner in owners}

    # -- predictions ---------------------------------------------------------------------------------------------------

    def seconds(self, node: ir.Node) -> float:
        """Predicted time of a node, with typical sizes for unknown ones."""
        if node not in self._seconds:
            operands = [None if v is None else _hinted(v) for v in node.inputs]
            attributes = list(node.attributes.values())
            copy = ir.Node(node.domain, node.op_type, operands, attributes, num_outputs=len(node.outputs))
            for value, like in zip(copy.outputs, node.outputs, strict=True):
                value.shape, value.dtype = _hinted(like).shape, like.dtype or ir.DataType.FLOAT
            self._seconds[node] = node_seconds(copy, self.rates) if node.outputs else 0.0
        return self._seconds[node]

    def peak(self, groups: Collection[Group]) -> int:
        """The largest number of bytes of forward values, kept or recomputed, alive at once in the backward part."""
        change = [0] * (len(self.nodes) + 2)

        def alive(size: int, start: int, end: int) -> None:
            change[start] += size
            change[min(end, len(self.nodes)) + 1] -= size

        again = {owner for group in groups for owner in group.dropped}
        for owner, size in self.kept.items():
            if owner not in again:
                alive(size, self.boundary, self.last_use[owner])
        for group in groups:
            for owner in group.dropped:
                alive(self.kept[owner], group.start, self.last_use[owner])
            for owner in {self.owner(v) for v in group.checkpoints}:
                if owner in self.families and owner not in self.outputs:
                    longer = max(self.last_use[owner], self.boundary - 1) + 1 if owner in self.kept else self.boundary
                    alive(_bytes(owner), longer, group.start) if longer <= group.start else None
        held = most = 0
        for delta in change:
            held += delta
            most = max(most, held)
        return most


def _hinted(value: ir.Value) -> ir.Value:
    """A copy of the value with typical sizes for unknown ones."""
    sizes = _sizes(value)
    kind = ir.TensorType(value.dtype or ir.DataType.FLOAT)
    return ir.Value(
        name=value.name, shape=None if sizes is None else ir.Shape(sizes), type=kind, const_value=value.const_value
    )


def _sizes(value: ir.Value) -> list[int] | None:
    """The sizes of a value, with typical ones for unknown ones; `None` for a constant without a shape."""
    if value.shape is None:
        return [HINT_BATCH, HINT_CHANNELS, HINT_SIZE, HINT_SIZE] if value.const_value is None else None
    hints = (HINT_BATCH, HINT_CHANNELS, *[HINT_SIZE] * len(value.shape))
    return [dim if isinstance(dim, int) else hints[i] for i, dim in enumerate(value.shape.dims)]


def _bytes(value: ir.Value) -> int:
    return math.prod(_sizes(value) or ()) * max(1, round((value.dtype or ir.DataType.FLOAT).itemsize))


def is_large(value: ir.Value) -> bool:
    """Whether a value takes enough memory to matter, with typical sizes for unknown ones."""
    return _bytes(value) > _SMALL
