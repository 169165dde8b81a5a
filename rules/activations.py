"""Activations: y[i] = f(x[i]), dx[i] = f'(x[i]) g[i]. Each rule gives f', from y where that avoids keeping x. And Dropout.

At a kink the derivative is PyTorch's: zero for Relu, the slope of the left branch for LeakyRelu and PRelu. A 0/1 mask is
one node (see `step`), and 0 < y < 6 is the sign of y (6 - y).
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.autodiff.batching import Batched, require_rule
from onnx_convgrad.autodiff.factors import first_operand
from onnx_convgrad.autodiff.facts import chosen, meets_a_pole
from onnx_convgrad.autodiff.registry import Cotangents, Monotone, batched, elementwise
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, Operand
from onnx_convgrad.ir.namespace import second_output
from onnx_convgrad.ir.slopes import STEEP, selu_scales, step

# -- rectifiers --------------------------------------------------------------------------------------------------------


_LARGEST_POWER = 44.0
"""Largest exponent k for which float32 holds the square of e^k."""


def _positive(e: Emitter, value: ir.Value) -> ir.Value:
    return e.compare("Greater", value, 0)


def rising_unless_negative(*names: str) -> Monotone:
    """Rising if no attribute of these names is negative; all have positive defaults."""
    return lambda n: "" if any(n.float(name, 1.0) < 0 for name in names) else "rising"


@elementwise("Relu", wrt="X", monotone="rising", curve="convex", keeps_zero=True)
def relu(e: Emitter, n: Call) -> Operand:
    """y = max(x, 0): dy/dx = [y > 0], from y because the next operator keeps y in memory, but not x."""
    if e.target.fast_halves and n.y.dtype == ir.DataType.FLOAT16:
        return _positive(e, n.y) if meets_a_pole(n.y) else e.op("Sign", n.y)
    return _positive(e, n.y) if meets_a_pole(n.y) else step(e, n.y)


def _bent_upwards(n: Call) -> str:
    """The slope below zero is between 0 and that above."""
    return "convex" if 0 <= n.float("alpha", 0.0) <= 1 else ""


@elementwise("LeakyRelu", wrt="X", monotone=rising_unless_negative("alpha"), curve=_bent_upwards, keeps_zero=True)
def leaky_relu(e: Emitter, n: Call) -> Operand:
    """y = x for x > 0, else alpha x: dy/dx = 1 for x > 0, else alpha. For alpha > 0, y has the sign of x."""
    alpha = n.float("alpha", 0.01)
    if 0 <= alpha <= 1:
        return e.typed(e.op("Max", step(e, n.y), e.scalar(alpha, n.y)), n.y)
    return e.where(_positive(e, n.y if alpha > 0 else n["X"]), e.scalar(1, n.y), alpha)


@elementwise(
    "PRelu",
    wrt=("X", "slope"),
    parameters=("slope",),
    affine=("slope",),
    monotone={"slope": "falling"},
    keeps_zero=("X",),
)
def p_relu(e: Emitter, n: Call) -> Cotangents:
    """y = x for x > 0, else slope x: dy/dx = 1 for x > 0, else slope; dy/dslope = min(x, 0)."""
    x, slope = n["X"], n["slope"]

    def local() -> ir.Value:
        if x.dtype != ir.DataType.FLOAT:
            return e.where(_positive(e, x), 1, slope)
        other = e.typed(e.op("HardSigmoid", x, alpha=-STEEP, beta=1.0), x)  # [x <= 0]
        return e.add(step(e, x), e.mul(other, slope))

    return {"X": local, "slope": lambda: e.op("Min", x, 0.0)}


@batched("PRelu")
def p_relu_batched(b: Batched, n: Call) -> list[ir.Value]:
    """A slope of each example for one x, which the operator does not broadcast."""
    x, slope = n["X"], n["slope"]
    require_rule(x not in b)
    return [b.e.op("PRelu", b.all(x), b.aligned(slope, b.rank(x)))]


@elementwise("ThresholdedRelu", wrt="X", monotone=rising_unless_negative("alpha"), keeps_zero=True)
def thresholded_relu(e: Emitter, n: Call) -> Operand:
    """y = x for x > alpha, else 0: dy/dx = [x > alpha]."""
    return chosen(e, e.compare("Greater", n["X"], n.float("alpha", 1.0)), n.y)


def _jumps_up(n: Call) -> str:
    return "rising" if n.float("bias", 0.0) <= n.float("lambd", 0.5) else ""


@elementwise("Shrink", wrt="input", monotone=_jumps_up, keeps_zero=True)
def shrink(e: Emitter, n: Call) -> Operand:
    """y = x -+ bias outside [-lambd, lambd], else 0: dy/dx = [x > lambd or x < -lambd]."""
    x, lambd = n["input"], n.float("lambd", 0.5)
    return chosen(e, e.op("Or", e.compare("Greater", x, lambd), e.compare("Less", x, -lambd)), n.y)


# -- exponential units -------------------------------------------------------------------------------------------------


@elementwise("Elu", wrt="X", monotone=rising_unless_negative("alpha"), curve=_bent_upwards, keeps_zero=True)
def elu(e: Emitter, n: Call) -> Operand:
    """y = x for x > 0, else alpha (exp x - 1): dy/dx = 1 for x > 0, else y + alpha."""
    return _exponential_slope(e, n, n.float("alpha", 1.0), 1.0)


@elementwise("Celu", wrt="X", monotone="rising", keeps_zero=True)
def celu(e: Emitter, n: Call) -> Operand:
    """y = x for x > 0, else alpha (exp(x / alpha) - 1): dy/dx = min(y, 0) / alpha + 1."""
    alpha = n.float("alpha", 1.0)
    return e.add(e.mul(_negative_part(e, n.y, alpha), 1 / alpha), 1)


@elementwise("Selu", wrt="X", monotone=rising_unless_negative("alpha", "gamma"), keeps_zero=True)
def selu(e: Emitter, n: Call) -> Operand:
    """y = gamma x for x > 0, else gamma alpha (exp x - 1): dy/dx = gamma for x > 0, else y + gamma alpha."""
    alpha, gamma = selu_scales(n)
    return _exponential_slope(e, n, gamma * alpha, gamma)


def _exponential_slope(e: Emitter, n: Call, left: float, right: float) -> ir.Value:
    """`right` for x > 0, else y + `left`: min(y, 0) + left + (right - left) [y > 0], where y has the sign of x."""
    if left < 0 or right <= 0:
        return e.where(_positive(e, n["X"]), right, e.add(n.y, left))
    slope = e.add(_negative_part(e, n.y, left), left)
    return slope if left == right else e.add(slope, e.mul(step(e, n.y), right - left))


def _negative_part(e: Emitter, y: ir.Value, depth: float) -> ir.Value:
    """min(y, 0) for a y above `-depth`, with the derivative 0 at 0, so that second derivatives are PyTorch's."""
    return e.op("Clip", y, -2 * abs(depth), 0.0)


# -- sigmoids ----------------------------------------------------------------------------------------------------------


@elementwise("Sigmoid", wrt="X", monotone="rising", curve="sigmoid", bounds=(0, 1))
def sigmoid(e: Emitter, n: Call) -> Operand:
    """y = 1 / (1 + e^-x): dy/dx = y (1 - y) = 1 / (e^(x/2) + e^(-x/2))^2.

    The first form is used for gates, whose result is only multiplied. For other results the second is used, which has a
    small relative error for all x: a float32 y may have only a small absolute error (ONNX Runtime's is off by 0.6% at
    -12, and 0 below -18). The exponent is bounded, because derivatives of this form multiply the powers by tangents
    before they cancel.
    """
    x, gate = n["X"], bool(n.y.uses()) and _only_multiplied(n.y)
    if x.dtype != ir.DataType.FLOAT or (gate and not n.y.is_graph_output()):
        return e.mul(n.y, e.sub(1, n.y))
    most = e.scalar(_LARGEST_POWER, x)
    power = e.op("Exp", e.op("Clip", e.mul(x, 0.5), e.scalar(-_LARGEST_POWER, x), most))
    return e.square(e.op("Reciprocal", e.add(power, e.op("Reciprocal", power))))


def _only_multiplied(value: ir.Value) -> bool:
    """Whether every use of a value, or of the parts that it is split into, multiplies it."""
    return all(
        use.node.op_type == "Mul" or (use.node.op_type == "Split" and all(map(_only_multiplied, use.node.outputs)))
        for use in value.uses()
    )


def _ramp(n: Call) -> str:
    return "sigmoid" if n.float("alpha", 0.2) >= 0 else ""


@elementwise("HardSigmoid", wrt="X", monotone=rising_unless_negative("alpha"), curve=_ramp, bounds=(0, 1))
def hard_sigmoid(e: Emitter, n: Call) -> Operand:
    """y = clip(alpha x + beta, 0, 1): dy/dx = alpha [0 < y < 1], and 0 for a step."""
    if abs(n.float("alpha", 0.2)) >= STEEP:
        return None
    return e.mul(step(e, e.mul(n.y, e.sub(1, n.y))), n.float("alpha", 0.2))


@elementwise("HardSwish", wrt="X", keeps_zero=True)
def hard_swish(e: Emitter, n: Call) -> Operand:
    """y = x h(x) with h = clip(x / 6 + 1/2, 0, 1): dy/dx = h(x) + [|x| < 3] x / 6."""
    x = n["X"]
    size = e.op("Abs", x)
    inside = step(e, size, 3, up=False)
    gate = e.typed(e.op("HardSigmoid", x, alpha=1 / 6, beta=0.5), x)
    return e.add(gate, e.mul(inside, e.mul(x, 1 / 6)))


@elementwise("Softplus", wrt="X", monotone="rising", curve="convex", bounds=(0, math.inf))
def softplus(e: Emitter, n: Call) -> Operand:
    """y = log(1 + exp x): dy/dx = sigmoid x."""
    return e.op("Sigmoid", n["X"])


@elementwise("Softsign", wrt="input", monotone="rising", curve="sigmoid", bounds=(-1, 1), keeps_zero=True)
def softsign(e: Emitter, n: Call) -> Operand:
    """y = x / (1 + |x|): dy/dx = 1 / (1 + |x|)^2 = (1 - |y|)^2."""
    return e.square(e.sub(1, e.op("Abs", n.y)))


# -- smooth gates ------------------------------------------------------------------------------------------------------


@elementwise("Gelu", wrt="X", keeps_zero=True)
def gelu(e: Emitter, n: Call) -> Operand:
    """y = x P(x) with the normal distribution function P or its approximation by tanh: dy/dx = P + x P'."""
    tanh_form = n.string("approximate", "none") == "tanh"
    return _gelu_tanh(e, n["X"]) if tanh_form else _gelu_erf(e, n["X"])


def _gelu_erf(e: Emitter, x: ir.Value) -> ir.Value:
    """(1 + erf u) / 2 + u exp(-u^2 - log(pi) / 2), u = x / sqrt 2."""
    u = e.mul(x, math.sqrt(0.5))
    bell = e.typed(e.op("Exp", e.sub(-math.log(math.pi) / 2, e.square(u))), x)
    return e.add(e.mul(e.add(e.op("Erf", u), 1), 0.5), e.mul(u, bell))


def _gelu_tanh(e: Emitter, x: ir.Value) -> ir.Value:
    """s + s (1 - s) x v' with s = sigmoid v = (1 + tanh(v / 2)) / 2, v = a x + b x^3, x v' = 3 v - 2 a x."""
    a = 2 * math.sqrt(2 / math.pi)
    v = e.mul(x, e.add(e.mul(e.square(x), 0.044715 * a), a))
    s = e.op("Sigmoid", v)
    inner = e.sub(e.mul(v, 3), e.mul(x, 2 * a))
    return e.mul(s, e.add(e.mul(e.sub(1, s), inner), 1))


@elementwise("Mish", wrt="X", keeps_zero=True)
def mish(e: Emitter, n: Call) -> Operand:
    """y = x tanh(softplus x): dy/dx = s / d (1 + q + 4 x q^2 / d) with s = sigmoid x, q = 1 - s, d = 1 + q^2.

    exp(softplus x) = 1 / q, so tanh(softplus x) = (1 - q^2) / (1 + q^2). This form needs no Softplus.
    """
    x = n["X"]
    s = e.op("Sigmoid", x)
    q = e.sub(1, s)
    q2 = e.square(q)
    d = e.add(q2, 1)
    return e.mul(e.div(s, d), e.add(e.add(q, 1), e.mul(e.mul(x, 4), e.div(q2, d))))


# -- Dropout -----------------------------------------------------------------------------------------------------------


def _scaled(n: Call) -> str:
    """In training, two runs drop different numbers."""
    return "" if n.get("training_mode") is not None else "rising"


@elementwise("Dropout", wrt="data", factors=first_operand, affine=("data",), monotone=_scaled, keeps_zero=True)
def dropout(e: Emitter, n: Call) -> Operand:
    """y = x mask / (1 - ratio) in training, else y = x: dy/dx = mask / (1 - ratio), or 1.

    If the node has no output for the mask, it gets one. Outside of training the mask is all true.
    """
    x, ratio, training = n["data"], n.get("ratio"), n.get("training_mode")
    mode = e.number_of(training)
    share = 0.5 if ratio is None else e.number_of(ratio)
    if training is None or mode is False or share == 0:
        return 1
    if share is not None:
        kept: ir.Value | float = 1 / (1 - share) if share < 1 else 0
    else:
        kept = e.op("Reciprocal", e.sub(1, e.cast(n["ratio"], x.dtype or ir.DataType.FLOAT)))
    if mode is None:
        kept = e.where(training, kept if isinstance(kept, ir.Value) else e.scalar(kept, x), 1)
    return e.mul(e.mask(second_output(n.node, e.graph, "mask", ir.DataType.BOOL, x.shape), x), kept)
