"""Find the axis of the samples of each input and output: the states of recurrent layers have it second.

Names of sizes tell it, such as `B` in `x[B, T, 4]` and `h[2, B, 8]`. Where they do not, changes of layout are followed from
the operands and results of recurrent layers, whose axes are known, to the inputs and outputs of the graph.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.axes import kept_axes
from onnx_convgrad.autodiff.facts import moved_operands
from onnx_convgrad.frontend.shapes.infer import InferShapes
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import GRADIENTS
from onnx_convgrad.ir.passes import run_passes

_RECURRENT = {"GRU": 5, "LSTM": 5, "RNN": 5, "DynamicQuantizeLSTM": 5}
"""Recurrent operator -> the place of its first initial state."""

_RANKS = (4, 3, 3)
"""Ranks of their results."""


def batch_axes(model: ir.Model, inputs: Collection[str]) -> dict[str, int]:
    """Input or output -> axis of the samples, where that is not the first.

    Args:
        model: The model.
        inputs: Those of its inputs that take data.
    """
    graph = model.graph
    fed = [v for v in graph.inputs if v.name in inputs]
    axes = dict(_followed(_ranked(model))) | _named(fed, graph.outputs)
    gradients = json.loads(model.metadata_props.get(GRADIENTS, "{}"))
    axes |= {gradient: axes[name] for name, gradient in gradients.items() if name in axes}
    known = {v.name: v for v in (*fed, *graph.outputs)}
    return {name: axis for name, axis in axes.items() if axis and name in known}


def _is_recurrent(node: ir.Node) -> bool:
    return node.op_type in _RECURRENT


def _ranked(model: ir.Model) -> ir.Graph:
    """The graph with the ranks of its values, of a copy if the file does not have those of a recurrent model."""
    known = all(v.shape is not None for node in model.graph for v in node.outputs)
    if known or not any(map(_is_recurrent, model.graph)):
        return model.graph
    copy = model.clone()
    for node in filter(_is_recurrent, copy.graph):
        for value, rank in zip(node.outputs, _RANKS, strict=False):
            value.shape = value.shape or ir.Shape([None] * rank)
    run_passes(copy, [InferShapes()])
    return copy.graph


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
        if not _is_recurrent(node):
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
    node = value.producer()
    if node is None:
        if value.is_graph_input():
            yield value.name or "", axis
        return
    for operand, source in _moved(node):
        places = kept_axes(node, operand)
        if axis in places:
            yield from _before(source, places.index(axis))


def _after(value: ir.Value, axis: int) -> Iterator[tuple[str, int]]:
    """The outputs that a value becomes, with the place of an axis in them."""
    if value.is_graph_output():
        yield value.name or "", axis
    for use in value.uses():
        places = kept_axes(use.node, use.idx) if (use.idx, value) in _moved(use.node) else []
        place = places[axis] if axis < len(places) else None
        for result in use.node.outputs if place is not None else ():
            yield from _after(result, place or 0)


def _moved(node: ir.Node) -> list[tuple[int, ir.Value]]:
    """The operands whose numbers a node only moves or casts, with their positions."""
    moved = node.inputs[:1] if is_op(node, "Cast") else moved_operands(node)
    return [(i, v) for i, v in enumerate(node.inputs) if v is not None and v in moved]
