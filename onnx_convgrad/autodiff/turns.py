"""One turn of a Scan or Loop, emitted into the graph to be differentiated there, and what becomes the body of a Scan.

See `autodiff.loops`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import Activity, ancestors, carriers, floating, rule_of
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.errors import UnsupportedCase, require
from onnx_convgrad.ir.broadcasting import shapes_differ
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import (
    Carried,
    Layout,
    Slices,
    depending,
    draws,
    emit_if,
    emit_loop,
    emit_once,
    joined_shape,
    placeholder,
    turns_of,
)
from onnx_convgrad.ir.nodes import captured_values, is_op

Derivatives = dict[ir.Value, ir.Value]
T = TypeVar("T")


class Pullback:
    """The ordinary reverse walk. `autodiff.per_sample.control` has the one with a cotangent per sample."""

    def __init__(self, e: Emitter) -> None:
        self.e = e

    def __call__(
        self, cotangents: Mapping[ir.Value, ir.Value], sources: Collection[ir.Value], held: Collection[ir.Value] = ()
    ) -> Derivatives:
        """The cotangents of `sources` for the values in `cotangents`, if they depend on it; see `backward`."""
        return backward(self.e, cotangents, sources, partial=True, held=held)

    def like(self, value: ir.Value) -> ir.Value:
        """A value with the dtype and the shape of a cotangent of `value`."""
        return value

    def layout(self, value: ir.Value, layout: Layout) -> Layout:  # noqa: ARG002
        """The layout of the cotangents of all turns that belongs to the value of one turn."""
        return layout

    def zeros(self, value: ir.Value) -> ir.Value:
        """The cotangent zero of `value`."""
        return self.e.zeros_like(value)

    def enter_branch(self, results: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
        """Get ready for a branch of an If, which was emitted into the graph: `results` there are `outputs` of the node."""

    def enter_turn(self, turn: Turn) -> None:
        """Get ready for a turn of a loop, which was emitted into the graph."""


class Turn:
    """One turn of a Scan or Loop, emitted into the graph on placeholders for the carried values and for the slices.

    A Loop is taken for a Scan over the numbers of its turns, which it gives out.
    """

    def __init__(self, e: Emitter, n: Call) -> None:
        self.e, self.node, self.body = e, n.node, n.node.attributes["body"].as_graph()
        self.start = len(e.emitted)
        self.inputs: list[ir.Value] = []
        self.is_loop = n.node.op_type == "Loop"
        operands = [v for v in n.node.inputs[2 if self.is_loop else 0 :] if v is not None]
        count = len(operands) - n.int("num_scan_inputs", 0)
        self.first = operands[:count]
        self._own_outputs = list(self.body.outputs)[1 + count if self.is_loop else count :]
        self.made = layouts(n, "scan_output", self._own_outputs)
        own = list(self.body.inputs[2:] if self.is_loop else self.body.inputs)
        self._own_states = own[:count]
        self.states = [
            self.input(v, _anonymous(body.shape) if v.shape is None else v.shape)
            for v, body in zip(self.first, own, strict=False)
        ]
        values: dict[ir.Value, ir.Value] = {}
        self.conditions: list[ir.Value] = []
        if self.is_loop:
            self._turns: int | ir.SymbolicDim = ir.SymbolicDim(None)
            number = ir.Value(shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
            self.slices = [self.input(number, number.shape)]
            self.sequences = [self._given_out(self.body.inputs[0], number)]
            going = e.const(np.ones((), np.bool_))
            condition, *self.results = emit_once(e, self.body, [*self.slices, going, *self.states], values)
            self.conditions = [condition]
            self._check_states()
        else:
            whole = zip(operands[count:], layouts(n, "scan_input", operands[count:]), strict=True)
            self.sequences = [Slices(v, layout) for v, layout in whole]
            self._turns = turns_of(self.sequences[0])
            self.slices = [
                self.input(x.whole, _anonymous(body.shape) if x.whole.shape is None else _slice_shape(x))
                for x, body in zip(self.sequences, own[count:], strict=True)
            ]
            self.results = emit_once(e, self.body, [*self.states, *self.slices], values)
        inner = self.nodes()
        made = {v for node in inner for v in node.outputs}
        self.in_body = {emitted: own for own, emitted in reversed(values.items()) if emitted in made}
        self._forward = inner
        inside = {*made, *self.states, *self.slices}
        read = (v for node in inner for v in (*node.inputs, *captured_values(node)) if v is not None)
        self.boundary = [v for v in dict.fromkeys((*read, *self.results)) if v not in inside and floating(v)]
        self._symbols = {d.value for v in (*self.states, *self.slices, *self.boundary) for d in _unknown(v) if d.value}

    def _check_states(self) -> None:
        """Refuse states that cannot be joined over the turns; one that nothing but itself depends on may grow."""
        for j, (first, result) in enumerate(zip(self.first, self.results, strict=False)):
            require(not isinstance(first.type, ir.SequenceType), f"its state {first.name!r} is a sequence.")
            if _resized(first, result) and (floating(first) or self._is_read(j)):
                raise UnsupportedCase(
                    f"its state {first.name!r} changes its shape from turn to turn, from {first.shape} to"
                    f" {result.shape}, so that the states of all turns cannot be joined.",
                    hint="Let the number of turns be a constant (input_values=, --input-value, for an input), so that the "
                    "loop is written out; or carry a tensor of the final size, and write into it with ScatterND.",
                )

    def _is_read(self, j: int) -> bool:
        """Whether other results than its own depend on a state."""
        others = [*self.results[:j], *self.results[j + 1 :], *self.conditions]
        nodes = ancestors(others, self.e.order, stop=self.states)
        return (
            any(self.states[j] in (*node.inputs, *captured_values(node)) for node in nodes) or self.states[j] in others
        )

    def input(self, like: ir.Value, shape: ir.Shape | None) -> ir.Value:
        """A placeholder for an input of the body, with the dtype of `like`."""
        self.inputs.append(placeholder(self.e, like, shape))
        return self.inputs[-1]

    def nodes(self) -> dict[ir.Node, None]:
        """The nodes emitted so far that depend on the inputs of the body."""
        return dict.fromkeys(depending(self.e.emitted[self.start :], self.inputs))

    # -- which values carry derivatives --------------------------------------------------------------------------------

    def reaching(self, targets: Sequence[ir.Value], live: set[int]) -> set[int]:
        """The states that `targets` of a later turn depend on; the last values of those in `live` are differentiated."""
        while True:
            ends = [*targets, *(self.results[j] for j in live)]
            nodes = ancestors(ends, self.e.order, stop=self.boundary)
            reached = {*ends, *(v for node in nodes for _, v in carriers(node, rule_of(node)))}
            more = {j for j, s in enumerate(self.states) if s in reached and floating(s)} - live
            if not more:
                return live
            live = live | more

    def moving(self, moving: set[int], slices: Iterable[int], outer: Iterable[ir.Value]) -> set[int]:
        """The states that depend on the given states, slices or values of the outer graph, in any turn."""
        others = [*(self.slices[i] for i in slices), *outer]
        while True:
            sources = {*others, *(self.states[j] for j in moving)}
            held = {*self.boundary, *self.states, *self.slices} - sources
            varied = Activity.between(sources, self.results, self.e.order, partial=True, held=held).varied
            more = {j for j, s in enumerate(self.states) if floating(s) and self.results[j] in varied} - moving
            if not more:
                return moving
            moving = moving | more

    def outer_varied(self, captured: Sequence[ir.Value]) -> list[ir.Value]:
        """The values of the outer graph that the turn reads and that depend on the captured ones."""
        varied = Activity.between(captured, self.boundary, self.e.order, partial=True).varied if captured else ()
        return [v for v in self.boundary if v in varied]

    # -- values of all turns -------------------------------------------------------------------------------------------

    def same_in_all_turns(self, value: ir.Value) -> bool:
        """Whether the shape is certainly the same in every turn, so that slices can be joined."""
        if value.shape is None:
            return False
        return all(d.value in self._symbols for d in _unknown(value))

    def can_join(self, value: ir.Value) -> bool:
        """Whether the value is a matrix of the same sizes in all turns; of no turn, ONNX Runtime knows static ones only."""
        if value.shape is None or len(value.shape) != 2 or not self.same_in_all_turns(value):
            return False
        return isinstance(value.shape[1], int) or not self.is_loop

    @cached_property
    def _stored(self) -> Collection[ir.Value]:
        """The results of this turn that take longer to compute again, once the derivatives have been emitted.

        ONNX Runtime's Loop joins the results of its turns in the end, its Scan writes them in place.
        """
        return costly(self.e, self._forward, passes=4 if self.is_loop else 2)

    def kept(self, value: ir.Value) -> Slices | None:
        """The values of all turns, if they are an operand of the Scan or given out by it."""
        if value in self.slices:
            return self.sequences[self.slices.index(value)]
        if value in self.states:
            return self._given_out(self._own_states[self.states.index(value)], value)
        node = value.producer()
        if node is None or not (draws(node) or value in self._stored):
            return None
        storable = value in self.in_body and self.same_in_all_turns(value)
        require(storable or not draws(node), f"its body contains {node.op_type}, whose random result cannot be kept.")
        return self._given_out(self.in_body[value], value) if storable else None

    def rows(self, value: ir.Value) -> ir.Value | None:
        """The `kept` values of all turns, if they are joined in order along the first axis."""
        kept = self.kept(value)
        return kept.whole if kept is not None and kept.layout == Layout() else None

    def _given_out(self, own: ir.Value, like: ir.Value) -> Slices:
        """A value of the body as a result of the Scan, which is extended by it if it has no such result."""
        count = len(self.states)
        for whole, output, layout in zip(self.node.outputs[count:], self._own_outputs, self.made, strict=True):
            copy = output.producer()
            if output is own or (is_op(copy, "Identity") and copy.inputs[0] is own):
                return Slices(whole, layout)
        if own in self.body.outputs or own.producer() is None:
            name = self.e.names.claim("kept")
            self.body.append(ir.node("Identity", [own], outputs=[ir.Value(name=name)], name=name))
            own = self.e.typed(self.body[-1].outputs[0], like)
        self.body.outputs.append(own)
        self._own_outputs.append(own)
        self.made.append(Layout())
        for kind in ("axes", "directions"):
            numbers = self.node.attributes.get(f"scan_output_{kind}")
            if numbers is not None:
                self.node.attributes[numbers.name] = ir.AttrInt64s(numbers.name, [*numbers.as_ints(), 0])
        self.node.resize_outputs(len(self.node.outputs) + 1)
        whole = self.e.typed(self.node.outputs[-1], like)
        whole.shape = joined_shape(like, 0, self._turns)
        whole.name = self.e.names.claim(f"{self.node.outputs[0].name}_turns")
        return Slices(whole)

    # -- the new Scan --------------------------------------------------------------------------------------------------

    def loop(
        self,
        states: Sequence[Carried],
        scanned: Mapping[ir.Value, Slices],
        made: Sequence[tuple[ir.Value, Layout]],
        *,
        backwards: bool,
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Move what the results need into a Scan; see `emit_loop`. `scanned` are inputs of the body besides this turn's."""
        nodes, kept = needed([*(s.next for s in states), *(v for v, _ in made)], self.nodes(), self.kept)
        stand_ins: dict[ir.Value, ir.Value] = {}
        slices = {}
        for value, whole in kept.items():
            own = value in self.states or value in self.slices
            stand_ins[value] = inner = value if own else self.input(value, value.shape)
            slices[inner] = Slices(whole.whole, whole.layout.turned() if backwards else whole.layout)
            for use in [] if own else list(value.uses()):
                if use.node in nodes or use.node.graph is not self.e.graph:
                    use.node.replace_input_with(use.idx, inner)
        if not slices and not scanned:  # only the number of turns matters
            slices[self.slices[0]] = self.sequences[0]
        ends = [Carried(s.first, s.inner, stand_ins.get(s.next, s.next)) for s in states]
        results = [(stand_ins.get(v, v), layout) for v, layout in made]
        made_once = emit_loop(self.e, self.start, ends, {**scanned, **slices}, results, also=self.inputs)
        return self._unless_empty(ends, *made_once) if self.is_loop else made_once

    def _unless_empty(
        self, states: Sequence[Carried], finals: list[ir.Value], joined: list[ir.Value]
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """The results of the Scan just emitted, in an If: ONNX Runtime runs no Scan of no turn; see quirks.EMPTY_SCAN."""
        e = self.e
        loop = e.emitted[-1]
        e.forget([loop])
        start = len(e.emitted)
        firsts = [e.op("Identity", s.first) for s in states]
        nothing = [_no_slices(e, v) for v in joined]
        nodes = e.emitted[start:]
        e.forget(nodes)
        some = e.compare("Greater", e.op("Size", self.sequences[0].whole), 0)
        results = emit_if(e, some, ([loop], [*finals, *joined]), (nodes, [*firsts, *nothing]), [*finals, *joined])
        return results[: len(finals)], results[len(finals) :]


def needed(
    results: Iterable[ir.Value], inner: Collection[ir.Node], keep: Callable[[ir.Value], T | None]
) -> tuple[set[ir.Node], dict[ir.Value, T]]:
    """The nodes `inner` to a body that its results need, and what is kept of a forward body for values that they read."""
    nodes: set[ir.Node] = set()
    kept: dict[ir.Value, T] = {}
    seen: set[ir.Value] = set()
    todo = list(results)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        own, node = keep(value), value.producer()
        if own is not None:
            kept[value] = own
        elif node is not None and node in inner and node not in nodes:
            nodes.add(node)
            todo += [v for v in (*node.inputs, *captured_values(node)) if v is not None]
    return nodes, kept


def costly(e: Emitter, nodes: Mapping[ir.Node, None], passes: int) -> Collection[ir.Value]:
    """The results of the nodes of a body that the target stores; its derivative is all that else reads them."""
    if e.target.stored is None:
        return ()
    read = {v for node in nodes for v in node.outputs if any(use.node not in nodes for use in v.uses())}
    return e.target.stored(e.graph, nodes, read, passes)


def layouts(n: Call, kind: str, values: Sequence[ir.Value]) -> list[Layout]:
    """The layouts of the scanned operands (`scan_input`) or results (`scan_output`) of a Scan."""
    axes = n.ints(f"{kind}_axes") or [0] * len(values)
    directions = n.ints(f"{kind}_directions") or [0] * len(values)
    return [Layout(axis, bool(direction)) for axis, direction in zip(axes, directions, strict=True)]


def _slice_shape(x: Slices) -> ir.Shape | None:
    sizes = list(x.whole.shape or ())
    del sizes[x.layout.axis]
    return ir.Shape(sizes)


def _no_slices(e: Emitter, joined: ir.Value) -> ir.Value:
    """The joined slices of a loop without turns; unknown sizes are zero, as in the results of ONNX Runtime's Loop."""
    assert joined.shape is not None
    assert joined.dtype is not None
    sizes = [d if isinstance(d, int) else 0 for d in joined.shape[1:]]
    value = ir.tensor(np.zeros(1, joined.dtype.numpy()), joined.dtype)
    return e.op("ConstantOfShape", e.ints([0, *sizes]), value=value)


def _resized(before: ir.Value, after: ir.Value) -> bool:
    """Whether a state gets another shape in a turn: with other numbers, or with another expression of its symbols."""
    if before.shape is None or after.shape is None:
        return False
    return shapes_differ(before, after) or any(
        _differs(old, new) for old, new in zip(before.shape, after.shape, strict=True)
    )


def _differs(old: int | ir.SymbolicDim, new: int | ir.SymbolicDim) -> bool:
    if not isinstance(new, ir.SymbolicDim):
        return False
    if not isinstance(old, ir.SymbolicDim):
        return old == 0  # a state that begins empty
    if old.value is None or not old.free_symbols() <= new.free_symbols():
        return False
    symbols = sorted(new.free_symbols())
    upwards = {symbol: 7 + 2 * i for i, symbol in enumerate(symbols)}
    downwards = dict(zip(symbols, reversed(upwards.values()), strict=True))  # another one is the largest
    return all(old.evaluate(trial) != new.evaluate(trial) for trial in (upwards, downwards))


def _anonymous(shape: ir.Shape | None) -> ir.Shape | None:
    """A shape without the names of its sizes, which the body may share with other sizes of the outer graph."""
    return None if shape is None else ir.Shape([d if isinstance(d, int) else None for d in shape])


def _unknown(value: ir.Value) -> list[ir.SymbolicDim]:
    return [d for d in value.shape or () if not isinstance(d, int)]
