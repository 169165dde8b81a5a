"""Normalizations without parameters: LpNormalization, MeanVarianceNormalization and LRN.

    LpNormalization            y = x / |x|_p along one axis
    MeanVarianceNormalization  y = (x - mean) / (deviation + 1e-9)
    LRN                        y[c] = x[c] s[c]^-beta, s[c] = bias + alpha / size times the sum of x^2 near c

Where |x|_p or the deviation is 0, the derivative is taken to be 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import along, attribute, fixed, mix
from onnx_convgrad.autodiff.registry import vjp
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.normalized import size_from

_MVN_EPSILON = 1e-9
"""The number that the ONNX specification adds to the deviation."""


@vjp("LpNormalization", wrt="input", factors=along(attribute("axis", -1), mix("normalizes along")))
def lp_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = x / s with s = |x|_p: dx = (g - ds/dx sum(g y)) / s, where ds/dx is y for p = 2 and sign(x) for p = 1."""
    x, y, gy = n["input"], n.y, g["output"]
    axis, p = n.int("axis", -1), n.int("p", 2)
    require(p in (1, 2), f"p is {p}; the operator is defined for 1 and 2.")
    norm = e.reduce("ReduceL1" if p == 1 else "ReduceL2", x, [axis])
    nonzero = e.compare("Greater", norm, 0)
    inverse = e.where(nonzero, e.op("Reciprocal", e.where(nonzero, norm, 1)), 0)
    along = e.reduce_sum(e.mul(gy, y), [axis])
    return e.mul(e.sub(gy, e.mul(y if p == 2 else e.op("Sign", x), along)), inverse)


@vjp(
    "MeanVarianceNormalization",
    wrt="X",
    factors=along(lambda n, rank: n.ints("axes") or (0, 2, 3), mix("normalizes along")),
)
def mean_variance_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = (x - m) / d with d = s + eps: dx = (g - mean(g)) / d - (x - m) mean(g (x - m)) / (d^2 s)."""
    x, gy = e.wide(n["X"]), e.wide(g["Y"])
    axes = n.ints("axes") or (0, 2, 3)
    require(n["X"].shape is None or max(axes) < len(n["X"].shape), f"its axes are {list(axes)}, beyond its operand's.")

    def mean(value: ir.Value) -> ir.Value:
        return e.reduce("ReduceMean", value, axes)

    centered = e.sub(x, mean(x))
    variance = mean(e.square(centered))
    nonzero = e.compare("Greater", variance, 0)
    deviation = e.op("Sqrt", e.where(nonzero, variance, 1))
    inverse = e.op("Reciprocal", e.add(e.where(nonzero, deviation, 0), _MVN_EPSILON))
    slope = e.div(e.mul(mean(e.mul(gy, centered)), inverse), deviation)
    return e.cast_like(e.mul(e.sub(e.sub(gy, mean(gy)), e.mul(centered, slope)), inverse), n["X"])


@vjp("LRN", wrt="X", factors=along(fixed(1), mix("normalizes along")))
def lrn_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """dx[i] = g[i] s[i]^-beta - 2 alpha beta / size x[i] times the sum of g[c] y[c] / s[c] over c whose window has i.

    Both sums over channels are products with a band matrix.
    """
    x, gy = e.wide(n["X"]), e.wide(g["Y"])
    size = n.int("size", 1)
    alpha, beta, bias = n.float("alpha", 1e-4), n.float("beta", 0.75), n.float("bias", 1.0)
    channels = e.dim(x, 1)
    below, above = (size - 1) // 2, size // 2
    dims = [e.dim(x, 0), channels, size_from(e, x, 2)]
    flat, h, y = (e.reshape(v, dims) for v in (x, gy, e.wide(n.y)))
    near = _band(e, channels, below, above, x)
    nearby = e.matmul(near, e.square(flat))
    s = e.add(e.mul(nearby, alpha / size), bias)
    back = e.matmul(_band(e, channels, above, below, x), e.div(e.mul(h, y), s))
    direct = e.mul(h, e.op("Pow", s, e.scalar(-beta, x)))
    through = e.mul(e.mul(flat, back), 2 * alpha * beta / size)
    return e.cast_like(e.reshape_like(e.sub(direct, through), x), n["X"])


_LISTED = 4096
"""Most channels for which the band matrix is a constant."""


def _band(e: Emitter, size: Dim, below: int, above: int, like: ir.Value) -> ir.Value:
    """1 where -below <= column - row <= above, else 0."""
    dtype = like.dtype or ir.DataType.FLOAT
    if isinstance(size, int) and size <= _LISTED:
        at = np.arange(size)
        ahead = at - at[:, None]
        return e.const((ahead >= -below) & (ahead <= above), dtype)
    row = e.arange(size)
    distance = e.op("Sub", row, e.unsqueeze(row, [1]))
    bounds = (("GreaterOrEqual", -below), ("LessOrEqual", above))
    return e.cast(e.op("And", *(e.compare(op, distance, e.const(bound)) for op, bound in bounds)), dtype)
