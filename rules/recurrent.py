"""RNN, GRU and LSTM: the recurrence as a Scan, or unrolled if it is short, with ONNX's names for the gates.

The products with x are one MatMul for all steps t. The operator itself stays in the forward part; only its gradient passes
through this expansion. A step beyond the `sequence_lens` of a sample keeps its state and outputs zeros. A sample without
any step ends with zeros instead of its initial state, as in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import Factors, mix
from onnx_convgrad.autodiff.registry import expansion
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.loop_bodies import Carried, Layout, Slices, emit_loop, placeholder
from onnx_convgrad.rules.control import is_long

Function = Callable[[Emitter, ir.Value], ir.Value]
Cell = Callable[["_Direction", ir.Value, "CellState"], "CellState"]


@dataclass(frozen=True, slots=True)
class CellState:
    """The state between two steps; `None` stands for zeros."""

    h: ir.Value | None
    c: ir.Value | None = None


# -- operators ---------------------------------------------------------------------------------------------------------


def _sequences(n: Call) -> Factors:
    """The steps t of a sequence depend on one another; b are samples and d directions."""
    x = ("b", "t", "i") if n.int("layout", 0) else ("t", "b", "i")
    state = ("b", "d", "h") if n.int("layout", 0) else ("d", "b", "h")
    y = ("b", "t", "d", "h") if n.int("layout", 0) else ("t", "d", "b", "h")
    operands = (x, ("d", "g", "i"), ("d", "g", "r"), ("d", "g"), ("b",), state, state, ("d", "g"))
    work = {"t": mix("steps along"), "g": mix("has gates along"), **dict.fromkeys("ihr", mix("weighs"))}
    return Factors(operands, (y, state, state)[: len(n.node.outputs)], work)


@expansion("RNN", wrt=("X", "W", "R", "B", "initial_h"), parameters=("W", "R", "B"), factors=_sequences)
def rnn(e: Emitter, n: Call) -> list[ir.Value | None]:
    """h[t] = f(x[t] W' + h[t-1] R' + b)."""
    return _expanded(e, n, 1, ("Tanh",), lambda d, x, s: CellState(d.functions[0](e, d.clipped(d.plus(x, s.h)))))


@expansion("GRU", wrt=("X", "W", "R", "B", "initial_h"), parameters=("W", "R", "B"), factors=_sequences)
def gru(e: Emitter, n: Call) -> list[ir.Value | None]:
    """z, r = f(x[t] W' + h[t-1] R' + b), h[t] = (1 - z) c + z h[t-1] with the candidate c = g(x[t] W' + (r h[t-1]) R' + b).

    With `linear_before_reset`, c = g(x[t] W' + r (h[t-1] R' + b)).
    """
    return _expanded(e, n, 3, ("Sigmoid", "Tanh"), _gru_cell)


@expansion(
    "LSTM", wrt=("X", "W", "R", "B", "initial_h", "initial_c", "P"), parameters=("W", "R", "B", "P"), factors=_sequences
)
def lstm(e: Emitter, n: Call) -> list[ir.Value | None]:
    """c[t] = f c[t-1] + i g(...), h[t] = o h(c[t]); the peepholes P add a multiple of the cell to the gates i, o and f."""
    return _expanded(e, n, 4, ("Sigmoid", "Tanh", "Tanh"), _lstm_cell)


# -- one step ----------------------------------------------------------------------------------------------------------


def _gru_cell(d: _Direction, x: ir.Value, state: CellState) -> CellState:
    e, (f, g), h = d.e, d.functions, state.h
    xzr, xc = e.ops("Split", x, e.ints([2 * d.hidden, d.hidden]), outputs=2, axis=-1)
    z, r = d.split(f(e, d.clipped(d.plus(xzr, h, 0, 2))), 2)
    if d.linear_before_reset:
        inner = d.inner(h)
        total = xc if inner is None else e.add(xc, e.mul(r, inner))
    else:
        total = d.plus(xc, None if h is None else e.mul(r, h), 2, 3)
    new = e.mul(e.sub(1, z), g(e, d.clipped(total)))
    return CellState(new if h is None else e.add(new, e.mul(z, h)))


def _lstm_cell(d: _Direction, x: ir.Value, state: CellState) -> CellState:
    e, (f, g, h), c = d.e, d.functions, state.c
    total, alike = d.plus(x, state.h), d.p is None and not d.input_forget
    if alike:  # one function for all three gates
        gates, new = e.ops("Split", total, e.ints([3 * d.hidden, d.hidden]), outputs=2, axis=-1)
        i, o, keep = d.split(f(e, d.clipped(gates)), 3)
    else:
        i, o, keep, new = d.split(total, 4)
        i = f(e, d.clipped(d.peep(i, c, 0)))
        keep = e.sub(1, i) if d.input_forget else f(e, d.clipped(d.peep(keep, c, 2)))
    new = g(e, d.clipped(new))
    cell = e.mul(i, new) if c is None else e.add(e.mul(keep, c), e.mul(i, new))
    if not alike:
        o = f(e, d.clipped(d.peep(o, cell, 1)))
    return CellState(e.mul(o, h(e, cell)), cell)


# -- one direction -----------------------------------------------------------------------------------------------------


class _Direction:
    """Direction `d` of a node: its cell, and the weights W [gates * hidden, input] and R [gates * hidden, hidden]."""

    def __init__(self, e: Emitter, n: Call, d: int, gates: int, functions: Sequence[Function], cell: Cell) -> None:
        hidden = e.dim(n["R"], 2)
        require(isinstance(hidden, int), "the shape of its weights is not known.")
        assert isinstance(hidden, int)
        self.e, self.hidden, self.functions, self.cell = e, hidden, functions, cell
        self.w, self.r, bias = _at(e, n["W"], d), _at(e, n["R"], d), _of_direction(e, n.get("B"), d)
        size = gates * hidden
        self.wb, self.rb = (
            None if bias is None else e.slice(bias, [begin], [begin + size], [0]) for begin in (0, size)
        )
        self.p = _of_direction(e, n.get("P"), d)
        self.clip = n.float("clip", 0.0)
        self.linear_before_reset = bool(n.int("linear_before_reset", 0))
        self.input_forget = bool(n.int("input_forget", 0))

    def _products(self, x: ir.Value) -> ir.Value:
        """`x W' + b` of all steps. b includes the bias of R, except for a product that a gate multiplies."""
        e = self.e
        total = e.matmul(x, e.swap_last(self.w))
        bias = self.wb
        if bias is not None and self.rb is not None:
            extra = self.rb
            if self.linear_before_reset:
                extra = e.pad(e.slice(extra, [0], [2 * self.hidden], [0]), [0], [self.hidden], [0])
            bias = e.add(bias, extra)
        return total if bias is None else e.add(total, bias)

    def plus(self, x: ir.Value, h: ir.Value | None, first: int = 0, last: int | None = None) -> ir.Value:
        """`x + h R'` for the gates from `first` up to `last`."""
        return x if h is None else self.e.add(x, self._product(h, first, last))

    def inner(self, h: ir.Value | None) -> ir.Value | None:
        """`h R' + b` of the last gate, which GRU's reset gate multiplies."""
        e = self.e
        bias = None if self.rb is None else e.slice(self.rb, [2 * self.hidden], [3 * self.hidden], [0])
        if h is None:
            return bias
        product = self._product(h, 2, 3)
        return product if bias is None else e.add(product, bias)

    def _product(self, h: ir.Value, first: int, last: int | None) -> ir.Value:
        r = self.r if last is None else self.e.slice(self.r, [first * self.hidden], [last * self.hidden], [0])
        return self.e.matmul(h, self.e.swap_last(r))

    def split(self, value: ir.Value, parts: int) -> list[ir.Value]:
        return list(self.e.ops("Split", value, outputs=parts, axis=-1, num_outputs=parts))

    def peep(self, gate: ir.Value, cell: ir.Value | None, which: int) -> ir.Value:
        if self.p is None or cell is None:
            return gate
        weight = self.e.slice(self.p, [which * self.hidden], [(which + 1) * self.hidden], [0])
        return self.e.add(gate, self.e.mul(weight, cell))

    def clipped(self, value: ir.Value) -> ir.Value:
        if not self.clip:
            return value
        return self.e.op("Clip", value, self.e.scalar(-self.clip, value), self.e.scalar(self.clip, value))

    # -- steps -------------------------------------------------------------------------------------------------------

    def steps(
        self, x: ir.Value, state: CellState, lengths: ir.Value | None, *, reverse: bool
    ) -> tuple[ir.Value, CellState]:
        """The states h of all steps `[steps, batch, hidden]`, in the order of x, and the last state."""
        e, count = self.e, self.e.dim(x, 0)
        ends = lengths if reverse else None  # where each sample begins
        backwards = reverse and ends is None
        products = self._products(x if ends is None else _reversed(e, x, ends))
        running = None
        if lengths is not None:  # whether step t is inside of each sample, [steps, batch, 1]
            times = e.unsqueeze(e.arange(count), [1, 2])
            running = e.compare("Greater", e.unsqueeze(e.cast(lengths, ir.DataType.INT64), [1]), times)
        if isinstance(count, int) and not is_long(count):
            result, last = self._unrolled(products, running, state, count, backwards=backwards)
        else:
            result, last = self._looped(products, running, state, e.dim(x, 1), backwards=backwards)
        return (result if ends is None else _reversed(e, result, ends)), last

    def _unrolled(
        self, products: ir.Value, running: ir.Value | None, state: CellState, count: int, *, backwards: bool
    ) -> tuple[ir.Value, CellState]:
        e = self.e
        history: list[ir.Value] = []
        parts = _parts(e, products, count)
        masks = [None] * count if running is None else _parts(e, running, count)
        for t in reversed(range(count)) if backwards else range(count):
            shown, state = self._turn(parts[t], state, masks[t])
            history.append(e.unsqueeze(shown, [0]))
        return e.concat(history[::-1] if backwards else history, 0), state

    def _looped(
        self, products: ir.Value, running: ir.Value | None, state: CellState, batch: Dim, *, backwards: bool
    ) -> tuple[ir.Value, CellState]:
        e, start, layout = self.e, len(self.e.emitted), Layout(0, backwards=backwards)

        def sliced(whole: ir.Value) -> ir.Value:
            return placeholder(e, whole, None if whole.shape is None else ir.Shape(whole.shape[1:]))

        def sized(value: ir.Value, *sizes: int | None) -> ir.Value:
            if value.shape is None:
                value.shape = ir.Shape(sizes)
            return value

        def begun(first: ir.Value | None) -> ir.Value:
            zeros = first or e.op("Expand", e.scalar(0, products), e.vector([batch, self.hidden]))
            return sized(zeros, None, self.hidden)

        sized(products, None, None, None)
        x, mask = sliced(products), None if running is None else sliced(running)
        scanned = {x: Slices(products, layout)}
        if mask is not None and running is not None:
            scanned[mask] = Slices(running, layout)
        firsts = [begun(state.h), *([begun(state.c)] if self.cell is _lstm_cell else [])]
        inner = [placeholder(e, v, v.shape) for v in firsts]
        shown, new = self._turn(x, CellState(*inner), mask)
        ends = [sized(v, None, self.hidden) for v in (new.h, new.c) if v is not None]
        sized(shown, None, self.hidden)
        carried = [Carried(*parts) for parts in zip(firsts, inner, ends, strict=True)]
        finals, (history,) = emit_loop(e, start, carried, scanned, [(shown, layout)])
        return history, CellState(*finals)

    def _turn(self, x: ir.Value, state: CellState, running: ir.Value | None) -> tuple[ir.Value, CellState]:
        """One step: what it shows as h, and the next state. A sample that does not run shows zeros and keeps its state."""
        e, new = self.e, self.cell(self, x, state)
        assert new.h is not None
        if running is None:
            return new.h, new
        kept = CellState(_selected(e, running, new.h, state.h), _selected(e, running, new.c, state.c))
        return e.where(running, new.h, 0), kept


def _expanded(e: Emitter, n: Call, gates: int, default: Sequence[str], cell: Cell) -> list[ir.Value | None]:
    """Emit all directions; returns the operator's outputs Y, Y_h and Y_c."""
    steps = e.dim(n["X"], 0)
    x = _at_least_one_step(e, n["X"])
    way = n.string("direction", "forward")
    ways = ["forward", "reverse"] if way == "bidirectional" else [way]
    functions = _functions(n, [*default] * len(ways))
    lengths = n.get("sequence_lens")
    histories, finals = [], []
    for d, reverse in enumerate(w == "reverse" for w in ways):
        direction = _Direction(e, n, d, gates, functions[d * len(default) : (d + 1) * len(default)], cell)
        start = CellState(_of_direction(e, n.get("initial_h"), d), _of_direction(e, n.get("initial_c"), d))
        history, final = direction.steps(x, start, lengths, reverse=reverse)
        histories.append(e.unsqueeze(e.slice(history, [0], [steps], [0]), [1]))
        finals.append(_begun(e, final, lengths, steps))
    last = [_stacked(e, [s.h for s in finals]), _stacked(e, [s.c for s in finals])]
    return [e.concat(histories, 1), *last]


def _parts(e: Emitter, value: ir.Value, count: int) -> Sequence[ir.Value]:
    """The slices along the first axis."""
    parts = e.ops("Split", value, outputs=count, axis=0, num_outputs=count) if count > 1 else [value]
    return [e.squeeze(part, [0]) for part in parts]


def _at_least_one_step(e: Emitter, x: ir.Value) -> ir.Value:
    """An empty sequence with a step of zeros, whose results are dropped; see quirks.EMPTY_SCAN."""
    padded = e.pad(x, [0], [e.size_max(e.size_sub(1, e.dim(x, 0)), 0)], [0])
    if x.shape is not None and padded.shape is not None:
        padded.shape = ir.Shape([padded.shape[0], *x.shape[1:]])
    return padded


def _begun(e: Emitter, final: CellState, lengths: ir.Value | None, steps: Dim) -> CellState:
    """The last state, with zeros for samples of no steps."""
    if lengths is not None:
        counts = e.unsqueeze(lengths, [1])
    elif isinstance(steps, int) and steps > 0:
        return final
    else:
        counts = e.vector([steps])
    some = e.compare("Greater", counts, 0)
    return CellState(_selected(e, some, final.h, None), _selected(e, some, final.c, None))


def _stacked(e: Emitter, states: Sequence[ir.Value | None]) -> ir.Value | None:
    """The states of all directions, `[directions, batch, hidden]`; `None` if the cell has no such state."""
    present = [e.unsqueeze(v, [0]) for v in states if v is not None]
    return e.concat(present, 0) if present else None


def _selected(e: Emitter, running: ir.Value, new: ir.Value | None, old: ir.Value | None) -> ir.Value | None:
    return None if new is None else e.where(running, new, 0 if old is None else old)


def _reversed(e: Emitter, value: ir.Value, lengths: ir.Value) -> ir.Value:
    """The first `lengths` steps of each sample in reverse order."""
    whole = e.op("Max", e.cast(lengths, ir.DataType.INT64), e.ints([1]))
    return e.op("ReverseSequence", value, whole, time_axis=0, batch_axis=1)


def _of_direction(e: Emitter, value: ir.Value | None, d: int) -> ir.Value | None:
    return None if value is None else _at(e, value, d)


def _at(e: Emitter, value: ir.Value, d: int) -> ir.Value:
    return e.squeeze(e.slice(value, [d], [d + 1], [0]), [0])


# -- activations -------------------------------------------------------------------------------------------------------

_ACTIVATIONS: Mapping[str, tuple[tuple[float, ...], Callable[..., ir.Value]]] = {
    "affine": ((1.0, 0.0), lambda alpha, beta, e, x: e.add(e.mul(alpha, x), beta)),
    "scaledtanh": ((1.0, 1.0), lambda alpha, beta, e, x: e.mul(alpha, e.op("Tanh", e.mul(beta, x)))),
    "hardsigmoid": ((0.2, 0.5), lambda alpha, beta, e, x: e.op("HardSigmoid", x, alpha=alpha, beta=beta)),
    "leakyrelu": ((0.01,), lambda alpha, e, x: e.op("LeakyRelu", x, alpha=alpha)),
    "thresholdedrelu": ((1.0,), lambda alpha, e, x: e.op("ThresholdedRelu", x, alpha=alpha)),
    "elu": ((1.0,), lambda alpha, e, x: e.op("Elu", x, alpha=alpha)),
    "relu": ((), lambda e, x: e.op("Relu", x)),
    "tanh": ((), lambda e, x: e.op("Tanh", x)),
    "sigmoid": ((), lambda e, x: e.op("Sigmoid", x)),
    "softsign": ((), lambda e, x: e.op("Softsign", x)),
    "softplus": ((), lambda e, x: e.op("Softplus", x)),
}
"""Name -> the default alpha and beta, as in ONNX Runtime, and the function of these, the emitter and x."""


def _functions(n: Call, default: Sequence[str]) -> list[Function]:
    attributes = n.attributes()
    names = [str(name) for name in attributes.get("activations", default)]
    require(len(names) == len(default), f"it has {len(names)} activations, but needs {len(default)}.")
    given = [iter(attributes.get(f"activation_{kind}", ())) for kind in ("alpha", "beta")]
    made: list[Function] = []
    for name in names:
        require(name.lower() in _ACTIVATIONS, f"its activation {name!r} is not defined by ONNX.")
        defaults, function = _ACTIVATIONS[name.lower()]
        numbers = [float(next(own, usual)) for own, usual in zip(given, defaults, strict=False)]
        made.append(partial(function, *numbers))
    return made
