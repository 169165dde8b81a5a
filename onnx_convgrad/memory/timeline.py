"""The memory of results over time: in which order ONNX Runtime runs the nodes, and how many bytes are alive at each.

ONNX Runtime 1.32 runs a graph node by node in a depth-first order from its ends (`Graph::ReverseDFSFrom`, called by
`GraphViewer`): the last node whose results no node reads comes first, with all that it needs, and so on. A result lives from
its node to its last reader, graph outputs to the end. Views share the memory of their operand, and an elementwise node
writes over an operand of the same size that nobody reads later (`MayInplace` of its kernel).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.ir.emit import VIEWS
from onnx_convgrad.ir.nodes import captured_values, subgraphs
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.memory.arena import Arena

_MISSED = 1.1
"""Measured memory over that of the model of the allocator, typically: scratch memory of kernels, and other fragmentation."""

_IN_PLACE = frozenset(
    "Abs Add Cast Ceil Clip Cos Div Elu Erf Exp Floor HardSigmoid LeakyRelu Log Mul Neg Not Reciprocal Relu Selu Sigmoid"
    " Sin Softplus Softsign Sqrt Sub Sum Tanh ThresholdedRelu".split()
)
"""Operators whose kernels may write over an operand."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory of results while a graph runs.

    Attributes:
        nodes: The nodes in the order in which they run.
        held: Bytes of results alive while each of them runs, without graph inputs and stored weights.
        resident: Bytes that ONNX Runtime's allocator occupies at the end, with its fragmentation.
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


def runtime_order(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of a graph in the order in which ONNX Runtime runs them by default, before its own rewriting."""
    return order_from_ends(list(graph))


def order_from_ends(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """The same for the nodes of a graph as they would stand in the file."""
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
    found = (v.producer() for v in _read(node))
    return {producer for producer in found if producer is not None and producer in place}


def _read(node: ir.Node) -> Iterable[ir.Value]:
    return (v for v in (*node.inputs, *captured_values(node)) if v is not None)


def timeline(graph: ir.Graph, order: Sequence[ir.Node] | None = None, sizes: TypicalSizes | None = None) -> Timeline:
    """Follow the memory of a graph.

    Args:
        graph: The graph, with shapes; unknown sizes take typical values.
        order: Its nodes in the order in which they run; by default that of ONNX Runtime.
        sizes: Values of symbols.
    """
    nodes = runtime_order(graph) if order is None else list(order)
    sizes = sizes or TypicalSizes(graph)
    born, ending = _lifetimes(graph, nodes, sizes)
    arena, places, counts = Arena(), dict[ir.Value, int](), dict[ir.Value, int]()
    total, held = 0, []
    for position in range(len(nodes)):
        for value in born.get(position, ()):
            counts[value] = count = value_bytes(value, sizes)
            total += count
            if count:
                places[value] = arena.allocate(count)
        scratch = _scratch(nodes[position], sizes)
        held.append(total + scratch)
        if scratch:
            arena.release(arena.allocate(scratch))
        for value in ending.get(position, ()):
            total -= counts[value]
            if value in places:
                arena.release(places.pop(value))
    fixed = sum(value_bytes(v, sizes) for v in dict.fromkeys((*graph.inputs, *graph.initializers.values())))
    return Timeline(tuple(nodes), tuple(held), arena.resident, fixed)


Lives = dict[int, list[ir.Value]]
"""Position of a node -> results."""


def _lifetimes(graph: ir.Graph, nodes: Sequence[ir.Node], sizes: TypicalSizes) -> tuple[Lives, Lives]:
    """The results that begin to live at each node, and those that nobody reads after it."""
    owner: dict[ir.Value, ir.Value] = {}
    born: dict[ir.Value, int] = {}
    last: dict[ir.Value, int] = {}
    readers, outputs = _last_readers(nodes), set(graph.outputs)
    for position, node in enumerate(nodes):
        for value in _read(node):
            if owner.get(value, value) in born:
                last[owner.get(value, value)] = position
        source = _shared(node, position, readers, outputs, sizes, owner)
        for index, value in enumerate(node.outputs):
            if source is not None and index == 0:
                owner[value] = owner.get(source, source)
                if owner[value] in last:
                    last[owner[value]] = position
            else:
                born[value] = last[value] = position
    for value in graph.outputs:
        last.pop(owner.get(value, value), None)
    begins, ends = Lives(), Lives()
    for found, lives in ((born, begins), (last, ends)):
        for value, position in found.items():
            lives.setdefault(position, []).append(value)
    return begins, ends


def _scratch(node: ir.Node, sizes: TypicalSizes) -> int:
    """Bytes that a kernel takes while it runs: the results of a body, or the columns of a transposed convolution."""
    if any(subgraphs(node)):
        return max(max(timeline(body, list(body), sizes).held, default=0) for _, body in subgraphs(node))
    if node.op_type == "ConvTranspose" and not node.domain:
        x, w = node.inputs[:2]
        if x is not None and w is not None and x.shape is not None and w.shape is not None:
            image, kernel = ([sizes.size(d) or 1 for d in v.shape or ()] for v in (x, w))
            return math.prod(image[2:]) * math.prod(kernel[1:]) * int(x.dtype.itemsize if x.dtype else 4)
    return 0


def _last_readers(nodes: Sequence[ir.Node]) -> dict[ir.Value, int]:
    """The position of the last node that reads each value."""
    return {value: position for position, node in enumerate(nodes) for value in _read(node)}


def _shared(
    node: ir.Node,
    position: int,
    readers: dict[ir.Value, int],
    outputs: set[ir.Value],
    sizes: TypicalSizes,
    owner: dict[ir.Value, ir.Value],
) -> ir.Value | None:
    """The operand whose memory the first result of a node shares, if there is one."""
    if node.domain or not node.inputs:
        return None
    if node.op_type in VIEWS:
        return node.inputs[0]
    if node.op_type not in _IN_PLACE or node.outputs[0] in outputs:
        return None
    wanted = value_bytes(node.outputs[0], sizes)
    for value in node.inputs[:2]:
        if value is None or value.producer() is None or value in owner or value in outputs:
            continue  # given from outside, a view, or a result that is wanted
        if readers[value] == position and value_bytes(value, sizes) == wanted and len(value.uses()) == 1:
            return value
    return None


def value_bytes(value: ir.Value, sizes: TypicalSizes) -> int:
    """Bytes of a value; 0 if its sizes do not follow from those of the inputs."""
    if value.shape is None or value.dtype is None:
        return 0
    dims = [sizes.size(dim) for dim in value.shape]
    known = [dim for dim in dims if dim is not None]
    return math.ceil(math.prod(known) * value.dtype.itemsize) if len(known) == len(dims) else 0
