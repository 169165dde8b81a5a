"""Arithmetic, powers, trigonometry, selection, conversions and running sums.

    y[i] = f(x[i])        dx[i] = f'(x[i]) g[i]

Almost all rules are `elementwise`: a rule gives f'(x), and the walk multiplies it by the cotangent and sums over broadcast
axes. A number stands for a constant derivative; multiplying by 1 emits nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial, reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import along, every_axis, first_operand, like_first, mix, notation, operand
from onnx_convgrad.autodiff.facts import chosen, meets_a_pole
from onnx_convgrad.autodiff.registry import Cotangents, Poles, elementwise, linear, vjp
from onnx_convgrad.base.limits import check_limit
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call, signature
from onnx_convgrad.ir.clamps import bound_of, excludes_bounds, number_in
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter, Operand
from onnx_convgrad.ir.notes import is_declared_parameter, was_constant_node
from onnx_convgrad.ir.slopes import step

# -- functions of one operand ------------------------------------------------------------------------------------------

Slope = Callable[[Emitter, ir.Value, ir.Value], Operand]
"""dy/dx, given the emitter, x and y."""


def unary(op_type: str, slope: Slope, *, poles: Collection[float] = (), **facts: Any) -> None:
    """Declare a function of one operand; one that rises or falls does so wherever it is defined."""
    operand = signature("", op_type)[0][0]

    @elementwise(op_type, wrt=operand, poles={operand: poles} if poles else {}, **facts)
    def rule(e: Emitter, n: Call) -> Operand:
        return slope(e, n[operand], n.y)


_RISING: Mapping[str, Any] = {"monotone": "rising"}
_THROUGH_ZERO: Mapping[str, Any] = {**_RISING, "keeps_zero": True}
_SIGMOID: Mapping[str, Any] = {**_THROUGH_ZERO, "curve": "sigmoid"}


def _over_root(e: Emitter, number: int, square: ir.Value) -> ir.Value:
    return e.div(number, e.op("Sqrt", square))


unary("Neg", lambda e, x, y: -1, monotone="falling", affine=("X",), keeps_zero=True)
unary("Abs", lambda e, x, y: e.op("Sign", x), keeps_zero=True)  # sign x, which is 0 at 0
unary("Reciprocal", lambda e, x, y: e.mul(y, e.neg(y)), poles=(0,))  # -y^2
unary("Sqrt", lambda e, x, y: e.div(0.5, y), **_THROUGH_ZERO, poles=(0,))  # 1 / (2 y)
unary("Exp", lambda e, x, y: y, **_RISING, curve="convex")
unary("Log", lambda e, x, y: e.op("Reciprocal", x), **_RISING, poles=(0,))  # 1 / x
unary("Sin", lambda e, x, y: e.op("Cos", x), bounds=(-1, 1), keeps_zero=True)  # cos x
unary("Cos", lambda e, x, y: e.neg(e.op("Sin", x)), bounds=(-1, 1))  # -sin x
unary("Tan", lambda e, x, y: e.add(e.square(y), 1), keeps_zero=True)  # 1 + y^2
unary("Sinh", lambda e, x, y: e.op("Cosh", x), **_THROUGH_ZERO)  # cosh x
unary("Cosh", lambda e, x, y: e.op("Sinh", x))  # sinh x
unary("Tanh", lambda e, x, y: e.sub(1, e.square(y)), **_SIGMOID, bounds=(-1, 1))  # 1 - y^2
unary("Asin", lambda e, x, y: _over_root(e, 1, e.sub(1, e.square(x))), **_THROUGH_ZERO, poles=(-1, 1))
unary("Acos", lambda e, x, y: _over_root(e, -1, e.sub(1, e.square(x))), monotone="falling", poles=(-1, 1))
unary("Atan", lambda e, x, y: e.op("Reciprocal", e.add(e.square(x), 1)), **_SIGMOID)  # 1 / (1 + x^2)
unary("Asinh", lambda e, x, y: _over_root(e, 1, e.add(e.square(x), 1)), **_SIGMOID)  # 1 / sqrt(x^2 + 1)
unary("Acosh", lambda e, x, y: _over_root(e, 1, e.sub(e.square(x), 1)), **_RISING, poles=(1,))  # 1 / sqrt(x^2 - 1)
unary("Atanh", lambda e, x, y: e.op("Reciprocal", e.sub(1, e.square(x))), **_THROUGH_ZERO, poles=(-1, 1))


@elementwise("Erf", wrt="input", **_SIGMOID, bounds=(-1, 1))
def erf(e: Emitter, n: Call) -> ir.Value:
    """y = 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x: dy/dx = 2 / sqrt(pi) exp(-x^2)."""
    x = n["input"]
    return e.mul(e.op("Exp", e.mul(x, e.neg(x))), 2 / math.sqrt(math.pi))


# -- arithmetic --------------------------------------------------------------------------------------------------------


@elementwise("Add", wrt=("A", "B"), parameters=("A", "B"), nonnegative=True)
def add(e: Emitter, n: Call) -> Cotangents:
    """y = a + b: dy/da = dy/db = 1."""
    return {"A": lambda: 1, "B": lambda: 1}


@elementwise("Sub", wrt=("A", "B"), parameters=("A", "B"), affine=("A B",), monotone={"A": "rising", "B": "falling"})
def sub(e: Emitter, n: Call) -> Cotangents:
    """y = a - b: dy/da = 1, dy/db = -1."""
    return {"A": lambda: 1, "B": lambda: -1}


@elementwise("Mul", wrt=("A", "B"), parameters=("A", "B"), affine=("A", "B"), keeps_zero=True)
def mul(e: Emitter, n: Call) -> Cotangents:
    """y = a b: dy/da = b, dy/db = a."""
    return {"A": lambda: n["B"], "B": lambda: n["A"]}


@elementwise("Div", wrt=("A", "B"), parameters=("A", "B"), affine=("A",), keeps_zero=("A",), poles={"B": (0,)})
def div(e: Emitter, n: Call) -> Cotangents:
    """y = a / b: dy/da = 1 / b, dy/db = -y / b."""
    b = n["B"]
    return {"A": lambda: e.op("Reciprocal", b), "B": lambda: e.div(n.y, e.neg(b))}


@elementwise("Mod", wrt=("A", "B"), keeps_zero=("A",))
def mod(e: Emitter, n: Call) -> Cotangents:
    """y = a - b q with an integer q, locally constant: dy/da = 1, dy/db = -q = (y - a) / b.

    The computed quotient is an integer up to rounding errors, so rounding makes it exact; truncating a / b could be off
    by one.
    """
    return {"A": lambda: 1, "B": lambda: e.op("Round", e.div(e.sub(n.y, n["A"]), n["B"]))}


@elementwise("Sum", wrt=("data_0",), nonnegative=True)
def variadic_sum(e: Emitter, n: Call) -> Mapping[str, Any]:
    """y = sum over i of x_i: dy/dx_i = 1."""
    return {"data_0": lambda i: 1}


@elementwise("Mean", wrt=("data_0",), within="operands", nonnegative=True)
def variadic_mean(e: Emitter, n: Call) -> Mapping[str, Any]:
    """y = (sum over i of x_i) / k: dy/dx_i = 1 / k."""
    return {"data_0": lambda i: 1 / len(n.inputs)}


# -- powers ------------------------------------------------------------------------------------------------------------


def _power_poles(n: Call) -> Poles:
    """A constant exponent of at least 1 has none, and 0 neither."""
    exponent = constant_of(n["Y"])
    return {} if exponent is not None and ((exponent >= 1) | (exponent == 0)).all() else {"X": (0,)}


def _zero_powers(n: Call) -> Collection[str]:
    """A constant positive exponent keeps zero."""
    exponent = constant_of(n["Y"])
    return ("X",) if exponent is not None and (exponent > 0).all() else ()


@elementwise("Pow", wrt=("X", "Y"), poles=_power_poles, keeps_zero=_zero_powers)
def power(e: Emitter, n: Call) -> Cotangents:
    """z = x^y: dz/dx = y x^(y-1), zero where y = 0; dz/dy = z log x, zero where x = 0 and y >= 0."""
    return {"X": lambda: _power_base(e, n), "Y": lambda: _power_exponent(e, n)}


def _may_be_trained(exponent: ir.Value) -> bool:
    """Whether a stored exponent may be a parameter, as in generalized-mean pooling, rather than the 2 of a square.

    The gradient for a parameter keeps the exponent as an operand, so that it can be differentiated again.
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
    # 0 * x^0, because 0 * x^-1 is NaN at x = 0
    lowered = e.where(e.compare("Equal", y, 0), 0, e.sub(y, 1))
    return e.mul(e.op("Pow", x, lowered), y)


def _power_exponent(e: Emitter, n: Call) -> ir.Value:
    x, y = n["X"], n["Y"]
    require(
        x.dtype == y.dtype,
        f"its exponent is {getattr(y.dtype, 'name', 'of unknown dtype')} and its base is "
        f"{getattr(x.dtype, 'name', 'of unknown dtype')}; the gradient for the exponent needs equal dtypes.",
        hint="Cast one of them.",
    )
    at_zero = e.op("And", e.compare("Equal", x, 0), e.compare("GreaterOrEqual", y, 0))
    return e.mul(n.y, e.op("Log", e.where(at_zero, 1, x)))


# -- selection ---------------------------------------------------------------------------------------------------------


@elementwise("Max", "Min", wrt=("data_0",), moves="selects", monotone="rising")
def extremum(e: Emitter, n: Call) -> Mapping[str, Any]:
    """y = max over i of x_i: dy/dx_i = [x_i = y] / #{j: x_j = y}. Equal operands share the derivative equally.

    Of a tensor and a constant number that are equal, the tensor gets all, as in PyTorch's clamp with one bound.
    """
    operands = [v for v in n.inputs if v is not None]
    largest = n.node.op_type == "Max"

    @cache
    def reached() -> tuple[list[ir.Value], ir.Value]:
        masks = [e.mask(b, n.y) for b in _best(e, n, operands)]
        return masks, e.sum(masks)

    def share(i: int) -> Operand:
        if len(operands) == 1:
            return 1
        if len(operands) == 2:
            mine, other = operands[i], operands[1 - i]
            bound = bound_of(n)
            if bound is other:
                return _clamped(e, n, mine, *((other, None) if largest else (None, other)))
            if bound is mine:
                return chosen(e, e.compare("Greater" if largest else "Less", mine, other), n.y)
            loses = e.compare("Less" if largest else "Greater", mine, other)  # NaN does not
            return e.where(e.compare("Equal", mine, other), 0.5, e.mask(e.op("Not", loses), n.y))
        masks, count = reached()
        return e.div(masks[i], count)

    return {"data_0": share}


def _best(e: Emitter, n: Call, operands: Sequence[ir.Value]) -> list[ir.Value]:
    """For each of several operands, a mask of the places where it is the largest, or the smallest."""
    if n.y.dtype != ir.DataType.FLOAT16:
        return [e.compare("Equal", v, n.y) for v in operands]
    check_limit("nodes", len(operands) ** 2, f"The gradient of a {n.node.op_type} of {len(operands)} float16 operands")
    above = "GreaterOrEqual" if n.node.op_type == "Max" else "LessOrEqual"
    others = [[w for j, w in enumerate(operands) if j != k] for k in range(len(operands))]
    return [_all(e, [e.compare(above, v, w) for w in rest]) for v, rest in zip(operands, others, strict=True)]


def _all(e: Emitter, conditions: Sequence[ir.Value]) -> ir.Value:
    """The conjunction of all conditions.

    For float16 the callers compare operands with each other, never with y: a runtime that computes in float32 may compare
    an operand before it is rounded to float16, while y was computed from the rounded one.
    """
    return reduce(partial(e.op, "And"), conditions)


@elementwise("Clip", wrt=("input", "min", "max"), factors=first_operand, moves="selects", monotone="rising")
def clip(e: Emitter, n: Call) -> Cotangents:
    """y = min(max(x, min), max): dy/dx = [y = x], dy/dmin = [x < min <= max], dy/dmax = [x > max or min > max].

    At the bounds see `excludes_bounds`.
    """
    x, low, high = n["input"], n.get("min"), n.get("max")

    def lower() -> ir.Value:
        below = e.compare("Less", x, low)
        return chosen(e, below if high is None else e.op("And", below, e.compare("LessOrEqual", low, high)), n.y)

    def upper() -> ir.Value:
        above = e.compare("Greater", x, high)
        return chosen(e, above if low is None else e.op("Or", above, e.compare("Less", high, low)), n.y)

    return {"input": lambda: _clamped(e, n, x, low, high), "min": lower, "max": upper}


def _clamped(e: Emitter, n: Call, x: ir.Value, low: ir.Value | None, high: ir.Value | None) -> Operand:
    """The derivative of a clamp: 1 within the bounds, 0 outside and for NaN."""
    if low is None and high is None:
        return 1
    finite = (number_in(low) or 0) > 0 or not meets_a_pole(n.y)
    strict = excludes_bounds(n, low, high)
    if strict and finite and [number_in(low), number_in(high)] == [0, 6]:
        return step(e, e.mul(n.y, e.sub(6, n.y)))
    if strict or None in (low, high) or x.dtype == ir.DataType.FLOAT16:
        names = ("Greater", "Less") if strict else ("GreaterOrEqual", "LessOrEqual")
        pairs = zip(names, (low, high), strict=True)
        within = _all(e, [e.compare(name, x, bound) for name, bound in pairs if bound is not None])
    else:
        within = e.compare("Equal", x, n.y)
    return e.mask(within, n.y) if finite else within


@linear("Where", wrt=("X", "Y"), broadcasts=True, factors=every_axis, moves="selects")
def where_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """z = x where c holds, else y: dx = [c] g, dy = [not c] g.

    The cotangent is selected, not multiplied by a mask: models use Where to exclude positions whose cotangent is infinite.
    """
    condition, gz = n["condition"], g["output"]
    return {"X": lambda: e.where(condition, gz, 0), "Y": lambda: e.where(condition, 0, gz)}


# -- conversions -------------------------------------------------------------------------------------------------------


def _rounded(n: Call) -> str:
    """Rounding never makes a smaller number the larger one; truth values do not rise."""
    return "rising" if n.y.dtype is not None and n.y.dtype.is_floating_point() else ""


@linear("Cast", "CastLike", wrt="input", factors=like_first, monotone=_rounded)
def cast_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = x in another dtype: dx = g in the dtype of x. The walk does not differentiate integer results."""
    x = n["input"]
    return e.op("CastLike", g["output"], x) if x.dtype is None else e.cast(g["output"], x.dtype)


# -- sequences ---------------------------------------------------------------------------------------------------------


@linear("CumSum", wrt="x", factors=along(operand("axis"), mix("sums along")), nonnegative=True)
def cum_sum_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[j] = sum over i <= j of x[i]: dx[i] = sum over j >= i of g[j], a running sum from the other end."""
    exclusive, backwards = n.int("exclusive", 0), n.int("reverse", 0)
    return e.op("CumSum", g["y"], n["axis"], exclusive=exclusive, reverse=1 - backwards)


@vjp("Range", wrt=("start", "delta"), factors=notation("-, -, - -> i"))
def range_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[i] = start + i delta: dstart = sum over i of g[i], ddelta = sum over i of i g[i].

    The operand `limit` only determines the length.
    """
    gy = g["output"]

    def total(terms: ir.Value, like: ir.Value) -> ir.Value:
        return e.reshape_like(e.op("ReduceSum", terms, keepdims=0), like)

    def step() -> ir.Value:
        size = e.op("Size", gy)
        index = e.op("Range", e.const(np.int64(0)), size, e.const(np.int64(1)))
        wide = e.wide(gy)
        return e.cast_like(total(e.mul(wide, e.cast_like(index, wide)), n["delta"]), gy)

    return {"start": lambda: total(gy, n["start"]), "delta": step}
