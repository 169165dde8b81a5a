"""The memory of results over time: in which order ONNX Runtime runs the nodes, and how many bytes are alive at each.

ONNX Runtime 1.32 runs a graph node by node in a depth-first order from its ends (`Graph::ReverseDFSFrom`, called by
`GraphViewer`): the last node whose results no node reads comes first, with all that it needs, and so on. A result lives from
its node to its last reader, graph outputs to the end. Views share the memory of their operand, and an activation
writes over an operand that nobody reads later, also through a view (`MayInplace` of its kernel). Some kernels take scratch
memory. Both were measured with single nodes. Outputs that are written over inputs (`memory.in_place`) take none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import subgraphs, values_read
from onnx_convgrad.ir.notes import IN_PLACE
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.memory.arena import Arena
from onnx_convgrad.memory.in_place import OVERWRITING

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


def runtime_order(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """The order in which ONNX Runtime, before its own rewriting, runs nodes that stand in a file in this order."""
    place = {node: index for index, node in enumerate(nodes)}
    sources = {node: sorted(_producers(node, place), key=place.__getitem__) for node in place}
    read = {source for found in sources.values() for source in found}
    stack = [(node, False) for node in place if node not in read]
    seen: set[ir.Node] = set()
    order: list[ir.Node] = []
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(source, False) for source in sources[node] if source not in seen]
    return order


def _producers(node: ir.Node, place: dict[ir.Node, int]) -> set[ir.Node]:
    found = (v.producer() for v in values_read(node))
    return {producer for producer in found if producer is not None and producer in place}


def timeline(graph: ir.Graph, order: Sequence[ir.Node] | None = None, sizes: TypicalSizes | None = None) -> Timeline:
    """Follow the memory of a graph.

    Args:
        graph: The graph, with shapes; unknown sizes take typical values.
        order: Its nodes in the order in which they run; by default that of ONNX Runtime.
        sizes: Values of symbols.
    """
    nodes = runtime_order(graph) if order is None else list(order)
    sizes = sizes or TypicalSizes(graph)
    arena, flow = Arena(), _Flow.of(graph, nodes, sizes)
    held = [flow.follow(arena) for _ in range(_RUNS)][-1]
    fixed = sum(value_bytes(v, sizes) for v in dict.fromkeys((*graph.inputs, *graph.initializers.values())))
    return Timeline(tuple(nodes), tuple(held), arena.resident, fixed)


def largest_results(graph: ir.Graph) -> list[tuple[ir.Value, int]]:
    """The results that are alive where a graph holds most bytes, with their bytes, the largest first."""
    nodes = runtime_order(graph)
    flow = _Flow.of(graph, nodes, TypicalSizes(graph))
    held = flow.follow(Arena())
    alive = flow.alive(held.index(max(held))) if held else {}
    return sorted(alive.items(), key=lambda item: item[1], reverse=True)


Lives = dict[int, list[ir.Value]]
"""Position of a node -> results."""


def _lifetimes(graph: ir.Graph, nodes: Sequence[ir.Node], sizes: TypicalSizes) -> tuple[Lives, Lives]:
    """The results that begin to live at each node, and those that nobody reads after it."""
    owner: dict[ir.Value, ir.Value] = {}
    unread: dict[ir.Value, int] = {}  # owner -> reads that are still to come; outputs of the graph are read once more
    born: dict[ir.Value, int] = {}
    last: dict[ir.Value, int] = {}
    outputs = set(graph.outputs)
    written = written_over(graph)
    operands = [values_read(node) for node in nodes]
    reads = Counter(value for values in operands for value in values) + Counter(outputs)
    for position, (node, values) in enumerate(zip(nodes, operands, strict=True)):
        for value in values:
            if owner.get(value, value) in born:
                last[owner.get(value, value)] = position
        source = written.get(node.outputs[0]) if node.outputs else None
        source = source or _shared(node, owner, unread, outputs, sizes)
        for index, value in enumerate(node.outputs):
            if source is not None and index == 0:
                owner[value] = source
                if source in born:
                    unread[source] += reads[value]
                    last[source] = position
            else:
                born[value] = last[value] = position
                unread[value] = reads[value]
        for value in values:
            if owner.get(value, value) in born:
                unread[owner.get(value, value)] -= 1
    for value in graph.outputs:
        last.pop(owner.get(value, value), None)
    begins, ends = Lives(), Lives()
    for found, lives in ((born, begins), (last, ends)):
        for value, position in found.items():
            lives.setdefault(position, []).append(value)
    return begins, ends


def written_over(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Output -> the input in whose memory it is written."""
    inputs = {v.name: v for v in graph.inputs}
    return {v: inputs[v.metadata_props[IN_PLACE]] for v in graph.outputs if IN_PLACE in v.metadata_props}


@dataclass(frozen=True, slots=True)
class _Flow:
    """The memory that each node of a graph allocates and releases.

    Attributes:
        born: Bytes of the results that begin to live at each node, by value.
        ending: The results that nobody reads after it.
        scratch: Bytes that its kernel takes while it runs.
        bodies: The flows of its bodies, of which one runs at a time.
    """

    born: tuple[dict[ir.Value, int], ...]
    ending: tuple[tuple[ir.Value, ...], ...]
    scratch: tuple[int, ...]
    bodies: tuple[tuple[_Flow, ...], ...]

    @classmethod
    def of(cls, graph: ir.Graph, nodes: Sequence[ir.Node], sizes: TypicalSizes) -> _Flow:
        born, ending = _lifetimes(graph, nodes, sizes)
        places = range(len(nodes))
        return cls(
            tuple({v: value_bytes(v, sizes) for v in born.get(i, ())} for i in places),
            tuple(tuple(ending.get(i, ())) for i in places),
            tuple(_scratch(node, sizes) for node in nodes),
            tuple(tuple(cls.of(body, list(body), sizes) for _, body in subgraphs(node)) for node in nodes),
        )

    def alive(self, at: int) -> dict[ir.Value, int]:
        """The results that are alive while a node runs, with their bytes."""
        found: dict[ir.Value, int] = {}
        for place in range(at + 1):
            found |= self.born[place]
            for value in self.ending[place] if place < at else ():
                found.pop(value)
        return found

    def follow(self, arena: Arena) -> list[int]:
        """Allocate and release in an arena; return the bytes alive at each node."""
        places: dict[ir.Value, tuple[int, int | None]] = {}
        total, held = 0, []
        for born, ending, scratch, bodies in zip(self.born, self.ending, self.scratch, self.bodies, strict=True):
            for value, count in born.items():
                places[value] = (count, arena.allocate(count) if count else None)
                total += count
            most = max([scratch, *(bytes_ for body in bodies for bytes_ in body.follow(arena))])
            if scratch:
                arena.release(arena.allocate(scratch))
            held.append(total + most)
            for value in ending:
                count, place = places.pop(value)
                total -= count
                if place is not None:
                    arena.release(place)
        for _, place in places.values():
            if place is not None:
                arena.release(place)
        return held


def _scratch(node: ir.Node, sizes: TypicalSizes) -> int:
    """Bytes that a kernel takes while it runs."""
    if node.domain or not node.outputs:
        return 0
    whole = value_bytes(node.outputs[0], sizes)
    item = node.outputs[0].dtype.itemsize if node.outputs[0].dtype else 4
    if node.op_type == "Where":  # each side, with zeros in the places of the other
        condition, *sides = (math.prod(_dims(v, sizes)) for v in node.inputs)
        return int(item * sum(max(condition, side) for side in sides))
    if node.op_type in ("Sum", "Max", "Min", "Mean"):
        return whole if len(node.inputs) > 2 else 0
    if node.op_type in ("HardSwish", "Mish"):  # functions of two operators
        return whole
    if node.op_type in ("Softmax", "LogSoftmax"):
        rank = len(node.outputs[0].shape or ())
        return 0 if node.attributes.get_int("axis", -1) % max(rank, 1) == rank - 1 else 2 * whole
    if node.op_type in ("Conv", "ConvTranspose"):  # the patches of an image
        data, kernel = (_dims(v, sizes) for v in node.inputs[:2])
        points = math.prod((data if node.op_type == "ConvTranspose" else _dims(node.outputs[0], sizes))[2:])
        many = node.op_type == "ConvTranspose" or (kernel or [0])[0] > points * node.attributes.get_int("group", 1)
        return int(item * points * math.prod(kernel[1:])) if many else 0
    return 0


def _dims(value: ir.Value | None, sizes: TypicalSizes) -> list[int]:
    return [sizes.size(d) or 1 for d in (value.shape if value is not None else None) or ()]


def _shared(
    node: ir.Node,
    owner: dict[ir.Value, ir.Value],
    unread: dict[ir.Value, int],
    outputs: set[ir.Value],
    sizes: TypicalSizes,
) -> ir.Value | None:
    """The result or input whose memory the first result of a node shares, if there is one."""
    source = node.inputs[0] if node.inputs and not node.domain else None
    if source is None:
        return None
    whole = owner.get(source, source)
    if is_view(node) or _is_fused(node):
        return whole
    if not OVERWRITING.get(node.op_type) or node.outputs[0] in outputs or unread.get(whole, 0) != 1:
        return None
    return whole if value_bytes(source, sizes) == value_bytes(node.outputs[0], sizes) else None


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
        before, after = (timeline(graph, runtime_order(order), sizes).peak for order in (nodes, wanted))
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
        producers = [v.producer() for v in values_read(node)]
        known = [p for p in producers if p is not None and p in depth]
        read.update(known)
        depth[node] = 1 + max((depth[p] for p in known), default=0)
    inner = sorted((n for n in nodes if n in read), key=depth.__getitem__)
    ends = sorted((n for n in nodes if n not in read), key=depth.__getitem__, reverse=True)
    return [*inner, *ends]
