"""Write the optimizers of `ai.onnx.preview.training`, for which ONNX Runtime has no kernels, with plain operators.

The formulas are those of the specification. Factors that depend on the update count alone are computed once per node, in
float64, since 1 - beta^T would lose digits. `T > 0 ? a : b` becomes a Where, so that no node has a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.gradient_edges import TRAINING_DOMAIN
from onnx_convgrad.frontend.opset.rewriter import Rewriter

Scalar = ir.Value | float


class _Formula:
    """Elementwise arithmetic in one dtype; numbers become constants."""

    def __init__(self, h: Rewriter, dtype: ir.DataType) -> None:
        self.h, self.dtype = h, dtype

    def of(self, op_type: str, *terms: Scalar) -> ir.Value:
        return self.h.e.op(op_type, *map(self.term, terms))

    def term(self, term: Scalar) -> ir.Value:
        if isinstance(term, ir.Value):
            return term
        return self.h.e.const(term, self.dtype)

    def cast(self, value: ir.Value) -> ir.Value:
        return self.h.e.cast(value, self.dtype)

    def plus(self, a: ir.Value, factor: float, b: ir.Value) -> ir.Value:
        """a + factor b"""
        return self.of("Add", a, self.of("Mul", b, factor)) if factor else a

    def mixed(self, share: float, old: ir.Value, new: ir.Value) -> ir.Value:
        """share old + (1 - share) new"""
        return self.of("Add", self.of("Mul", old, share), self.of("Mul", new, 1 - share))


class _Update:
    """The operands of one optimizer node: the learning rate R, the count T, and as many tensors of each kind."""

    def __init__(self, h: Rewriter, kinds: int) -> None:
        self.h = h
        self.wide = _Formula(h, ir.DataType.DOUBLE)
        self.last: list[tuple[str, Sequence[ir.Value]]] = []
        self.states: list[Sequence[ir.Value]] = []
        count, rest = divmod(len(h.node.inputs) - 2, kinds)
        if rest or count < 1:
            raise UnsupportedCase(f"it has {len(h.node.inputs)} inputs, which is not 2 + {kinds} per tensor")
        if len(h.node.outputs) > count * (kinds - 1):
            raise UnsupportedCase(
                f"it has {len(h.node.outputs)} outputs for {count} tensors, at most {kinds - 1} for each"
            )
        self.tensors = [[h.required(2 + kind * count + i) for kind in range(kinds)] for i in range(count)]
        self.rate = self._scalar(h.required(0))

    def _scalar(self, value: ir.Value) -> ir.Value:
        """Reshape one element to rank 0: it must not add an axis to a tensor of rank 0."""
        if value.shape is not None and not value.shape:
            return value
        return self.h.e.op("Reshape", value, self.h.e.ints([]))

    def count(self) -> ir.Value:
        """T, int64."""
        return self._scalar(self.h.required(1))

    def later(self, count: ir.Value) -> ir.Value:
        """T > 0"""
        return self.h.e.op("Greater", count, self.h.e.const(np.int64(0)))

    def each(self, norm: float) -> Iterator[tuple[_Formula, ir.Value, ir.Value, ir.Value, ir.Value]]:
        """For each tensor X: arithmetic in its dtype, X, its gradient + norm X, and its first and last state."""
        for tensors in self.tensors:
            dtype = self.h.dtype(*tensors)
            if dtype is None:
                raise UnsupportedCase(f"the element type of {tensors[0].name!r} is unknown: declare it")
            f, (x, gradient, *states) = _Formula(self.h, dtype), tensors
            yield f, x, f.plus(gradient, norm, x), states[0], states[-1]

    def add(self, op_type: str, *inputs: ir.Value, states: Sequence[ir.Value]) -> None:
        """Add the last step of a new tensor, and its new states."""
        self.last.append((op_type, inputs))
        self.states.append(states)

    def finish(self) -> None:
        """Redirect the outputs: all new tensors, then their states by kind."""
        h = self.h
        values = [h.e.op(op, *inputs) for op, inputs in self.last[1:]]
        values += [state[kind] for kind in range(len(self.states[0])) for state in self.states]
        for old, new in zip(h.node.outputs[1:], values, strict=False):
            if old.name:
                h.redirect(old, new)
        h.node.resize_outputs(1)
        op, inputs = self.last[0]
        h.become(op, *inputs)


def _numbers(h: Rewriter, *names: str) -> list[float]:
    """Attributes, which are float32, with the defaults of the specification."""
    schema = onnx.defs.get_schema(h.node.op_type, TRAINING_DOMAIN)
    for name in names:
        if name not in h.node.attributes and schema.attributes[name].required:
            raise UnsupportedCase(f"its required attribute {name!r} is missing")
    return [h.float(name, schema.attributes[name].default_value.f) for name in names]


def adam(h: Rewriter) -> None:
    """V' = alpha V + (1 - alpha) G;  H' = beta H + (1 - beta) G^2;  X' = (1 - post) (X - rate V' / (sqrt(H') + epsilon)).

    G is the gradient + norm_coefficient X, and rate = R sqrt(1 - beta^T) / (1 - alpha^T), or R for T = 0.
    """
    update = _Update(h, 4)
    norm, post = _numbers(h, "norm_coefficient", "norm_coefficient_post")
    alpha, beta, epsilon = _numbers(h, "alpha", "beta", "epsilon")
    wide, count = update.wide, update.count()
    # for T = 0 take the quotient of T = 1: 0 / 0 in the branch that is not taken would make its derivative NaN
    t = wide.cast(h.e.op("Max", count, h.e.const(np.int64(1))))
    root = wide.of("Sqrt", wide.of("Sub", 1, wide.of("Pow", beta, t)))
    correction = wide.of("Div", root, wide.of("Sub", 1, wide.of("Pow", alpha, t)))
    factor = wide.of("Where", update.later(count), correction, 1)
    rate = wide.of("Mul", wide.cast(update.rate), factor)
    for f, x, g, v, squares in update.each(norm):
        v_new, h_new = f.mixed(alpha, v, g), f.mixed(beta, squares, f.of("Mul", g, g))
        move = f.of("Mul", f.cast(rate), f.of("Div", v_new, f.of("Add", f.of("Sqrt", h_new), epsilon)))
        last = ("Mul", f.of("Sub", x, move), f.term(1 - post)) if post else ("Sub", x, move)
        update.add(*last, states=(v_new, h_new))
    update.finish()


def adagrad(h: Rewriter) -> None:
    """H' = H + G^2;  X' = X - R / (1 + T decay_factor) G / (sqrt(H') + epsilon).

    G is the gradient + norm_coefficient X.
    """
    update = _Update(h, 3)
    norm, decay, epsilon = _numbers(h, "norm_coefficient", "decay_factor", "epsilon")
    wide, rate = update.wide, update.rate
    if decay:
        slowdown = wide.of("Add", wide.of("Mul", wide.cast(update.count()), decay), 1)
        rate = wide.of("Div", wide.cast(rate), slowdown)
    for f, x, g, squares, _ in update.each(norm):
        h_new = f.of("Add", squares, f.of("Mul", g, g))
        move = f.of("Mul", f.cast(rate), f.of("Div", g, f.of("Add", f.of("Sqrt", h_new), epsilon)))
        update.add("Sub", x, move, states=(h_new,))
    update.finish()


def momentum(h: Rewriter) -> None:
    """V' = alpha V + (T > 0 ? beta : 1) G;  X' = X - R V', or with Nesterov's X - R (G + alpha V').

    G is the gradient + norm_coefficient X.
    """
    update = _Update(h, 3)
    norm, alpha, beta = _numbers(h, "norm_coefficient", "alpha", "beta")
    mode = h.string("mode", "")
    if mode not in ("standard", "nesterov"):
        raise UnsupportedCase(f"its mode is {mode!r}, which is neither 'standard' nor 'nesterov'")
    share = None if beta == 1 else update.wide.of("Where", update.later(update.count()), beta, 1)
    for f, x, g, v, _ in update.each(norm):
        v_new = f.of("Add", f.of("Mul", v, alpha), g if share is None else f.of("Mul", f.cast(share), g))
        move = v_new if mode == "standard" else f.plus(g, alpha, v_new)
        update.add("Sub", x, f.of("Mul", f.cast(update.rate), move), states=(v_new,))
    update.finish()
