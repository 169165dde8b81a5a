"""Compute elementwise formulas of many small vectors at once, for ONNX Runtime's CUDA provider.

A training step updates running statistics, scales and biases, and their state, one by one: thousands of kernels over some
hundred numbers each, which take as long as their start. PyTorch calls the remedy multi-tensor or "foreach" kernels:

    f(a1, b1), f(a2, b2), ... = Split(f(Concat(a1, a2, ...), Concat(b1, b2, ...)))

Formulas that cannot be batched as a whole lose their last node, and so on: the rest often depends on earlier values alone.

Operators whose results IEEE 754 determines are batched alone, so that each number stays the same bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import GraphPass, RemoveUnused
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place
from onnx_convgrad.ir.targets import TargetInfo

_OPERATORS = frozenset(
    "Abs Add And Cast Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mul Neg Not Or Reciprocal Sign Sqrt Sub "
    "Where".split()
)

_MOST = 32
"""Operands of a Concat and results of a Split, all of one size.

ONNX Runtime passes so many addresses as arguments of the kernel (`concat_impl.cu`, `split_impl.cu`). More, or sizes that
differ, go through a table that it copies from the host, which a captured CUDA graph would copy again when it is replayed.
"""

_FEWEST = 3
_LONGEST = 4096


@dataclass(slots=True, eq=False)
class _Region:
    """Connected nodes, last first; those of a `final` region are read by one another and as graph outputs alone."""

    nodes: list[ir.Node]
    final: bool


@dataclass(frozen=True, slots=True)
class _Formula:
    """The computation of the nodes of a region, in the order of the graph.

    Attributes:
        leaves: Where each vector is read first that the nodes do not compute: the position of the node and of the operand.
        results: The positions of the nodes whose result is read elsewhere.
        structure: Equal for regions that compute the same of their leaves.
    """

    nodes: Sequence[ir.Node]
    leaves: Sequence[tuple[int, int]]
    results: Sequence[int]
    structure: Hashable

    def vectors(self) -> list[ir.Value]:
        """The leaves."""
        return [self.nodes[place].inputs[index] for place, index in self.leaves]  # type: ignore[misc] # none is missing

    def sources(self) -> set[ir.Node]:
        """The nodes outside whose results the region reads."""
        read = {v for node in self.nodes for v in node.inputs if v is not None}
        return {node for v in read if (node := v.producer()) is not None} - {*self.nodes}

    def ready(self, places: Places) -> float:
        """The place of the last node that the region depends on."""
        return max((places.get(node, _END) for node in self.sources()), default=-1)

    def is_gradient(self) -> bool:
        """Whether the results are graph outputs that do not depend on their old values, unlike those of updates.

        The sum of each gradient over all ranks begins when it is ready, see `training.overlap`.
        """
        read = any(use.node not in self.nodes for place in self.results for use in self.nodes[place].outputs[0].uses())
        return not read and not any(v.is_initializer() or v.is_graph_input() for v in self.vectors())

    def due(self, places: Places) -> float:
        """The place of the first node that reads a result."""
        own = set(self.nodes)
        readers = {use.node for node in self.nodes for use in node.outputs[0].uses()} - own
        return min((places.get(node, -1) for node in readers), default=_END)


Places: TypeAlias = dict[ir.Node, int]
"""Node -> its place in the graph; nodes in bodies of others have none."""

_END = math.inf


class BatchUpdates(GraphPass):
    """Batch equal formulas of small vectors, after lowering."""

    def __init__(self, target: TargetInfo) -> None:
        super().__init__()
        self.target = target

    def rewrite(self, model: ir.Model) -> bool:
        """Batch regions of the same structure that do not depend on one another."""
        graph = model.graph
        if self.target.name != "cuda":
            return False
        changed: bool = RemoveUnused()(model).modified  # they would count as readers
        e, outputs = Emitter(graph, opsets=graph.opset_imports, target=self.target), OutputPlaces(graph)
        alone: set[ir.Node] = set()
        places = _places(graph)
        while groups := _groups(places, alone):
            for group in groups:
                for batch in _batches(group, places):
                    if _compute_together(e, outputs, batch, places):
                        changed, places = True, _places(graph)
            left = [formula for group in groups for formula in group if formula.nodes[0].graph is graph]
            alone |= {formula.nodes[place] for formula in left for place in formula.results}
            alone |= set(e.emitted)
        return changed


def _places(graph: ir.Graph) -> Places:
    return {node: place for place, node in enumerate(graph)}


# -- regions -----------------------------------------------------------------------------------------------------------


def _groups(places: Places, alone: Collection[ir.Node]) -> Sequence[Sequence[_Formula]]:
    """The formulas by their structure, without the nodes that stay alone and without gradients."""
    groups: dict[Hashable, list[_Formula]] = {}
    for region in reversed(_regions([node for node in places if node not in alone])):
        formula = _formula(sorted(region.nodes, key=places.__getitem__))
        if not formula.is_gradient():
            groups.setdefault(formula.structure, []).append(formula)
    return list(groups.values())


def _regions(nodes: Sequence[ir.Node]) -> Sequence[_Region]:
    """The largest regions such that each has one result, or graph outputs as its results, as the state of Adam."""
    of: dict[ir.Node, _Region] = {}
    for node in reversed(nodes):
        if not _is_small(node):
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        inside = list(dict.fromkeys(of[reader] for reader in readers if reader in of))
        whole = len(inside) == 1 or all(region.final for region in inside)
        if not inside or not whole or any(reader not in of for reader in readers):
            of[node] = _Region([node], final=not readers)
            continue
        first, *others = inside
        for other in others:
            first.nodes += other.nodes
            of |= dict.fromkeys(other.nodes, first)
        first.nodes.append(node)
        of[node] = first
    return list(dict.fromkeys(of.values()))


def _is_small(node: ir.Node) -> bool:
    """Whether a node computes each entry of a short vector from the entries of vectors of that size and from scalars."""
    y = node.outputs[0]
    if node.domain or node.op_type not in _OPERATORS or y.dtype is None:
        return False
    sizes = static_dims(y)
    if sizes is None or len(sizes) != 1 or sizes[0] is None or not 1 < sizes[0] <= _LONGEST:
        return False
    shapes = [None if v is None else static_dims(v) for v in node.inputs]
    return sizes in shapes and all(shape in (sizes, [], [1]) for shape in shapes)


def _formula(nodes: Sequence[ir.Node]) -> _Formula:
    at = {node.outputs[0]: place for place, node in enumerate(nodes)}
    size, numbers, leaves, steps = static_dims(nodes[0].outputs[0]), dict[ir.Value, int](), list[tuple[int, int]](), []
    for place, node in enumerate(nodes):
        operands: list[Hashable] = []
        for index, value in enumerate(node.inputs):
            assert value is not None, "small nodes have all their operands"
            if value in at:
                operands.append(at[value])
            elif static_dims(value) != size:
                operands.append(_scalar(value))
            else:
                if value not in numbers:
                    numbers[value] = len(leaves)
                    leaves.append((place, index))
                operands.append((numbers[value], value.dtype))
        steps.append((node.op_type, tuple(sorted(Call(node).attributes().items())), tuple(operands)))
    outer = [{use.node.outputs[0] for use in y.uses()} - at.keys() for y in at]
    results = [at[y] for y, readers in zip(at, outer, strict=True) if readers or y.is_graph_output()]
    return _Formula(nodes, leaves, results, (tuple(size or ()), tuple(results), tuple(steps)))


def _scalar(value: ir.Value) -> Hashable:
    """Equal for the same scalar and for equal constants."""
    number = constant_of(value)
    return value if number is None else (value.dtype, number.shape, number.tobytes())


# -- batches -----------------------------------------------------------------------------------------------------------


def _batches(group: Sequence[_Formula], places: Places) -> Sequence[Sequence[_Formula]]:
    """Sets of formulas such that all operands are computed before the first result is read."""
    batches, group = [], sorted(group, key=lambda formula: formula.ready(places))
    while group:
        due, count, members = _END, 0, set[ir.Node]()
        for formula in group:
            due = min(due, formula.due(places))
            if formula.ready(places) >= due or not members.isdisjoint(formula.sources()):
                break
            members.update(formula.nodes)
            count += 1
        count = max(count, 1)
        parts = -(-count // _MOST)
        for part in range(parts):
            batch = group[count * part // parts : count * (part + 1) // parts]
            if len(batch) >= _FEWEST and _saves(batch):
                batches.append(batch)
        group = group[count:]
    return batches


def _saves(batch: Sequence[_Formula]) -> bool:
    """Whether fewer nodes remain."""
    first = batch[0]
    return len(batch) * len(first.nodes) > len(first.nodes) + len(first.leaves) + len(first.results)


def _compute_together(e: Emitter, outputs: OutputPlaces, batch: Sequence[_Formula], places: Places) -> bool:
    """Emit a batch before the first node that reads one of its results, else at the end; return whether that is possible."""
    due = min(formula.due(places) for formula in batch)
    if any(formula.ready(places) >= due for formula in batch):
        return False  # after another batch has moved
    e.repeat()  # equal nodes may stand behind this place
    first = batch[0]
    with e.rewriting(first.nodes[-1], "batched"):
        e.anchor = None if due == _END else list(places)[int(due)]
        leaves = zip(*(formula.vectors() for formula in batch), strict=True)
        values = {leaf[0]: _joined(e, leaf) for leaf in leaves}
        for node in first.nodes:
            operands = [None if v is None else values.get(v, v) for v in node.inputs]
            values[node.outputs[0]] = e.op(node.op_type, *operands, **Call(node).attributes())
        for place in first.results:
            whole = values[first.nodes[place].outputs[0]]
            parts = e.ops("Split", whole, outputs=len(batch), axis=0, num_outputs=len(batch))
            for formula, part in zip(batch, parts, strict=True):
                put_in_place(e, outputs, formula.nodes[place].outputs[0], part, new=True)
    e.graph.remove([node for formula in batch for node in formula.nodes], safe=True)
    return True


def _joined(e: Emitter, vectors: Sequence[ir.Value]) -> ir.Value:
    """The vectors one after another; those that another batch has split are still together."""
    split = vectors[0].producer()
    if is_op(split, "Split") and tuple(split.outputs) == tuple(vectors) and split.inputs[0] is not None:
        return split.inputs[0]
    return e.concat(vectors, 0)
