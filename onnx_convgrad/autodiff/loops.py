"""Scan and Loop of any length, differentiated by a second Scan.

    s[t + 1], z[t] = f(s[t], x[t], c)    for t = 0 .. T - 1, with values c of the outer graph

Reverse mode runs from the last turn to the first with the cotangent of s, and gives that of each x[t]:

    gs[t], gx[t], gc[t] = f'(gs[t + 1], gz[t])

Forward mode runs a Scan over the tangents in the order of the turns. One turn is emitted into the graph on placeholders and
differentiated there by the walk; what depends on the placeholders then moves into the body of the new Scan, and what does
not, such as the transpose of a weight, is computed once.

The new body needs s[t], x[t] and values from inside f. Those that take longer to compute again than to store
(`TargetInfo.stored`), and random numbers, become results of the forward Scan, which is extended in place. If a memory budget
asks for it, only s[t], x[t] and random numbers are kept.

gc is the sum over the turns. If gc[t] is a product a[t]' g[t] of matrices, as for a weight, then a and g of all turns are
joined and multiplied once. Other contributions are added up from turn to turn.

A Loop is a Scan over the numbers of the turns that it made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.accumulate import rows_multiplied
from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.autodiff.forward import forward
from onnx_convgrad.autodiff.reverse import Pairs
from onnx_convgrad.autodiff.turns import Pullback, Turn
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import Carried, Layout, Slices
from onnx_convgrad.ir.nodes import captured_values, is_op


def scan_reverse(
    e: Emitter,
    n: Call,
    upstream: Mapping[ir.Value, ir.Value],
    wanted: Collection[ir.Value],
    pull: Pullback | None = None,
) -> Pairs:
    """The contributions to the cotangents of the `wanted` operands and captured values of a Scan."""
    turn, pull = Turn(e, n), pull or Pullback(e)
    pull.enter_turn(turn)
    count = len(turn.states)
    targets = [r for r, z in zip(turn.results[count:], n.node.outputs[count:], strict=False) if z in upstream]
    live = turn.reaching(targets, {j for j in range(count) if n.node.outputs[j] in upstream})
    outer = turn.outer_varied([v for v in captured_values(n.node) if v in wanted])
    slices = [i for i, x in enumerate(turn.sequences) if x.whole in wanted and floating(x.whole)]
    moving = turn.moving({j for j, v in enumerate(turn.first) if v in wanted and floating(v)}, slices, outer)
    carried = [j for j in sorted(live) if j in moving]

    given: dict[ir.Value, ir.Value] = {}
    scanned: dict[ir.Value, Slices] = {}
    inner: dict[int, ir.Value] = {}

    def cotangent(result: ir.Value) -> ir.Value:
        like = pull.like(result)
        g = turn.input(like, like.shape)
        given[result] = e.add(given[result], g) if result in given else g
        return g

    for j in carried:
        inner[j] = cotangent(turn.results[j])
    for result, z, layout in zip(turn.results[count:], n.node.outputs[count:], turn.made, strict=False):
        if z in upstream:
            scanned[cotangent(result)] = Slices(upstream[z], pull.layout(z, layout.turned()))
    sources = [*(turn.states[j] for j in carried), *(turn.slices[i] for i in slices), *outer]
    held = {*turn.states, *turn.slices, *turn.boundary} - {*sources}
    cotangents = pull(given, sources, held)

    states = []
    for j in carried:
        g, last = inner[j], n.node.outputs[j]
        first = upstream[last] if last in upstream else pull.zeros(last)
        states.append(Carried(first, g, cotangents.get(turn.states[j]) or e.zeros_like(g)))
    made = [(i, cotangents[turn.slices[i]]) for i in slices if turn.slices[i] in cotangents]
    sums = _Sums(turn, pull, {v: cotangents[v] for v in outer if v in cotangents})
    outputs = [(g, pull.layout(turn.slices[i], turn.sequences[i].layout.turned())) for i, g in made]
    factors = [v for v in sums.factors if turn.rows(v) is None]
    outputs += [(v, Layout(0, backwards=True)) for v in factors]
    finals, joined = turn.loop([*states, *sums.states], scanned, outputs, backwards=True)

    pairs = [(turn.first[j], e.typed(g, pull.like(turn.first[j]))) for j, g in zip(carried, finals, strict=False)]
    for (i, _), g in zip(made, joined, strict=False):
        pairs.append((turn.sequences[i].whole, e.typed(g, pull.like(turn.sequences[i].whole))))
    totals = sums.totals(finals[len(states) :], dict(zip(factors, joined[len(made) :], strict=True)))
    captured = dict.fromkeys(v for v in captured_values(n.node) if v in wanted)
    return [*pairs, *pull(totals, captured).items()]


def scan_forward(e: Emitter, n: Call, tangents: Mapping[ir.Value, ir.Value]) -> Pairs:
    """The tangents of the results of a Scan."""
    turn = Turn(e, n)
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
        states.append(Carried(first, t, reached.get(turn.results[j]) or e.zeros_like(t)))
    varied = [k for k in range(count, len(turn.results)) if turn.results[k] in reached]
    varied = [k for k in varied if k < len(n.node.outputs) and floating(n.node.outputs[k])]
    outputs = [(reached[turn.results[k]], turn.made[k - count]) for k in varied]
    finals, joined = turn.loop(states, scanned, outputs, backwards=False)
    results = zip([*inner, *varied], [*finals, *joined], strict=True)
    return [(n.node.outputs[k], e.typed(t, n.node.outputs[k])) for k, t in results]


class _Sums:
    """The sums over all turns of the cotangents of values of the outer graph.

    `factors` are the values of a turn that are multiplied for all turns at once, `states` the sums that are carried.
    """

    def __init__(self, turn: Turn, pull: Pullback, cotangents: Mapping[ir.Value, ir.Value]) -> None:
        self.turn, self.pull = turn, pull
        self.products: list[tuple[ir.Value, ir.Value, ir.Value]] = []
        self.added: list[ir.Value] = []
        self.states: list[Carried] = []
        e, inner = turn.e, {*turn.inputs, *(v for node in turn.nodes() for v in node.outputs)}
        for value, cotangent in cotangents.items():
            rest = []
            for term in _terms(cotangent):
                pair = rows_multiplied(term)
                if pair is not None and all(v in inner and turn.can_join(v) for v in pair):
                    self.products.append((value, *pair))
                else:
                    rest.append(term)
            if rest:
                like = pull.like(value)
                total = turn.input(like, like.shape)
                self.added.append(value)
                self.states.append(Carried(pull.zeros(value), total, e.add(total, e.sum(rest))))
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
        return {value: e.typed(e.sum(parts), self.pull.like(value)) for value, parts in terms.items()}

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
