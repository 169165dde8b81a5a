"""Compute equal updates of many short vectors at once, for ONNX Runtime's CUDA provider.

A training step updates the scale, the bias and both running statistics of every BatchNormalization: a few operations on some
hundred numbers each, whose time is that of starting a kernel. Vectors of one length whose updates are the same operators are
joined, updated and split again. PyTorch's optimizers do so too (`foreach=True`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place
from onnx_convgrad.ir.targets import Target

_ELEMENTWISE = "Abs Add Cast Div Max Min Mul Neg Pow Reciprocal Relu Sign Sqrt Sub Where".split()

_LONGEST = 4096
"""Elements of a vector, above which a kernel takes longer than its start."""

_FEWEST, _MOST = 3, 32
"""Vectors that are joined. With more than 32, the kernels of Concat and Split read addresses from a table that the host
writes in each run, which a captured graph does not repeat."""


@dataclass(slots=True)
class _Update:
    """The elementwise nodes between vectors that others compute, the `leaves`, and a graph output.

    `steps` lists each node in order, with its operands: positions of leaves (negative: -1 is the first) or of earlier nodes,
    or values of one element, which all vectors share.
    """

    root: ir.Value
    size: int
    leaves: list[ir.Value] = field(default_factory=list)
    nodes: list[ir.Node] = field(default_factory=list)
    steps: list[tuple[Any, ...]] = field(default_factory=list)

    def key(self) -> tuple[Any, ...]:
        """Equal for updates that can be computed together."""
        return self.size, tuple(self.steps), tuple(leaf.dtype for leaf in self.leaves)


class BatchUpdates(GraphPass):
    """Join the short vectors that are updated in the same way."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target

    def rewrite(self, model: ir.Model) -> bool:
        """Rewrite the updates of graph outputs that no node reads."""
        graph = model.graph
        if self.target.name != "cuda":
            return False
        alike: dict[tuple[Any, ...], list[_Update]] = {}
        for output in graph.outputs:
            update = _update_of(output)
            if update is not None:
                alike.setdefault(update.key(), []).append(update)
        e, outputs, changed = Emitter(graph, opsets=graph.opset_imports, target=self.target), OutputPlaces(graph), False
        for updates in alike.values():
            for group in _groups(updates):
                _join(e, outputs, group)
                changed = True
        return changed


def _groups(updates: Sequence[_Update]) -> Iterator[Sequence[_Update]]:
    for start in range(0, len(updates), _MOST):
        group = updates[start : start + _MOST]
        if len(group) >= _FEWEST:
            yield group


def _length(value: ir.Value) -> int | None:
    sizes = static_dims(value)
    return sizes[0] if sizes is not None and len(sizes) == 1 else None


def _is_shared(value: ir.Value) -> bool:
    sizes = static_dims(value)
    return sizes is not None and all(size == 1 for size in sizes)


def _update_of(output: ir.Value) -> _Update | None:
    """The update of a graph output that no node reads; `None` if it is not of short vectors."""
    size = _length(output)
    if size is None or not 1 < size <= _LONGEST or output.uses() or not is_op(output.producer(), *_ELEMENTWISE):
        return None
    update, places = _Update(output, size), {}

    def place(value: ir.Value) -> int | None:
        """The place of a vector: of its node among the steps, or of a leaf; `None` if it is of another length."""
        if value in places:
            return places[value]
        if _length(value) != size:
            return None
        node = value.producer()
        inner = is_op(node, *_ELEMENTWISE) and (value is output or _read_once(value))
        if node is None or not inner:
            update.leaves.append(value)
            places[value] = -len(update.leaves)
            return places[value]
        operands: list[Any] = []
        for operand in node.inputs:
            if operand is None:
                return None
            at = operand if _is_shared(operand) else place(operand)
            if at is None:
                return None
            operands.append(at)
        attributes = tuple((a.name, a.value) for a in node.attributes.values())
        update.nodes.append(node)
        update.steps.append((node.op_type, attributes, value.dtype, *operands))
        places[value] = len(update.steps) - 1
        return places[value]

    return update if place(output) is not None and update.leaves else None


def _read_once(value: ir.Value) -> bool:
    """Whether one node alone reads a value, which then belongs to the same update."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def _join(e: Emitter, outputs: OutputPlaces, group: Sequence[_Update]) -> None:
    first = group[0]
    leaves = [e.concat([update.leaves[i] for update in group], 0) for i in range(len(first.leaves))]
    values: list[ir.Value] = []
    for op_type, attributes, dtype, *operands in first.steps:
        inputs = [v if isinstance(v, ir.Value) else values[v] if v >= 0 else leaves[-v - 1] for v in operands]
        value = e.op(op_type, *inputs, **dict(attributes))
        value.dtype, value.shape = dtype, ir.Shape([first.size * len(group)])
        values.append(value)
    parts = e.ops("Split", values[-1], outputs=len(group), axis=0, num_outputs=len(group))
    for update, part in zip(group, parts, strict=True):
        put_in_place(e, outputs, update.root, part, new=True)
        e.graph.remove(update.nodes[::-1], safe=True)
