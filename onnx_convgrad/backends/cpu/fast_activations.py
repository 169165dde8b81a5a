"""Activations with slow kernels in ONNX Runtime's CPU provider, written with operators that it is fast at.

Softplus, computed by element             max(x, 0) - log s(|x|), s the logistic function: 3 times faster
tanh(softplus x), as in Mish              n / (2 - n), n = s (2 - s): 7 times
Softmax and LogSoftmax, not of rows       their definition: 15 times; the runtime transposes the tensor twice
(1 + erf x) / 2, as in the slope of GELU  a HardSigmoid of erf x, which lies on its ramp: one pass for two
Sign, as in the slope of |x|              [x > 0] - [x < 0], each a HardSigmoid too steep for a ramp: twice as fast
Min and Max with a number                 a Clip: half of the time
Elu, Selu, Celu                           max(x, 0) + alpha (exp(min(x, 0)) - 1): in half to two thirds of the time

They round as the kernels of the runtime do.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.backends.cpu import Forms
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of, is_number
from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.ir.geometry import HINT_BATCH
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.slopes import selu_scales, step

_LARGE = 1 << 14
"""Smallest number of elements for which several nodes are faster than the activation's kernel."""


def _softplus(e: Emitter, node: ir.Node) -> ir.Value | None:
    """log(1 + exp x) = max(x, 0) + log(1 + exp(-|x|))."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or (y.uses() and not y.is_graph_output() and all(use.node.op_type == "Tanh" for use in y.uses())):
        return None
    return e.sub(e.op("Relu", x), e.op("Log", e.op("Sigmoid", e.op("Abs", x))))


def _tanh(e: Emitter, node: ir.Node) -> ir.Value | None:
    """With u = 1 + exp x, s = (u - 1) / u: tanh(log u) = (u^2 - 1) / (u^2 + 1) = n / (2 - n), as 1 / u^2 = 1 - n."""
    inner = None if node.inputs[0] is None else node.inputs[0].producer()
    if not is_op(inner, "Softplus") or inner.inputs[0] is None:
        return None
    return _gate_of_mish(e, inner.inputs[0])


def _gate_of_mish(e: Emitter, x: ir.Value) -> ir.Value:
    s = e.op("Sigmoid", x)
    n = e.mul(s, e.sub(2.0, s))
    return e.div(n, e.sub(2.0, n))


def _half_of_erf(e: Emitter, node: ir.Node) -> ir.Value | None:
    for half, total in (node.inputs, node.inputs[::-1]):
        inner = None if total is None else total.producer()
        if is_op(inner, "Add") and sole_producer(total) is inner and is_number(half, 0.5):
            for one, erf in (inner.inputs, inner.inputs[::-1]):
                if is_number(one, 1) and erf is not None and is_op(erf.producer(), "Erf"):
                    return e.op("HardSigmoid", erf, alpha=0.5, beta=0.5)
    return None


def _sign(e: Emitter, node: ir.Node) -> ir.Value | None:
    x = node.inputs[0]
    if x is None or not _is_large(node.outputs[0]):
        return None
    return e.sub(step(e, x), step(e, x, up=False))


def _bounded(e: Emitter, node: ir.Node) -> ir.Value | None:
    """Min or Max of a tensor and one number."""
    y = node.outputs[0]
    if len(node.inputs) != 2 or not _is_large(y):
        return None
    for x, bound in (node.inputs, node.inputs[::-1]):
        number = constant_of(bound)
        if x is not None and number is not None and number.size == 1 and static_dims(x) == static_dims(y):
            limit = e.scalar(float(number.reshape(())), y)
            if node.op_type == "Max":
                return e.op("Clip", x, limit)
            # a ReLU6, whose derivative is 0 at both bounds
            return e.op("Clip", x, e.scalar(0, y) if is_op(x.producer(), "Relu") else None, limit)
    return None


def _selu(e: Emitter, node: ir.Node) -> ir.Value | None:
    alpha, gamma = selu_scales(Call(node))
    return _exponential_unit(e, node, alpha * gamma, gamma)


def _celu(e: Emitter, node: ir.Node) -> ir.Value | None:
    alpha = Call(node).float("alpha", 1.0)
    return _exponential_unit(e, node, alpha, rate=1 / alpha) if alpha > 0 else None


def _exponential_unit(e: Emitter, node: ir.Node, left: float, right: float = 1.0, rate: float = 1.0) -> ir.Value | None:
    """right max(x, 0) + left (exp(rate min(x, 0)) - 1)."""
    x = node.inputs[0]
    if x is None or not _is_large(node.outputs[0]):
        return None
    power = e.op("Exp", e.mul(e.op("Clip", x, None, e.scalar(0, x)), rate))
    return e.add(e.mul(e.op("Relu", x), right), e.mul(e.sub(power, 1), left))


def _is_large(y: ir.Value) -> bool:
    """Whether an activation has so many elements that several nodes are faster than its kernel."""
    sizes = static_dims(y)
    return sizes is not None and math.prod(size or HINT_BATCH for size in sizes) >= _LARGE


def _softmax(e: Emitter, node: ir.Node) -> ir.Value | None:
    """exp(x - m) / sum exp(x - m), with m the maximum, or its logarithm.

    Not for rows (only axes of one element follow), for which the runtime's kernel is faster.
    """
    x, axis = node.inputs[0], Call(node).int("axis", -1)
    if x is None or x.shape is None or all(size == 1 for size in x.shape[axis % len(x.shape) + 1 :]):
        return None
    shifted = e.sub(x, e.reduce("ReduceMax", x, [axis]))
    power = e.op("Exp", shifted)
    total = e.reduce_sum(power, [axis])
    return e.div(power, total) if node.op_type == "Softmax" else e.sub(shifted, e.op("Log", total))


ACTIVATIONS: Forms = {
    "Celu": _celu,
    "Elu": lambda e, node: _exponential_unit(e, node, Call(node).float("alpha", 1.0)),
    "LogSoftmax": _softmax,
    "Max": _bounded,
    "Min": _bounded,
    "Mish": lambda e, node: None if (x := node.inputs[0]) is None else e.mul(x, _gate_of_mish(e, x)),
    "Mul": _half_of_erf,
    "Selu": _selu,
    "Sign": _sign,
    "Softmax": _softmax,
    "Softplus": _softplus,
    "Tanh": _tanh,
}
