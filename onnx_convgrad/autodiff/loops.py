"""Scan of any length, differentiated by a second Scan.

    s[t + 1], z[t] = f(s[t], x[t], c)    for t = 0 .. T - 1, with values c of the outer graph

Reverse mode runs from the last turn to the first with the cotangent of s, and gives that of each x[t]:

    gs[t], gx[t], gc[t] = f'(gs[t + 1], gz[t])

Forward mode runs a Scan over the tangents in the order of the turns. One turn is emitted into the graph on placeholders and
differentiated there by the walk; what depends on the placeholders then moves into the body of the new Scan, and what does
not, such as the transpose of a weight, is computed once.

The new body needs s[t], x[t] and values from inside f. Results of products, reductions, transcendental and random functions
become results of the forward Scan, which is extended in place; elementwise functions and sizes are computed again.

gc is the sum over the turns. If gc[t] is a product a[t]' g[t] of matrices, as for a weight, then a and g of all turns are
joined and multiplied once. Other contributions are added up from turn to turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.accumulate import rows_multiplied
from onnx_convgrad.autodiff.activity import Activity, ancestors, carriers, floating, rule_of
from onnx_convgrad.autodiff.forward import forward
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.loop_bodies import (
    Layout,
    Slices,
    State,
    depending,
    emit_loop,
    emit_once,
    joined_shape,
    placeholder,
    turns_of,
)
from onnx_convgrad.ir.nodes import captured_values, is_op
from onnx_convgrad.ir.shape_hints import input_shape_option
from onnx_convgrad.ir.writer import RANDOM

Pairs = list[tuple[ir.Value, ir.Value]]

_STORED = frozenset(
    "Acos Acosh Asin Asinh Atan Atanh Celu Conv ConvTranspose Cos Cosh CumSum Einsum Elu Erf Exp Gelu Gemm GRU"
    " InstanceNormalization LayerNormalization Log LogSoftmax LSTM MatMul Mish Pow ReduceL1 ReduceL2 ReduceLogSum"
    " ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare RNN Selu Sigmoid Sin Sinh Softmax"
    " Softplus Sqrt Tan Tanh TopK".split()
)
"""Operators whose results the forward Scan gives out, because they take longer to compute again."""


def scan_reverse(e: Emitter, n: Call, upstream: Mapping[ir.Value, ir.Value], wanted: Collection[ir.Value]) -> Pairs:
    """The contributions to the cotangents of the `wanted` operands and captured values of a Scan."""
    turn = _Turn(e, n)
    count = len(turn.states)
    targets = [r for r, z in zip(turn.results[count:], n.node.outputs[count:], strict=False) if z in upstream]
    live = turn.reaching(targets, {j for j in range(count) if n.node.outputs[j] in upstream})
    outer = turn.outer_varied([v for v in captured_values(n.node) if v in wanted])
    slices = [i for i, x in enumerate(turn.sequences) if x.whole in wanted and floating(x.whole)]
    moving = turn.moving({j for j, v in enumerate(turn.first) if v in wanted and floating(v)}, slices, outer)
    carried = [j for j in sorted(live) if j in moving]

    seeds: dict[ir.Value, ir.Value] = {}
    scanned: dict[ir.Value, Slices] = {}
    inner: dict[int, ir.Value] = {}

    def seed(result: ir.Value) -> ir.Value:
        g = turn.input(result, result.shape)
        seeds[result] = e.add(seeds[result], g) if result in seeds else g
        return g

    for j in carried:
        inner[j] = seed(turn.results[j])
    for result, z, layout in zip(turn.results[count:], n.node.outputs[count:], turn.made, strict=False):
        if z in upstream:
            scanned[seed(result)] = Slices(upstream[z], layout.turned())
    sources = [*(turn.states[j] for j in carried), *(turn.slices[i] for i in slices), *outer]
    held = {*turn.states, *turn.slices, *turn.boundary} - {*sources}
    cotangents = backward(e, seeds, sources, partial=True, held=held)

    states = []
    for j in carried:
        g, last = inner[j], n.node.outputs[j]
        first = upstream[last] if last in upstream else e.zeros_like(last)
        states.append(State(first, g, cotangents.get(turn.states[j]) or e.zeros_like(g)))
    made = [(i, cotangents[turn.slices[i]]) for i in slices if turn.slices[i] in cotangents]
    sums = _Sums(turn, {v: cotangents[v] for v in outer if v in cotangents})
    outputs = [(g, turn.sequences[i].layout.turned()) for i, g in made]
    factors = [v for v in sums.factors if turn.rows(v) is None]
    outputs += [(v, Layout(0, backwards=True)) for v in factors]
    finals, joined = turn.loop([*states, *sums.states], scanned, outputs, backwards=True)

    pairs = [(turn.first[j], e.typed(g, turn.first[j])) for j, g in zip(carried, finals, strict=False)]
    for (i, _), g in zip(made, joined, strict=False):
        pairs.append((turn.sequences[i].whole, e.typed(g, turn.sequences[i].whole)))
    totals = sums.totals(finals[len(states) :], dict(zip(factors, joined[len(made) :], strict=True)))
    captured = dict.fromkeys(v for v in captured_values(n.node) if v in wanted)
    return [*pairs, *backward(e, totals, captured, partial=True).items()]


def scan_forward(e: Emitter, n: Call, tangents: Mapping[ir.Value, ir.Value]) -> Pairs:
    """The tangents of the results of a Scan."""
    turn = _Turn(e, n)
    count = len(turn.states)
    captured = {v: tangents[v] for v in captured_values(n.node) if v in tangents}
    outer = forward(e, captured, turn.boundary) if captured else {}
    slices = [i for i, x in enumerate(turn.sequences) if x.whole in tangents]
    moving = turn.moving({j for j, v in enumerate(turn.first) if v in tangents}, slices, outer)
    pushed = dict(outer)
    scanned: dict[ir.Value, Slices] = {}
    for i in slices:
        x = turn.slices[i]
        pushed[x] = turn.input(x, x.shape)
        scanned[pushed[x]] = Slices(tangents[turn.sequences[i].whole], turn.sequences[i].layout)
    inner = {j: turn.input(turn.states[j], turn.states[j].shape) for j in sorted(moving)}
    pushed.update((turn.states[j], t) for j, t in inner.items())
    reached = forward(e, pushed, list(dict.fromkeys(turn.results)))
    states = []
    for j, t in inner.items():
        v = turn.first[j]
        first = tangents[v] if v in tangents else e.zeros_like(v)
        states.append(State(first, t, reached.get(turn.results[j]) or e.zeros_like(t)))
    varied = [k for k in range(count, len(turn.results)) if turn.results[k] in reached]
    varied = [k for k in varied if k < len(n.node.outputs) and floating(n.node.outputs[k])]
    outputs = [(reached[turn.results[k]], turn.made[k - count]) for k in varied]
    finals, joined = turn.loop(states, scanned, outputs, backwards=False)
    results = zip([*inner, *varied], [*finals, *joined], strict=True)
    return [(n.node.outputs[k], e.typed(t, n.node.outputs[k])) for k, t in results]


class _Turn:
    """One turn of a Scan, emitted into the graph on placeholders for the carried values and for the slices."""

    def __init__(self, e: Emitter, n: Call) -> None:
        self.e, self.node, self.body = e, n.node, n.node.attributes["body"].as_graph()
        operands = [v for v in n.inputs if v is not None]
        count = len(operands) - n.int("num_scan_inputs", 0)
        self.first = operands[:count]
        self.sequences = [
            Slices(v, layout)
            for v, layout in zip(operands[count:], layouts(n, "scan_input", operands[count:]), strict=True)
        ]
        self.made = layouts(n, "scan_output", n.node.outputs[count:])
        self.start = len(e.emitted)
        self.inputs: list[ir.Value] = []
        self.states = [
            self.input(v, own.shape if v.shape is None else v.shape)
            for v, own in zip(self.first, self.body.inputs, strict=False)
        ]
        self.slices = [
            self.input(x.whole, own.shape if x.whole.shape is None else _slice_shape(x))
            for x, own in zip(self.sequences, self.body.inputs[count:], strict=True)
        ]
        values: dict[ir.Value, ir.Value] = {}
        self.results = emit_once(e, self.body, [*self.states, *self.slices], values)
        inner = self.nodes()
        made = {v for node in inner for v in node.outputs}
        self.in_body = {emitted: own for own, emitted in reversed(values.items()) if emitted in made}
        own = {*made, *self.states, *self.slices}
        read = (v for node in inner for v in node.inputs if v is not None)
        self.boundary = [v for v in dict.fromkeys((*read, *self.results)) if v not in own and floating(v)]
        self._symbols = {d.value for v in (*self.states, *self.slices, *self.boundary) for d in _unknown(v) if d.value}

    def input(self, like: ir.Value, shape: ir.Shape | None) -> ir.Value:
        """A placeholder for an input of the body, with the dtype of `like`."""
        self.inputs.append(placeholder(self.e, like, shape))
        return self.inputs[-1]

    def nodes(self) -> dict[ir.Node, None]:
        """The nodes emitted so far that depend on the inputs of the body."""
        return dict.fromkeys(depending(self.e.emitted[self.start :], self.inputs))

    # -- which values carry derivatives --------------------------------------------------------------------------------

    def reaching(self, targets: Sequence[ir.Value], live: set[int]) -> set[int]:
        """The states that targets of a later turn depend on; `live` are those whose last value is a target itself."""
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

    def is_matrix(self, value: ir.Value) -> bool:
        """Whether the value has two axes, of the same sizes in all turns."""
        return value.shape is not None and len(value.shape) == 2 and self.same_in_all_turns(value)

    def kept(self, value: ir.Value) -> Slices | None:
        """The values of all turns, if they are an operand of the Scan or given out by it."""
        if value in self.slices:
            return self.sequences[self.slices.index(value)]
        if value in self.states:
            return self._given_out(self.body.inputs[self.states.index(value)], value)
        node = value.producer()
        if value not in self.in_body or node is None or node.op_type not in _STORED | RANDOM:
            return None
        same = self.same_in_all_turns(value)
        require(
            same or node.op_type not in RANDOM, f"its body contains {node.op_type}, whose result has no known shape."
        )
        return self._given_out(self.in_body[value], value) if same else None

    def rows(self, value: ir.Value) -> ir.Value | None:
        """The `kept` values of all turns, if they are joined in order along the first axis."""
        kept = self.kept(value)
        return kept.whole if kept is not None and kept.layout == Layout() else None

    def _given_out(self, own: ir.Value, like: ir.Value) -> Slices:
        """A value of the body as a result of the Scan, which is extended by it if it has no such result."""
        count = len(self.states)
        for whole, output, layout in zip(self.node.outputs[count:], self.body.outputs[count:], self.made, strict=True):
            copy = output.producer()
            if output is own or (is_op(copy, "Identity") and copy.inputs[0] is own):
                return Slices(whole, layout)
        if own in self.body.outputs or own.producer() is None:
            name = self.e.names.claim("kept")
            self.body.append(ir.node("Identity", [own], outputs=[ir.Value(name=name)], name=name))
            own = self.e.typed(self.body[-1].outputs[0], like)
        self.body.outputs.append(own)
        self.made.append(Layout())
        for kind in ("axes", "directions"):
            numbers = self.node.attributes.get(f"scan_output_{kind}")
            if numbers is not None:
                self.node.attributes[numbers.name] = ir.AttrInt64s(numbers.name, [*numbers.as_ints(), 0])
        self.node.resize_outputs(len(self.node.outputs) + 1)
        whole = self.e.typed(self.node.outputs[-1], like)
        whole.shape = joined_shape(like, 0, turns_of(self.sequences[0]))
        whole.name = self.e.names.claim(f"{self.node.outputs[0].name}_turns")
        return Slices(whole)

    # -- the new Scan --------------------------------------------------------------------------------------------------

    def loop(
        self,
        states: Sequence[State],
        scanned: Mapping[ir.Value, Slices],
        made: Sequence[tuple[ir.Value, Layout]],
        *,
        backwards: bool,
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Move what the results need into a Scan; see `emit_loop`. `scanned` are inputs of the body besides this turn's."""
        needed, kept = self._needed([*(s.next for s in states), *(v for v, _ in made)])
        private = sorted({node.op_type for node in needed if node.domain == DOMAIN})
        require(
            not private,
            f"its body needs {', '.join(private)}, which is not computed in loops.",
            hint=f"Give the sizes of all inputs, cotangents included, as with {input_shape_option(self.e.graph.inputs)}: a"
            " Scan of few turns is unrolled.",
        )
        stand_ins: dict[ir.Value, ir.Value] = {}
        slices = {}
        for value, whole in kept.items():
            own = value in self.states or value in self.slices
            stand_ins[value] = inner = value if own else self.input(value, value.shape)
            slices[inner] = Slices(whole.whole, whole.layout.turned() if backwards else whole.layout)
            for use in [] if own else list(value.uses()):
                if use.node in needed or use.node.graph is not self.e.graph:
                    use.node.replace_input_with(use.idx, inner)
        if not slices and not scanned:  # only the number of turns matters
            slices[self.slices[0]] = self.sequences[0]
        ends = [State(s.first, s.inner, stand_ins.get(s.next, s.next)) for s in states]
        results = [(stand_ins.get(v, v), layout) for v, layout in made]
        return emit_loop(self.e, self.start, ends, {**scanned, **slices}, results, also=self.inputs)

    def _needed(self, results: Sequence[ir.Value]) -> tuple[set[ir.Node], dict[ir.Value, Slices]]:
        """The nodes of the new body, and the values that it reads from the forward Scan."""
        inner = self.nodes()
        needed: set[ir.Node] = set()
        kept: dict[ir.Value, Slices] = {}
        seen: set[ir.Value] = set()
        todo = list(results)
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            whole = self.kept(value)
            node = value.producer()
            if whole is not None:
                kept[value] = whole
            elif node is not None and node in inner and node not in needed:
                needed.add(node)
                todo += [v for v in (*node.inputs, *captured_values(node)) if v is not None]
        return needed, kept


class _Sums:
    """The sums over all turns of the cotangents of values of the outer graph.

    `factors` are the values of a turn that are multiplied for all turns at once, `states` the sums that are carried.
    """

    def __init__(self, turn: _Turn, cotangents: Mapping[ir.Value, ir.Value]) -> None:
        self.turn = turn
        self.products: list[tuple[ir.Value, ir.Value, ir.Value]] = []
        self.added: list[ir.Value] = []
        self.states: list[State] = []
        e, inner = turn.e, {*turn.inputs, *(v for node in turn.nodes() for v in node.outputs)}
        for value, cotangent in cotangents.items():
            rest = []
            for term in _terms(cotangent):
                pair = rows_multiplied(term)
                if pair is not None and all(v in inner and turn.is_matrix(v) for v in pair):
                    self.products.append((value, *pair))
                else:
                    rest.append(term)
            if rest:
                total = turn.input(value, value.shape)
                self.added.append(value)
                self.states.append(State(e.zeros_like(value), total, e.add(total, e.sum(rest))))
        self.factors = list(dict.fromkeys(v for _, *pair in self.products for v in pair))

    def totals(self, finals: Sequence[ir.Value], joined: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
        """The sum for each value, from the last of the `states` and the joined `factors`."""
        e = self.turn.e
        terms: dict[ir.Value, list[ir.Value]] = {}
        for value, total in zip(self.added, finals, strict=True):
            terms.setdefault(value, []).append(total)
        for value, *pair in self.products:
            left, right = (self._rows(v, joined) for v in pair)
            terms.setdefault(value, []).append(e.op("Gemm", left, right, transA=1))
        return {value: e.typed(e.sum(parts), value) for value, parts in terms.items()}

    def _rows(self, factor: ir.Value, joined: Mapping[ir.Value, ir.Value]) -> ir.Value:
        """The rows of a matrix in all turns, in the order of the turns."""
        e = self.turn.e
        whole = joined.get(factor) or self.turn.rows(factor)
        assert whole is not None
        size = e.size_mul(e.dim(whole, 0), e.dim(whole, 1))
        return e.reshape(whole, [size, e.dim(whole, 2)])


def _terms(value: ir.Value) -> list[ir.Value]:
    """The terms of a sum."""
    node = value.producer()
    if is_op(node, "Add") and all(v is not None and v.shape == value.shape for v in node.inputs):
        return [term for v in node.inputs if v is not None for term in _terms(v)]
    return [value]


def layouts(n: Call, kind: str, values: Sequence[ir.Value]) -> list[Layout]:
    """The layouts of the scanned operands (`scan_input`) or results (`scan_output`) of a Scan."""
    axes = n.ints(f"{kind}_axes") or [0] * len(values)
    directions = n.ints(f"{kind}_directions") or [0] * len(values)
    return [Layout(axis, bool(direction)) for axis, direction in zip(axes, directions, strict=True)]


def _slice_shape(x: Slices) -> ir.Shape | None:
    sizes = list(x.whole.shape or ())
    del sizes[x.layout.axis]
    return ir.Shape(sizes)


def _unknown(value: ir.Value) -> list[ir.SymbolicDim]:
    return [d for d in value.shape or () if not isinstance(d, int)]
