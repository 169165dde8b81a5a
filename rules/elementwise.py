"""Arithmetic, powers, trigonometry, selection, conversions and running sums.

Almost all are `elementwise`: a rule gives dy/dx at each position, the walk multiplies by the cotangent and sums over
broadcast axes. A number stands for a constant derivative and costs nothing when it is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Cotangents, elementwise, linear, vjp
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, Operand
from onnx_convgrad.ir.notes import is_declared_parameter, was_constant_node
from onnx_convgrad.rules.activations import step

# -- arithmetic --------------------------------------------------------------------------------------------------------


@elementwise("Add", wrt=("A", "B"), parameters=("A", "B"))
def add(e: Emitter, n: Call) -> Cotangents:
    """y = a + b: dy/da = dy/db = 1."""
    return {"A": lambda: 1, "B": lambda: 1}


@elementwise("Sub", wrt=("A", "B"), parameters=("A", "B"))
def sub(e: Emitter, n: Call) -> Cotangents:
    """y = a - b: dy/da = 1, dy/db = -1."""
    return {"A": lambda: 1, "B": lambda: -1}


@elementwise("Mul", wrt=("A", "B"), parameters=("A", "B"))
def mul(e: Emitter, n: Call) -> Cotangents:
    """y = a b: dy/da = b, dy/db = a."""
    return {"A": lambda: n["B"], "B": lambda: n["A"]}


@elementwise("Div", wrt=("A", "B"), parameters=("A", "B"))
def div(e: Emitter, n: Call) -> Cotangents:
    """y = a / b: dy/da = 1 / b, dy/db = -y / b."""
    b = n["B"]
    return {"A": lambda: e.op("Reciprocal", b), "B": lambda: e.div(n.y, e.neg(b))}


@elementwise("Mod", wrt=("A", "B"))
def mod(e: Emitter, n: Call) -> Cotangents:
    """y = a - b q with an integer q that is locally constant: dy/da = 1, dy/db = -q = (y - a) / b.

    The quotient is an integer up to rounding, so rounding makes it exact; truncating a / b could miss by one.
    """
    return {"A": lambda: 1, "B": lambda: e.op("Round", e.div(e.sub(n.y, n["A"]), n["B"]))}


@elementwise("Neg")
def neg(e: Emitter, n: Call) -> Cotangents:
    """y = -x."""
    return {"X": lambda: -1}


@elementwise("Abs")
def absolute(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = sign x, zero at zero."""
    return {"X": lambda: e.op("Sign", n["X"])}


@elementwise("Reciprocal")
def reciprocal(e: Emitter, n: Call) -> Cotangents:
    """y = 1 / x: dy/dx = -y^2."""
    return {"X": lambda: e.mul(n.y, e.neg(n.y))}


@elementwise("Sum", wrt=("data_0",))
def variadic_sum(e: Emitter, n: Call) -> Mapping[str, Any]:
    """y = sum over i of x_i: dy/dx_i = 1."""
    return {"data_0": lambda i: 1}


@elementwise("Mean", wrt=("data_0",))
def variadic_mean(e: Emitter, n: Call) -> Mapping[str, Any]:
    """y = (sum over i of x_i) / k: dy/dx_i = 1 / k."""
    return {"data_0": lambda i: 1 / len(n.inputs)}


# -- powers and exponentials -------------------------------------------------------------------------------------------


@elementwise("Pow", wrt=("X", "Y"))
def power(e: Emitter, n: Call) -> Cotangents:
    """z = x^y: dz/dx = y x^(y-1), zero where y = 0; dz/dy = z log x, zero where x = 0 and y >= 0."""
    return {"X": lambda: _power_base(e, n), "Y": lambda: _power_exponent(e, n)}


def _may_be_trained(exponent: ir.Value) -> bool:
    """Whether a stored exponent may be a parameter, as in generalized-mean pooling, rather than the 2 of a square.

    What is written for one number could not be differentiated by the exponent later on.
    """
    if is_declared_parameter(exponent):
        return True
    return was_constant_node(exponent) is False and exponent.shape is not None and len(exponent.shape) > 0


def _power_base(e: Emitter, n: Call) -> Operand:
    x = n["X"]
    dtype = x.dtype or ir.DataType.FLOAT
    exponent = None if _may_be_trained(n["Y"]) else e.constant_of(n["Y"])
    if exponent is not None and exponent.size == 1:
        k = float(exponent.reshape(()))
        if k in (0, 1):
            return k
        if k in (2, 3):
            return e.mul(x if k == 2 else e.square(x), k)
        if k == 0.5:
            return e.div(0.5, n.y)
        return e.mul(e.op("Pow", x, e.scalar(k - 1, x)), k)
    if exponent is not None and exponent.all():
        return e.mul(e.op("Pow", x, e.const(exponent - 1, dtype)), e.const(exponent, dtype))
    y = e.cast(n["Y"], dtype)
    # 0 * x^0 rather than 0 * x^-1, which is not a number at x = 0
    lowered = e.where(e.compare("Equal", y, 0), 0, e.sub(y, 1))
    return e.mul(e.op("Pow", x, lowered), y)


def _power_exponent(e: Emitter, n: Call) -> ir.Value:
    x, y = n["X"], n["Y"]
    require(
        x.dtype == y.dtype,
        f"its exponent is {getattr(y.dtype, 'name', 'of unknown dtype')} and its base is "
        f"{getattr(x.dtype, 'name', 'of unknown dtype')}; the gradient of the exponent needs one dtype.",
        hint="Cast one of them.",
    )
    settled = e.op("And", e.compare("Equal", x, 0), e.compare("GreaterOrEqual", y, 0))
    return e.mul(n.y, e.op("Log", e.where(settled, 1, x)))


@elementwise("Sqrt")
def sqrt(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = 1 / (2 y)."""
    return {"X": lambda: e.div(0.5, n.y)}


@elementwise("Exp", wrt=("input",))
def exp(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = y."""
    return {"input": lambda: n.y}


@elementwise("Log", wrt=("input",))
def log(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = 1 / x."""
    return {"input": lambda: e.op("Reciprocal", n["input"])}


@elementwise("Erf", wrt=("input",))
def erf(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = 2 / sqrt(pi) exp(-x^2)."""
    x = n["input"]
    return {"input": lambda: e.mul(e.op("Exp", e.mul(x, e.neg(x))), 2 / math.sqrt(math.pi))}


# -- trigonometry ------------------------------------------------------------------------------------------------------


@elementwise("Sin", wrt=("input",))
def sin(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = cos x."""
    return {"input": lambda: e.op("Cos", n["input"])}


@elementwise("Cos", wrt=("input",))
def cos(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = -sin x."""
    return {"input": lambda: e.neg(e.op("Sin", n["input"]))}


@elementwise("Tan", wrt=("input",))
def tan(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = 1 + y^2."""
    return {"input": lambda: e.add(e.square(n.y), 1)}


@elementwise("Sinh", wrt=("input",))
def sinh(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = cosh x."""
    return {"input": lambda: e.op("Cosh", n["input"])}


@elementwise("Cosh", wrt=("input",))
def cosh(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = sinh x."""
    return {"input": lambda: e.op("Sinh", n["input"])}


@elementwise("Tanh", wrt=("input",))
def tanh(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = 1 - y^2."""
    return {"input": lambda: e.sub(1, e.square(n.y))}


@elementwise("Asin", wrt=("input",))
def asin(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = 1 / sqrt(1 - x^2)."""
    return {"input": lambda: e.div(1, e.op("Sqrt", e.sub(1, e.square(n["input"]))))}


@elementwise("Acos", wrt=("input",))
def acos(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = -1 / sqrt(1 - x^2)."""
    return {"input": lambda: e.div(-1, e.op("Sqrt", e.sub(1, e.square(n["input"]))))}


@elementwise("Atan", wrt=("input",))
def atan(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = 1 / (1 + x^2)."""
    return {"input": lambda: e.op("Reciprocal", e.add(e.square(n["input"]), 1))}


@elementwise("Asinh", wrt=("input",))
def asinh(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = 1 / sqrt(x^2 + 1)."""
    return {"input": lambda: e.div(1, e.op("Sqrt", e.add(e.square(n["input"]), 1)))}


@elementwise("Acosh", wrt=("input",))
def acosh(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = 1 / sqrt(x^2 - 1)."""
    return {"input": lambda: e.div(1, e.op("Sqrt", e.sub(e.square(n["input"]), 1)))}


@elementwise("Atanh", wrt=("input",))
def atanh(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = 1 / (1 - x^2)."""
    return {"input": lambda: e.op("Reciprocal", e.sub(1, e.square(n["input"])))}


# -- selection ---------------------------------------------------------------------------------------------------------


@elementwise("Max", "Min", wrt=("data_0",))
def extremum(e: Emitter, n: Call) -> Mapping[str, Any]:
    """y = max over i of x_i: dy/dx_i = [x_i = y] / #{j: x_j = y}, so that equal operands share."""
    return {"data_0": lambda i: _share_of_extremum(e, n, i)}


def _share_of_extremum(e: Emitter, n: Call, i: int) -> Operand:
    operands = [v for v in n.inputs if v is not None]
    if len(operands) == 1:
        return 1
    if len(operands) == 2:
        mine, other = operands[i], operands[1 - i]
        wins = e.compare("Greater" if n.node.op_type == "Max" else "Less", mine, other)
        return e.where(e.compare("Equal", mine, other), 0.5, e.mask(wins, n.y))
    if n.y.dtype == ir.DataType.FLOAT16:
        above = "GreaterOrEqual" if n.node.op_type == "Max" else "LessOrEqual"
        others = [[w for j, w in enumerate(operands) if j != k] for k in range(len(operands))]
        best = [_all(e, [e.compare(above, v, w) for w in rest]) for v, rest in zip(operands, others, strict=True)]
    else:
        best = [e.compare("Equal", v, n.y) for v in operands]
    reached = [e.mask(b, n.y) for b in best]
    return e.div(reached[i], e.sum(reached))


def _all(e: Emitter, conditions: Sequence[ir.Value]) -> ir.Value:
    """Whether all hold.

    In float16 conditions are on operands alone: ONNX Runtime computes most operators in float32 on the CPU, hands an
    operand to a comparison before it is rounded, and to Clip and Max, for which it has kernels, after that.
    """
    return reduce(partial(e.op, "And"), conditions)


@elementwise("Clip", wrt=("input", "min", "max"))
def clip(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = [y = x], which holds at the bounds too; each bound gets what it cuts off.

    Between 0 and 6 it is PyTorch's ReLU6, whose derivative is 0 at both bounds: y alone tells it, and x need not be kept.
    """
    x, low, high = n["input"], n.get("min"), n.get("max")
    bounds = [array for array in (e.constant_of(low), e.constant_of(high)) if array is not None and array.size == 1]

    def lower() -> ir.Value:
        below = e.compare("Less", x, low)
        return e.mask(below if high is None else e.op("And", below, e.compare("LessOrEqual", low, high)), x)

    def upper() -> ir.Value:
        above = e.compare("Greater", x, high)
        return e.mask(above if low is None else e.op("Or", above, e.compare("Less", high, low)), x)

    def inside() -> Operand:
        if low is None and high is None:
            return 1
        if [float(bound.item()) for bound in bounds] == [0, 6]:
            return step(e, e.mul(n.y, e.sub(6, n.y)))
        if x.dtype == ir.DataType.FLOAT16:
            bound = (("GreaterOrEqual", low), ("LessOrEqual", high))
            return e.mask(_all(e, [e.compare(op, x, limit) for op, limit in bound if limit is not None]), x)
        return e.mask(e.compare("Equal", x, n.y), x)

    return {
        "input": inside,
        "min": lower,
        "max": upper,
    }


@linear("Where", wrt=("X", "Y"), broadcasts=True)
def where_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """dx = [c] g, dy = [not c] g.

    Selected rather than multiplied by a mask: models use Where to keep out positions whose cotangent is infinite.
    """
    condition, gz = n["condition"], g["output"]
    return {"X": lambda: e.where(condition, gz, 0), "Y": lambda: e.where(condition, 0, gz)}


# -- conversions -------------------------------------------------------------------------------------------------------


@linear("Cast", "CastLike", wrt=("input",))
def cast_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y = x in another precision: dx = g in the precision of x. Integer results are not differentiated."""
    x = n["input"]
    return {"input": lambda: e.op("CastLike", g["output"], x) if x.dtype is None else e.cast(g["output"], x.dtype)}


# -- sequences ---------------------------------------------------------------------------------------------------------


@linear("CumSum", wrt=("x",))
def cum_sum_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[j] = sum over i <= j of x[i]: dx[i] = sum over j >= i of g[j], the same running sum from the other end."""
    exclusive, backwards = n.int("exclusive", 0), n.int("reverse", 0)
    return {"x": lambda: e.op("CumSum", g["y"], n["axis"], exclusive=exclusive, reverse=1 - backwards)}


@vjp("Range", wrt=("start", "delta"))
def range_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[i] = start + i delta: dstart = sum over i of g[i], ddelta = sum over i of i g[i].

    The limit only sets the length.
    """
    gy = g["output"]

    def total(terms: ir.Value, like: ir.Value) -> ir.Value:
        return e.reshape_like(e.op("ReduceSum", terms, keepdims=0), like)

    def step() -> ir.Value:
        size = e.op("Size", gy)
        index = e.op("Range", e.const(np.int64(0)), size, e.const(np.int64(1)))
        return total(e.mul(gy, e.cast(index, gy.dtype or ir.DataType.FLOAT)), n["delta"])

    return {"start": lambda: total(gy, n["start"]), "delta": step}
