"""Write the optimizers of `ai.onnx.preview.training`, for which ONNX Runtime has no kernels, with plain operators.

The formulas are those of the specification. Factors that depend on the update count alone are computed once per node, in
float64, since 1 - beta^T would lose digits. `T > 0 ? a : b` becomes a Where, so that no node has a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.gradient_edges import TRAINING_DOMAIN
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.emit import Emitter

Step = Callable[[ir.Value, ir.Value, ir.Value, ir.Value], Sequence[ir.Value]]
"""A tensor, its gradient with the regularization, and its first and last state -> the new tensor, and its new states."""


def _each(h: Rewriter, kinds: int, step: Step) -> list[ir.Value]:
    """Update every tensor by a `step`: all new tensors, then their states by kind.

    The operands are the learning rate R, the count T, and then as many tensors of each of the `kinds`: the tensors
    themselves, their gradients, and their states.
    """
    count, rest = divmod(len(h.node.inputs) - 2, kinds)
    if rest or count < 1:
        raise UnsupportedCase(f"it has {len(h.node.inputs)} inputs, which is not 2 + {kinds} per tensor")
    if len(h.node.outputs) > count * (kinds - 1):
        raise UnsupportedCase(f"it has {len(h.node.outputs)} outputs for {count} tensors, at most {kinds - 1} for each")
    (norm,) = _numbers(h, "norm_coefficient")
    updates = []
    for i in range(count):
        x, gradient, *states = (h.required(2 + kind * count + i) for kind in range(kinds))
        if h.dtype(x, gradient, *states) is None:
            raise UnsupportedCase(f"the element type of {x.name!r} is unknown: declare it")
        updates.append(step(x, _plus(h.e, gradient, norm, x), states[0], states[-1]))
    return [value for kind in zip(*updates, strict=True) for value in kind]


def _plus(e: Emitter, a: ir.Value, factor: float, b: ir.Value) -> ir.Value:
    """a + factor b"""
    return e.add(a, e.mul(b, factor)) if factor else a


def _mixed(e: Emitter, share: float, old: ir.Value, new: ir.Value) -> ir.Value:
    """share old + (1 - share) new"""
    return e.add(e.mul(old, share), e.mul(new, 1 - share))


def _moved(e: Emitter, x: ir.Value, rate: ir.Value, direction: ir.Value) -> ir.Value:
    """x - rate direction"""
    return e.sub(x, e.mul(e.op("CastLike", rate, x) if x.dtype is None else e.cast(rate, x.dtype), direction))


def _scalar(h: Rewriter, index: int) -> ir.Value:
    """R or T as a tensor of rank 0: it must not add an axis to a tensor of rank 0."""
    return h.e.reshape(h.required(index), [])


def _numbers(h: Rewriter, *names: str) -> list[float]:
    """Attributes, which are float32, with the defaults of the specification."""
    schema = onnx.defs.get_schema(h.node.op_type, TRAINING_DOMAIN)
    for name in names:
        if name not in h.node.attributes and schema.attributes[name].required:
            raise UnsupportedCase(f"its required attribute {name!r} is missing")
    return [h.float(name, schema.attributes[name].default_value.f) for name in names]


def adam(h: Rewriter) -> list[ir.Value]:
    """V' = alpha V + (1 - alpha) G;  H' = beta H + (1 - beta) G^2;  X' = (1 - post) (X - rate V' / (sqrt(H') + epsilon)).

    G is the gradient + norm_coefficient X, and rate = R sqrt(1 - beta^T) / (1 - alpha^T), or R for T = 0.
    """
    e, (post, alpha, beta, epsilon) = h.e, _numbers(h, "norm_coefficient_post", "alpha", "beta", "epsilon")
    count = _scalar(h, 1)
    # for T = 0 take the quotient of T = 1: 0 / 0 in the branch that is not taken would make its derivative NaN
    t = e.cast(e.op("Max", count, 1), ir.DataType.DOUBLE)
    correction = e.div(e.op("Sqrt", e.sub(1, e.op("Pow", beta, t))), e.sub(1, e.op("Pow", alpha, t)))
    factor = e.where(e.compare("Greater", count, 0), correction, 1)
    rate = e.mul(e.cast(_scalar(h, 0), ir.DataType.DOUBLE), factor)

    def step(x: ir.Value, g: ir.Value, v: ir.Value, squares: ir.Value) -> Sequence[ir.Value]:
        v_new, h_new = _mixed(e, alpha, v, g), _mixed(e, beta, squares, e.square(g))
        x_new = _moved(e, x, rate, e.div(v_new, e.add(e.op("Sqrt", h_new), epsilon)))
        return e.mul(x_new, 1 - post), v_new, h_new

    return _each(h, 4, step)


def adagrad(h: Rewriter) -> list[ir.Value]:
    """H' = H + G^2;  X' = X - R / (1 + T decay_factor) G / (sqrt(H') + epsilon).

    G is the gradient + norm_coefficient X.
    """
    e, rate, (decay, epsilon) = h.e, _scalar(h, 0), _numbers(h, "decay_factor", "epsilon")
    if decay:
        slowdown = e.add(e.mul(e.cast(_scalar(h, 1), ir.DataType.DOUBLE), decay), 1)
        rate = e.div(e.cast(rate, ir.DataType.DOUBLE), slowdown)

    def step(x: ir.Value, g: ir.Value, squares: ir.Value, _: ir.Value) -> Sequence[ir.Value]:
        h_new = e.add(squares, e.square(g))
        return _moved(e, x, rate, e.div(g, e.add(e.op("Sqrt", h_new), epsilon))), h_new

    return _each(h, 3, step)


def momentum(h: Rewriter) -> list[ir.Value]:
    """V' = alpha V + (T > 0 ? beta : 1) G;  X' = X - R V', or with Nesterov's X - R (G + alpha V').

    G is the gradient + norm_coefficient X.
    """
    e, rate, (alpha, beta) = h.e, _scalar(h, 0), _numbers(h, "alpha", "beta")
    mode = h.string("mode", "")
    if mode not in ("standard", "nesterov"):
        raise UnsupportedCase(f"its mode is {mode!r}, which is neither 'standard' nor 'nesterov'")
    first = None if beta == 1 else e.compare("Greater", _scalar(h, 1), 0)

    def step(x: ir.Value, g: ir.Value, v: ir.Value, _: ir.Value) -> Sequence[ir.Value]:
        added = g if first is None else e.mul(e.where(first, beta, e.scalar(1, g)), g)
        v_new = e.add(e.mul(v, alpha), added)
        return _moved(e, x, rate, v_new if mode == "standard" else _plus(e, g, alpha, v_new)), v_new

    return _each(h, 3, step)
