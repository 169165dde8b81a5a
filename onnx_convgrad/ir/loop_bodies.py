"""Build the bodies of loops: emit their nodes into the graph as usual, then move them into a Scan."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import RANDOM_SOURCES
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import rename, values_of
from onnx_convgrad.ir.nodes import all_nodes, captured_values, is_op, nested_graphs, release, subgraphs


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of the slices of all turns in one value: the axis, and whether the first turn has the last slice."""

    axis: int = 0
    backwards: bool = False

    def turned(self) -> Self:
        """The layout for a loop that takes the turns in reverse order."""
        return replace(self, backwards=not self.backwards)


@dataclass(frozen=True, slots=True)
class Slices:
    """A value that holds a slice for each turn."""

    whole: ir.Value
    layout: Layout = Layout()


@dataclass(frozen=True, slots=True)
class Carried:
    """A value carried from turn to turn: before the first turn, and in the body at the beginning and the end of a turn."""

    first: ir.Value
    inner: ir.Value
    next: ir.Value


def placeholder(e: Emitter, like: ir.Value, shape: ir.Shape | None) -> ir.Value:
    """An input of a body, with the dtype of `like`."""
    return ir.Value(name=e.names.claim("turn"), shape=shape, type=ir.TensorType(like.dtype or ir.DataType.FLOAT))


def emit_once(
    e: Emitter, body: ir.Graph, operands: Sequence[ir.Value], values: dict[ir.Value, ir.Value] | None = None
) -> list[ir.Value]:
    """Emit a body once, on `operands`; values that it captures from the outer graph stay as they are.

    `values` receives what became of each value of the body.
    """
    values = {} if values is None else values
    values.update(zip(body.inputs, operands, strict=True))
    for constant in body.initializers.values():
        require(constant.const_value is not None, "its body has an initializer without a value.")
        assert constant.const_value is not None
        values[constant] = e.const(constant.const_value.numpy(), constant.dtype)
    emit_nodes(e, body, values)
    return [values.get(v, v) for v in body.outputs]


def emit_nodes(e: Emitter, nodes: Iterable[ir.Node], values: dict[ir.Value, ir.Value]) -> None:
    """Emit nodes again, in order, on `values` in place of their operands; add what became of their results to `values`."""
    for node in nodes:
        inputs = [None if v is None else values.get(v, v) for v in node.inputs]
        if any(subgraphs(node)):
            results: Sequence[ir.Value] = _copy(e, node, inputs, values).outputs
        else:
            results = e.again(node, inputs, Call(node).attributes())
            for result, original in zip(results, node.outputs, strict=True):
                if result.shape is None and original.shape is not None:  # known from what reads it
                    result.shape = ir.Shape([f"{result.name}_{axis}" for axis in range(len(original.shape))])
        values.update(zip(node.outputs, results, strict=True))


def _copy(e: Emitter, node: ir.Node, inputs: Sequence[ir.Value | None], values: Mapping[ir.Value, ir.Value]) -> ir.Node:
    """Emit a copy of a node with bodies, which read `values` in place of those that they captured."""
    attributes = [
        ir.AttrGraph(a.name, a.as_graph().clone(allow_outer_scope_values=True))
        if a.type == ir.AttributeType.GRAPH
        else a
        for a in node.attributes.values()
    ]
    copy = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
    for _, body in subgraphs(copy):
        for scope in (body, *nested_graphs(body)):
            for own in [v for v in values_of(scope) if v.name]:
                rename(own, e.names.claim("inner"))
        for inner in all_nodes(body):
            for index, value in enumerate(inner.inputs):
                if value is not None and value in values:
                    inner.replace_input_with(index, values[value])
    e.place(copy)
    e.infer(copy)
    for result, original in zip(copy.outputs, node.outputs, strict=True):
        e.typed(result, original)
    return copy


def draws(node: ir.Node) -> bool:
    """Whether a node draws random numbers."""
    return node.op_type in RANDOM_SOURCES or (is_op(node, "Dropout") and len(node.inputs) > 2)


def depending(nodes: Iterable[ir.Node], inner: Collection[ir.Value]) -> list[ir.Node]:
    """The nodes that depend on values `inner` to a turn, or draw random numbers in every turn; `nodes` are in order."""
    found, values = [], set(inner)
    for node in nodes:
        if draws(node) or any(v in values for v in _operands(node)):
            found.append(node)
            values.update(node.outputs)
    return found


def _operands(node: ir.Node) -> list[ir.Value]:
    return [v for v in (*node.inputs, *captured_values(node)) if v is not None]


def take_body(e: Emitter, start: int, inner: Collection[ir.Value], results: Collection[ir.Value]) -> list[ir.Node]:
    """Remove the nodes from the graph that were emitted since `start` and depend on `inner`, the inputs of the body.

    Returns:
        Those of them that the `results` depend on, in order.
    """
    return take_nodes(e, depending(e.emitted[start:], inner), results)


def take_nodes(e: Emitter, moved: Sequence[ir.Node], results: Collection[ir.Value]) -> list[ir.Node]:
    """Remove nodes that were emitted from the graph; return those of them that the `results` depend on, in order."""
    removed = set(moved)
    e.forget(removed)
    e.graph.remove(moved)
    used: set[ir.Node] = set()
    todo = [v.producer() for v in results]
    while todo:
        node = todo.pop()
        if node is not None and node in removed and node not in used:
            used.add(node)
            todo += [v.producer() for v in _operands(node)]
    body = [node for node in moved if node in used]
    for node in body:
        node.name = e.names.claim("inner_node")
        name_inner_values(e, node)
    for node in moved:
        if node not in used:
            release(node)
    return body


def name_inner_values(e: Emitter, node: ir.Node) -> None:
    """Give the results of a node of a body names that no graph around it uses, nor gives later."""
    for value in node.outputs:
        value.name = e.names.claim("inner")


def emit_loop(
    e: Emitter,
    start: int,
    states: Sequence[Carried],
    scanned: Mapping[ir.Value, Slices],
    made: Sequence[tuple[ir.Value, Layout]],
    *,
    also: Collection[ir.Value] = (),
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Emit a Scan whose body are the nodes emitted since `start` that depend on its inputs.

    The Scan reads and joins slices along first axes alone. For other axes a Transpose stands before or behind it: see
    quirks.SCAN_OF_EMPTY_SLICES.

    Args:
        e: The emitter.
        start: Number of nodes emitted before those of the body.
        states: The carried values.
        scanned: Inputs of the body -> what they are slices of; all but one may be unused, and are then left out.
        made: Values of the body whose slices are joined.
        also: Further values that the nodes of a body depend on; the results do not.

    Returns:
        The last states, and the joined values.
    """
    inner = [*(s.inner for s in states), *scanned]
    asked, made = made, list(dict.fromkeys(made))
    results = [*(s.next for s in states), *(v for v, _ in made)]
    body = take_body(e, start, {*inner, *also}, results)
    outputs = _outputs_of(e, body, results)
    for output, state in zip(outputs, states, strict=False):
        if output.shape is None:
            output.shape = state.inner.shape
    unknown = next((v for v in outputs if v.shape is None), None)  # ONNX Runtime's Scan needs the rank
    require(unknown is None, f"the rank of {unknown.name if unknown else ''!r} in its body is not known.")
    used = {v: s for v, s in scanned.items() if v.uses()} or dict(itertools.islice(scanned.items(), 1))
    graph = ir.Graph([*(s.inner for s in states), *used], outputs, nodes=body, name="turn")
    operands = [_along_first_axis(e, s) for s in used.values()]
    attributes = [
        ir.AttrGraph("body", graph),
        ir.AttrInt64("num_scan_inputs", len(used)),
        *_attributes("scan_input", [s.layout for s in operands]),
        *_attributes("scan_output", [replace(layout, axis=0) for _, layout in made]),
    ]
    inputs = [*(s.first for s in states), *(s.whole for s in operands)]
    node = ir.Node("", "Scan", inputs, attributes, num_outputs=len(outputs))
    e.place(node)
    turns = turns_of(next(iter(used.values())))
    finals, joined = list(node.outputs[: len(states)]), list(node.outputs[len(states) :])
    for final, state in zip(finals, states, strict=True):
        e.typed(final, state.first)
    for place, (value, layout) in enumerate(made):
        whole = e.typed(joined[place], value)
        whole.shape = joined_shape(value, 0, turns)
        joined[place] = e.move_axis(whole, 0, layout.axis)
    return finals, [joined[made.index(wanted)] for wanted in asked]


def _along_first_axis(e: Emitter, slices: Slices) -> Slices:
    """Slices moved to the first axis, if the rank is known."""
    if slices.whole.shape is None or slices.layout.axis == 0:
        return slices
    return Slices(e.move_axis(slices.whole, slices.layout.axis, 0), replace(slices.layout, axis=0))


def emit_sums(
    e: Emitter, start: int, scanned: Mapping[ir.Value, Slices], terms: Sequence[tuple[ir.Value, ir.Value]]
) -> list[ir.Value]:
    """Emit a loop as `emit_loop` does, which adds up `terms`: zeros, made outside of the body, and a value of the body."""
    states = []
    for zeros, term in terms:
        inner = placeholder(e, term, zeros.shape)
        states.append(Carried(zeros, inner, e.typed(e.add(inner, term), zeros)))
    return emit_loop(e, start, states, scanned, [])[0] if states else []


def emit_repeat(
    e: Emitter,
    start: int,
    most: int,
    states: Sequence[Carried],
    *,
    number: ir.Value | None = None,
    going: ir.Value | None = None,
) -> list[ir.Value]:
    """Emit a Loop whose body are the nodes emitted since `start` that depend on its inputs.

    Args:
        e: The emitter.
        start: Number of nodes emitted before those of the body.
        most: The most turns.
        states: The carried values.
        number: The input of the body with the number of the turn, int64 of rank 0, if it is used.
        going: A bool of the body: whether another turn follows.

    Returns:
        The last states.
    """
    turn = number or ir.Value(name=e.names.claim("turn"), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    before = ir.Value(name=e.names.claim("turn"), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    inputs, results = [turn, before, *(s.inner for s in states)], [going or before, *(s.next for s in states)]
    body = take_body(e, start, inputs, results)
    outputs = _outputs_of(e, body, results)
    graph = ir.Graph(inputs, outputs, nodes=body, name="turn")
    operands = [e.const(np.int64(most)), e.const(np.ones((), np.bool_)), *(s.first for s in states)]
    node = ir.Node("", "Loop", operands, [ir.AttrGraph("body", graph)], num_outputs=len(states))
    e.place(node)
    return [e.typed(last, state.first) for last, state in zip(node.outputs, states, strict=True)]


def _outputs_of(e: Emitter, body: list[ir.Node], results: Sequence[ir.Value]) -> list[ir.Value]:
    """The outputs of a body: the results, through added Identity nodes where the body does not compute them itself."""
    produced = {v for node in body for v in node.outputs}
    outputs: list[ir.Value] = []
    for value in results:
        if value not in produced or value in outputs:  # an input, a value of the outer graph, or an output already
            name = e.names.claim("inner")
            body.append(ir.node("Identity", [value], outputs=[ir.Value(name=name)], name=name))
            outputs.append(e.typed(body[-1].outputs[0], value))
        else:
            outputs.append(value)
    return outputs


def _attributes(kind: str, layouts: Sequence[Layout]) -> list[ir.Attr]:
    """The attributes for the axes and directions of scanned operands or results, where they are not the defaults."""
    named = {"axes": [x.axis for x in layouts], "directions": [int(x.backwards) for x in layouts]}
    return [ir.AttrInt64s(f"{kind}_{name}", numbers) for name, numbers in named.items() if any(numbers)]


def turns_of(slices: Slices) -> int | ir.SymbolicDim:
    """The number of slices."""
    shape = slices.whole.shape
    return ir.SymbolicDim(None) if shape is None else shape[slices.layout.axis]


def joined_shape(value: ir.Value, axis: int, turns: int | ir.SymbolicDim) -> ir.Shape | None:
    """The shape of the slices `value` of all turns, joined along a new axis."""
    if value.shape is None:
        return None
    sizes = list(value.shape)
    sizes.insert(axis % (len(sizes) + 1), turns)
    return ir.Shape(sizes)


BranchNodes = tuple[Sequence[ir.Node], Sequence[ir.Value]]
"""Nodes that were emitted and forgotten, and the results of a branch."""


def emit_if(
    e: Emitter, condition: ir.Value, then: BranchNodes, other: BranchNodes, likes: Sequence[ir.Value]
) -> list[ir.Value]:
    """Emit an If with these two branches; its results have the dtypes and shapes of `likes`."""
    branches = []
    for name, (nodes, results) in (("then_branch", then), ("else_branch", other)):
        start = len(e.emitted)
        outputs = []
        for result in results:  # each output of a branch is a value of its own
            e.place(ir.Node("", "Identity", [result], num_outputs=1))
            outputs.append(e.typed(e.emitted[-1].outputs[0], result))
        body = take_nodes(e, [*nodes, *e.emitted[start:]], outputs)
        branches.append(ir.AttrGraph(name, ir.Graph([], outputs, nodes=body, name=name)))
    node = ir.Node("", "If", [condition], branches, num_outputs=len(likes))
    e.place(node)
    return [e.typed(value, like) for value, like in zip(node.outputs, likes, strict=True)]


def emit_scan(e: Emitter, body: ir.Graph, operands: Sequence[ir.Value], scanned: int) -> ir.Value:
    """Emit a Scan with one result; the body gets the last `scanned` operands slice by slice."""
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", scanned)]
    node = ir.Node("", "Scan", operands, attributes, num_outputs=1)
    e.place(node)
    result = node.outputs[0]
    result.dtype = body.outputs[0].dtype or ir.DataType.FLOAT
    return result
