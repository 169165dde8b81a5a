"""Reductions along axes that are an operand, which may be computed by the graph, empty or absent.

    y[j] = f({x[i, j]: i})        dx[i, j] = (dy[j] / dx[i, j]) g[j]

`_spread` gives g and y the reduced axes with size one, and they broadcast against x. This needs neither the rank nor
the axes while building.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import MEAN, REDUCTION_AXES, SUM, attribute, mix, reduced
from onnx_convgrad.autodiff.facts import meets_a_pole
from onnx_convgrad.autodiff.registry import linear, vjp, zero
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.notes import operation_of
from onnx_convgrad.ir.scatter import scatter


def _spread(e: Emitter, n: Call, value: ir.Value) -> ir.Value:
    """A value of the shape of y, reshaped to broadcast against x."""
    axes = n.get("axes")
    if n.int("keepdims", 1) or axes is None:  # without axes all are reduced to a scalar, or none is
        return value
    return e.op("Unsqueeze", value, axes)  # correct also for empty axes, which mean all or none


def _again(e: Emitter, n: Call, op_type: str, value: ir.Value) -> ir.Value:
    """Another reduction along the same axes, which keep size one."""
    noop = n.int("noop_with_empty_axes", 0)
    return e.op(op_type, value, n.get("axes"), keepdims=1, noop_with_empty_axes=noop or None)


# -- sums and means ----------------------------------------------------------------------------------------------------


@linear("ReduceSum", wrt="data", factors=reduced(REDUCTION_AXES, SUM), nonnegative=True)
def reduce_sum_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[j] = sum over i of x[i, j]: dx[i, j] = g[j]."""
    return e.expand(_spread(e, n, g["reduced"]), n["data"])


@linear("ReduceMean", wrt="data", factors=reduced(REDUCTION_AXES, MEAN), within="operands", nonnegative=True)
def reduce_mean_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[j] = (sum over i of x[i, j]) / k: dx[i, j] = g[j] / k."""
    count = e.size_div(e.count(n["data"]), e.size_max(e.count(n.y), 1))
    return e.expand(_spread(e, n, e.averaged(g["reduced"], count)), n["data"])


# -- other reductions --------------------------------------------------------------------------------------------------


def _extremum(e: Emitter, n: Call, g: ir.Value) -> ir.Value:
    """Equal elements share, or the first takes all where the file says that the node is PyTorch's `max` along an axis."""
    x, axis = n["data"], e.number_of(n.get("axes"))
    if axis is not None and operation_of(n.node) in ("max.dim", "min.dim"):
        winner = e.op("Arg" + n.node.op_type.removeprefix("Reduce"), x, axis=int(axis), keepdims=1)
        return scatter(e, e.zeros_like(x), winner, _spread(e, n, g), int(axis))
    equal = e.compare("Equal", x, _spread(e, n, n.y))
    reached = e.mask(equal, x)
    share = e.div(_spread(e, n, g), _again(e, n, "ReduceSum", reached))
    return e.where(equal, share, 0) if meets_a_pole(n.y) else e.mul(reached, share)


def _product_of_others(e: Emitter, n: Call) -> ir.Value:
    """(P / x'[i]) q[i], where x' is x with 1 in place of 0, P is the product of all x', and q[i] that of the other zeros.

    Without another zero q is 1. With exactly one, x[k], q is x[k], computed as the sum of the other zeros: its value is
    0 but its derivative is 1, which second derivatives need. With more, q and its first derivatives are 0.
    """
    x = n["data"]
    at_zero = e.compare("Equal", x, 0)
    zero = e.mask(at_zero, x)
    filled = e.where(at_zero, 1, x)
    zeros = e.mul(zero, x)
    other_count = e.sub(_again(e, n, "ReduceSum", zero), zero)
    other_zero = e.sub(_again(e, n, "ReduceSum", zeros), zeros)
    none = e.mask(e.compare("Equal", other_count, 0), x)
    one = e.mask(e.compare("Equal", other_count, 1), x)
    rest = e.div(_again(e, n, "ReduceProd", filled), filled)
    return e.mul(rest, e.add(none, e.mul(one, other_zero)))


def reduction(op_type: str, cotangent: Callable[[Emitter, Call, ir.Value], ir.Value], **facts: Any) -> None:
    """Declare a reduction; `cotangent` is dx, given the emitter, the node and g."""

    @vjp(op_type, wrt="data", factors=reduced(REDUCTION_AXES, mix("reduces")), **facts)
    def rule(e: Emitter, n: Call, g: dict[str, ir.Value]) -> ir.Value:
        return cotangent(e, n, g["reduced"])


# y = sum of x^2: dx = 2 x g
reduction("ReduceSumSquare", lambda e, n, g: e.mul(n["data"], _spread(e, n, e.mul(g, 2))), keeps_zero=True)
# y = sum of |x|: dx = sign(x) g
reduction("ReduceL1", lambda e, n, g: e.mul(e.op("Sign", n["data"]), _spread(e, n, g)), keeps_zero=True)
# y = sqrt(sum of x^2): dx = x g / y, zero where y = 0
reduction(
    "ReduceL2",
    lambda e, n, g: e.mul(n["data"], _spread(e, n, e.div(g, e.where(e.compare("Equal", n.y, 0), 1, n.y)))),
    keeps_zero=True,
)
# y = log(sum of x): dx = g / exp y
reduction(
    "ReduceLogSum",
    lambda e, n, g: e.expand(_spread(e, n, e.div(g, e.op("Exp", n.y))), n["data"]),
    monotone="rising",
    poles={"data": (0,)},
)
# y = log(sum of exp x): dx = exp(x - y) g
reduction(
    "ReduceLogSumExp",
    lambda e, n, g: e.mul(e.op("Exp", e.sub(n["data"], _spread(e, n, n.y))), _spread(e, n, g)),
    monotone="rising",
)
# y = max over i of x[i]: dx[i] = [x[i] = y] g / #{j: x[j] = y}. Equal elements share g equally
reduction("ReduceMax", _extremum, moves="selects", monotone="rising")
reduction("ReduceMin", _extremum, moves="selects", monotone="rising")
# y = product over i of x[i]: dx[i] = g product over j != i of x[j]
reduction("ReduceProd", lambda e, n, g: e.mul(_product_of_others(e, n), _spread(e, n, g)), keeps_zero=True)

zero("ArgMax", "ArgMin", factors=reduced(attribute("axis", 0), mix("chooses along")))
