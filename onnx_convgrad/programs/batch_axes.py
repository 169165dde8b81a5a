"""Find the axis of the samples of each input and output: the states of recurrent layers have it second.

Names of sizes tell it, such as `B` in `x[B, T, 4]` and `h[2, B, 8]`. Where they do not, changes of layout are followed from
the operands and results of recurrent layers, whose axes are known, to the inputs and outputs of the graph.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import GRADIENTS

_RECURRENT = {"GRU": 5, "LSTM": 5, "RNN": 5, "DynamicQuantizeLSTM": 5}
"""Recurrent operator -> the place of its first initial state."""

_ALONG = ("Cast", "Gather", "Identity", "Slice", "Split")
"""Operators whose first operand and results have the samples along one axis, unless they work along it."""


def batch_axes(model: ir.Model, inputs: Collection[str]) -> dict[str, int]:
    """Input or output -> axis of the samples, where that is not the first.

    Args:
        model: The model.
        inputs: Those of its inputs that take data.
    """
    graph = model.graph
    fed = [v for v in graph.inputs if v.name in inputs]
    axes = dict(_followed(graph)) | _named(fed, graph.outputs)
    gradients = json.loads(model.metadata_props.get(GRADIENTS, "{}"))
    axes |= {gradient: axes[name] for name, gradient in gradients.items() if name in axes}
    known = {v.name: v for v in (*fed, *graph.outputs)}
    return {name: axis for name, axis in axes.items() if axis and name in known}


def _named(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> dict[str, int]:
    """Axes by the name of the number of samples: one that all inputs have, and all outputs if there are several."""
    shapes = {v: _symbols(v) for v in (*inputs, *outputs)}
    shaped = [shapes[v] for v in inputs if shapes[v]]
    common = [s for s in (shaped[0] if shaped else ()) if isinstance(s, str) and all(s in other for other in shaped)]
    everywhere = [s for s in common if all(s in shapes[v] for v in outputs if shapes[v])]
    if not common or (len(inputs) == 1 and not everywhere):
        return {}
    name = (everywhere or common)[0]
    return {v.name or "": shape.index(name) for v, shape in shapes.items() if name in shape}


def _symbols(value: ir.Value) -> list[int | str | None]:
    return [] if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]


def _followed(graph: ir.Graph) -> Iterator[tuple[str, int]]:
    """Axes of the inputs and outputs that recurrent layers are connected with by changes of layout alone."""
    for node in graph:
        if not is_op(node, *_RECURRENT) and node.op_type not in _RECURRENT:
            continue
        first = Call(node).int("layout", 0) == 1 if not node.domain else False
        states = [v for v in node.inputs[_RECURRENT[node.op_type] :][:2] if v is not None]
        for operand, axis in [(node.inputs[0], 0 if first else 1), *((state, 0 if first else 1) for state in states)]:
            if operand is not None:
                yield from _before(operand, axis)
        for result, axis in zip(node.outputs, ((0, 0, 0) if first else (2, 1, 1)), strict=False):
            yield from _after(result, axis)


def _before(value: ir.Value, axis: int) -> Iterator[tuple[str, int]]:
    """The input that a value is, with the place of an axis in it."""
    while (node := value.producer()) is not None:
        if is_op(node, "Concat"):
            for operand in node.inputs:
                if operand is not None and _rank(node, Call(node).int("axis", 0)) != axis:
                    yield from _before(operand, axis)
            return
        places = _places(node)
        source = node.inputs[0] if node.inputs else None
        if places is None or source is None or axis not in places:
            return
        value, axis = source, places.index(axis)
    if value.is_graph_input():
        yield value.name or "", axis


def _after(value: ir.Value, axis: int) -> Iterator[tuple[str, int]]:
    """The outputs that a value becomes, with the place of an axis in them."""
    if value.is_graph_output():
        yield value.name or "", axis
    for use in value.uses():
        node = use.node
        places = None if use.idx else _places(node)
        if is_op(node, "Concat") and _rank(node, Call(node).int("axis", 0)) != axis:
            yield from _after(node.outputs[0], axis)
        elif places is not None and axis < len(places) and places[axis] is not None:
            for result in node.outputs:
                yield from _after(result, places[axis] or 0)


def _rank(node: ir.Node, axis: int) -> int | None:
    """An axis counted from the front; `None` if the rank is not known."""
    shape = next((v.shape for v in (*node.inputs[:1], *node.outputs) if v is not None and v.shape is not None), None)
    return axis if axis >= 0 else None if shape is None else axis + len(shape)


def _places(node: ir.Node) -> list[int | None] | None:
    """For each axis of the first operand its place in the results, `None` where it has none; `None` for other operators."""
    if not is_op(node, *_ALONG, "Squeeze", "Transpose", "Unsqueeze"):
        return None
    rank, n = _operand_rank(node), Call(node)
    if node.op_type == "Transpose":
        order = list(n.ints("perm") or reversed(range(rank)))
        return [order.index(axis) for axis in range(len(order))]
    if node.op_type in ("Squeeze", "Unsqueeze"):
        given = n.ints("axes") or (constant_of(node.inputs[1]) if len(node.inputs) > 1 else None)
        return None if given is None else _squeezed(node.op_type, rank, [int(axis) for axis in given])
    if node.op_type == "Split":
        axis = n.int("axis", 0) % rank
        return [None if place == axis else place for place in range(rank)]
    if node.op_type == "Gather":
        indices = node.inputs[1].shape if node.inputs[1] is not None else None
        axis, more = n.int("axis", 0) % rank, 0 if indices is None else len(indices) - 1
        return [None if place == axis else place + more * (place > axis) for place in range(rank)]
    return list(range(rank))  # a Slice hardly takes a part of the samples


def _squeezed(op_type: str, rank: int, axes: list[int]) -> list[int | None]:
    if op_type == "Squeeze":
        kept = [axis for axis in range(rank) if axis not in {a % rank for a in axes}]
        return [kept.index(axis) if axis in kept else None for axis in range(rank)]
    new = {axis % (rank + len(axes)) for axis in axes}
    return [axis for axis in range(rank + len(axes)) if axis not in new]


def _operand_rank(node: ir.Node) -> int:
    """The rank of the first operand, or where none is declared one that is large enough."""
    shape = next((v.shape for v in (*node.inputs[:1], *node.outputs) if v is not None and v.shape is not None), None)
    return 4 if shape is None else len(shape)
