"""The memory that the nodes of a graph allocate and release, in any order in which they may run.

A result lives from its node to its last reader, graph outputs to the end. Views share the memory of their operand, and an
activation writes over an operand that nobody reads later, also through a view (`MayInplace` of its kernel). Some kernels
take scratch memory. Both were measured with single nodes. Outputs that are written over inputs (`memory.in_place`) take
none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import subgraphs, values_read
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.memory.arena import Arena
from onnx_convgrad.memory.in_place import OVERWRITING, written_over


@dataclass(frozen=True, slots=True)
class Lives:
    """The lives of results in some order of the nodes, in the numbers of a `Flow`.

    Attributes:
        order: The nodes.
        born: The results that begin to live at each of them.
        ending: The results that nobody reads after it.
    """

    order: Sequence[int]
    born: list[list[int]]
    ending: list[list[int]]


class Flow:
    """The memory that nodes allocate and release. Nodes and values are numbers; what holds in any order is found once.

    Args:
        graph: The graph, with shapes.
        nodes: Its nodes; their numbers are their places here.
        sizes: Values of symbols.

    Attributes:
        nodes: These nodes.
        sources: For each node those whose results it reads.
    """

    def __init__(self, graph: ir.Graph, nodes: Sequence[ir.Node], sizes: TypicalSizes) -> None:
        numbers: dict[ir.Value, int] = {}

        def numbered(values: Collection[ir.Value]) -> list[int]:
            return [numbers.setdefault(v, len(numbers)) for v in values]

        written, outputs = written_over(graph), set(graph.outputs)
        self.nodes = nodes
        self._read = [numbered(values_read(node)) for node in nodes]
        self._results = [numbered(node.outputs) for node in nodes]
        self._shared = []
        for node in nodes:
            source, surely = _shared(node, written, outputs, sizes)
            self._shared.append((None if source is None else numbered([source])[0], surely))
        self._outputs = set(numbered(graph.outputs))
        made = {result: node for node, results in enumerate(self._results) for result in results}
        self.sources = [list(dict.fromkeys([made[v] for v in read if v in made])) for read in self._read]
        self._values = list(numbers)
        self._bytes = [value_bytes(v, sizes) if number in made else 0 for v, number in numbers.items()]
        self._reads = [0] * len(numbers)
        for value in chain(self._outputs, *self._read):  # outputs of the graph are read once more
            self._reads[value] += 1
        self._scratch = [_scratch(node, sizes) for node in nodes]
        self._bodies = [[_body(body, sizes) for _, body in subgraphs(node)] for node in nodes]

    def lives(self, order: Sequence[int]) -> Lives:
        """The lives of results if nodes run in this order."""
        owner = list(range(len(self._values)))
        unread = [0] * len(owner)  # of an owner: reads that are still to come
        last = [-1] * len(owner)
        born = []
        for place, node in enumerate(order):
            read, results = self._read[node], self._results[node]
            for value in read:
                if last[owner[value]] >= 0:
                    last[owner[value]] = place
            source, surely = self._shared[node]
            whole = None if source is None else owner[source]
            if whole is not None and (surely or unread[whole] == 1):
                owner[results[0]] = whole
                if last[whole] >= 0:
                    unread[whole] += self._reads[results[0]]
                    last[whole] = place
                results = results[1:]
            for value in results:
                last[value], unread[value] = place, self._reads[value]
            born.append(results)
            for value in read:
                if last[owner[value]] >= 0:
                    unread[owner[value]] -= 1
        for value in self._outputs:
            last[owner[value]] = -1
        ending: list[list[int]] = [[] for _ in order]
        for value in chain(*born):
            if last[value] >= 0:
                ending[last[value]].append(value)
        return Lives(order, born, ending)

    def follow(self, lives: Lives, arena: Arena) -> list[int]:
        """Allocate and release in an arena; return the bytes alive at each node."""
        places: dict[int, int] = {}
        total, held = 0, []
        for node, born, ending in zip(lives.order, lives.born, lives.ending, strict=True):
            for value in born:
                if count := self._bytes[value]:
                    places[value] = arena.allocate(count)
                    total += count
            most = scratch = self._scratch[node]
            for body, inside in self._bodies[node]:  # one runs at a time
                most = max(most, *body.follow(inside, arena), 0)
            if scratch:
                arena.release(arena.allocate(scratch))
            held.append(total + most)
            for value in ending:
                if value in places:
                    total -= self._bytes[value]
                    arena.release(places.pop(value))
        for place in places.values():
            arena.release(place)
        return held

    def alive(self, lives: Lives, at: int) -> dict[ir.Value, int]:
        """The results that are alive at a place of the order, with their bytes."""
        ended = set(chain(*lives.ending[:at]))
        found = [value for value in chain(*lives.born[: at + 1]) if value not in ended]
        return {self._values[value]: self._bytes[value] for value in found}


def _body(body: ir.Graph, sizes: TypicalSizes) -> tuple[Flow, Lives]:
    """The flow of a body, which runs as it is written."""
    nodes = list(body)
    flow = Flow(body, nodes, sizes)
    return flow, flow.lives(range(len(nodes)))


def _shared(
    node: ir.Node, written: Mapping[ir.Value, ir.Value], outputs: Collection[ir.Value], sizes: TypicalSizes
) -> tuple[ir.Value | None, bool]:
    """The value whose memory the first result of a node shares, and whether it does so even if others read that later."""
    if not node.outputs:
        return None, False
    result, source = node.outputs[0], node.inputs[0] if node.inputs and not node.domain else None
    if result in written:
        return written[result], True
    if source is None or is_view(node) or _is_fused(node):
        return source, True
    over = OVERWRITING.get(node.op_type) and result not in outputs
    return source if over and value_bytes(source, sizes) == value_bytes(result, sizes) else None, False


def _is_fused(node: ir.Node) -> bool:
    """Whether ONNX Runtime makes a transposition of matrices part of the products that read it (FusedMatMul)."""
    if node.op_type != "Transpose" or node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    perm = Call(node).ints("perm")
    if perm is None or len(perm) < 2 or node.outputs[0].is_graph_output():
        return False
    rank, readers = len(perm), [use.node for use in node.outputs[0].uses()]
    swapped = list(perm) == [*range(rank - 2), rank - 1, rank - 2]
    return swapped and bool(readers) and all(reader.op_type == "MatMul" for reader in readers)


def value_bytes(value: ir.Value, sizes: TypicalSizes) -> int:
    """Bytes of a value; 0 if its sizes do not follow from those of the inputs."""
    if value.shape is None or value.dtype is None:
        return 0
    count = 1
    for dim in value.shape.dims:
        size = dim if isinstance(dim, int) else sizes.size(dim)
        if size is None:
            return 0
        count *= size
    return math.ceil(count * value.dtype.itemsize)


def _scratch(node: ir.Node, sizes: TypicalSizes) -> int:
    """Bytes that a kernel takes while it runs."""
    if node.domain or not node.outputs:
        return 0
    result = node.outputs[0]
    if node.op_type == "Where":  # each side, with zeros in the places of the other
        condition, *sides = (math.prod(_dims(v, sizes)) for v in node.inputs)
        return int(_item(result) * sum(max(condition, side) for side in sides))
    if node.op_type in ("Sum", "Max", "Min", "Mean"):
        return value_bytes(result, sizes) if len(node.inputs) > 2 else 0
    if node.op_type in ("HardSwish", "Mish"):  # functions of two operators
        return value_bytes(result, sizes)
    if node.op_type in ("Softmax", "LogSoftmax"):
        rank = len(result.shape or ())
        last = node.attributes.get_int("axis", -1) % max(rank, 1) == rank - 1
        return 0 if last else 2 * value_bytes(result, sizes)
    if node.op_type in ("Conv", "ConvTranspose"):  # the patches of an image
        data, kernel = (_dims(v, sizes) for v in node.inputs[:2])
        points = math.prod((data if node.op_type == "ConvTranspose" else _dims(result, sizes))[2:])
        many = node.op_type == "ConvTranspose" or (kernel or [0])[0] > points * node.attributes.get_int("group", 1)
        return int(_item(result) * points * math.prod(kernel[1:])) if many else 0
    return 0


def _item(value: ir.Value) -> float:
    """Bytes of an element; four of an unknown type."""
    return value.dtype.itemsize if value.dtype else 4


def _dims(value: ir.Value | None, sizes: TypicalSizes) -> list[int]:
    return [sizes.size(d) or 1 for d in (value.shape if value is not None else None) or ()]
