"""Find the axis of the samples of each input and output: the states of recurrent layers have it second.

Names of sizes tell it, such as `B` in `x[B, T, 4]` and `h[2, B, 8]`. Where they do not, the axis is followed by
factors from the operands and results of operators with a length for each sequence, to the inputs and outputs of the graph.
Of a state, it is the only size that the model leaves open.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import rule_of
from onnx_convgrad.autodiff.factors import Axes
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.metadata import states_of
from onnx_convgrad.ir.call import Call, signature
from onnx_convgrad.ir.notes import GRADIENTS
from onnx_convgrad.programs.manifest import Port

_Side: TypeAlias = tuple[ir.Value | None, Sequence[str]]


def batch_axes(model: ir.Model, inputs: Collection[str]) -> dict[str, int]:
    """Input or output -> axis of the samples, where that is not the first; `inputs` are those that take data."""
    graph = model.graph
    fed = [v for v in graph.inputs if v.name in inputs]
    axes = dict(_of_states(model, fed)) | dict(_followed(graph)) | _named(fed, graph.outputs)
    gradients = json.loads(model.metadata_props.get(GRADIENTS, "{}"))
    axes |= {gradient: axes[name] for name, gradient in gradients.items() if name in axes}
    known = {v.name: v for v in (*fed, *graph.outputs)}
    return {name: axis for name, axis in axes.items() if axis and name in known}


def _named(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> dict[str, int]:
    """Axes by the name of the number of samples: one that all inputs have, and all outputs if there are several."""
    shapes = {v: Port.from_value(v).shape or () for v in (*inputs, *outputs)}
    shaped = [shapes[v] for v in inputs if shapes[v]]
    common = [s for s in (shaped[0] if shaped else ()) if isinstance(s, str) and all(s in other for other in shaped)]
    everywhere = [s for s in common if all(s in shapes[v] for v in outputs if shapes[v])]
    if not common or (len(inputs) == 1 and not everywhere):
        return {}
    name = (everywhere or common)[0]
    return {v.name or "": shape.index(name) for v, shape in shapes.items() if name in shape}


def _of_states(model: ir.Model, inputs: Sequence[ir.Value]) -> Iterator[tuple[str, int]]:
    """Axes of states, and of the outputs that they take, if one size is open and the data have an open number of samples."""
    states, shapes = states_of(model), {v.name or "": Port.from_value(v).shape or () for v in inputs}
    if any(isinstance(size, int) for name, shape in shapes.items() if name not in states for size in shape[:1]):
        return
    for name, output in states.items():
        free = [axis for axis, size in enumerate(shapes.get(name, ())) if not isinstance(size, int)]
        if len(free) == 1:
            yield from ((name, free[0]), (output, free[0]))


def _followed(graph: ir.Graph) -> Iterator[tuple[str, int]]:
    """Axes of the inputs and outputs that operators with a length for each sequence are connected with."""
    for node in graph:
        names, sides = signature(node.domain, node.op_type)[0], _sides(node)
        if sides and "sequence_lens" in names:
            operands, results = sides
            (samples,) = operands[names.index("sequence_lens")][1]
            yield from _reached([(v, axes.index(samples)) for v, axes in operands if v and samples in axes], back=True)
            yield from _reached([(v, axes.index(samples)) for v, axes in results if v and samples in axes], back=False)


def _reached(todo: list[tuple[ir.Value, int]], *, back: bool) -> Iterator[tuple[str, int]]:
    """The graph's inputs, or its outputs, that values lead to along one axis each, with their axis."""
    seen = set()
    while todo:
        value, axis = todo.pop()
        if (value, axis) in seen:
            continue
        seen.add((value, axis))
        if value.is_graph_input() if back else value.is_graph_output():
            yield value.name or "", axis
        producer = value.producer()
        for node in [producer] if back and producer else [] if back else [use.node for use in value.uses()]:
            sides = _sides(node)
            if sides is not None:
                operands, results = sides
                here, there = (results, operands) if back else (operands, results)
                along = {axes[axis] for v, axes in here if v is value and axis < len(axes)} - {""}
                todo += [(v, axes.index(name)) for name in along for v, axes in there if v and name in axes]


def _sides(node: ir.Node) -> tuple[list[_Side], list[_Side]] | None:
    """Operands and results of a node with the factors of their axes that it treats index by index."""
    rule = rule_of(node)
    try:
        factors = None if rule is None or rule.factors is None else rule.factors(Call(node))
    except UnsupportedCase:
        return None
    if factors is None or factors.flat:
        return None

    def side(values: Sequence[ir.Value | None], axes: Sequence[Axes | None]) -> list[_Side]:
        kept = [[name if factors.does(name).kind == "each" else "" for name in own or ()] for own in axes]
        return list(itertools.zip_longest(values[: len(kept)], kept))

    return side(node.inputs, factors.operands), side(node.outputs, factors.results)
