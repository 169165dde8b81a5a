"""Normalizations by statistics of the operand itself: with a scale and a bias, without, and softmax.

With the mean m and the variance v of a group of entries, and r = (v + eps)^(-1/2), InstanceNormalization,
GroupNormalization and LayerNormalization compute

    xhat = (x - m) r        y = scale xhat + B

If h = scale g is the cotangent of xhat, and m and v are functions of x,

    dx = r (h - mean(h) - xhat mean(h xhat))

Their rules recompute the statistics from x and center x before squaring, so that a large mean costs no digits. All sums of
float16 are taken in float32. If the rank is unknown, the graph computes the axes. Where the deviation, or the norm of
LpNormalization, is 0, the derivative is taken to be 0. The cross-entropy losses have no rule: they are differentiated
through their ONNX function bodies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import Factors, along, attribute, axes_of, fixed, mix, normalized, notation, rank_of
from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.registry import Cotangents, per_sample, vjp, zero
from onnx_convgrad.errors import require
from onnx_convgrad.ir.broadcasting import unbroadcast
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.normalized import Channels, Normalized, axes_from, size_from

# -- InstanceNormalization, GroupNormalization -------------------------------------------------------------------------


_NORMALIZES = mix("normalizes along")
_ALONG_AXIS = along(attribute("axis", -1), _NORMALIZES)


@vjp(
    "InstanceNormalization",
    wrt=("input", "scale", "B"),
    parameters=("scale", "B"),
    factors=notation("n c *s, c, c -> n c *s", broadcasts=True, s=_NORMALIZES),
    affine=("scale B",),
)
def instance_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[n, c, p] = scale[c] xhat[n, c, p] + B[c], normalized over the positions p of each sample and channel:

    dscale[c] = sum over n, p of g xhat, dB[c] = sum over n, p of g, dx as in the module's derivation.
    """
    x, scale, bias, gy = n["input"], n["scale"], n["B"], e.wide(g["output"])
    channels = Channels(e, x)
    data = e.wide(x)
    normalized = Normalized.of(e, data, axes_from(e, x, 2), n.float("epsilon", 1e-5))

    def scale_cotangent() -> ir.Value:
        each, count = e.mul(normalized.moment(gy), normalized.inverse), size_from(e, x, 2)  # the mean of g xhat
        return e.multiplied(channels.sum(e.unless_empty(each, count)), count)

    return {
        "input": lambda: e.cast_like(normalized.pull(gy, channels.spread(e.wide(scale))), x),
        "scale": lambda: e.cast_like(scale_cotangent(), scale),
        "B": lambda: e.cast_like(channels.sum(gy), bias),
    }


@vjp(
    "GroupNormalization",
    wrt=("X", "scale", "bias"),
    parameters=("scale", "bias"),
    factors=notation("n c *s, c, c -> n c *s", broadcasts=True, c=_NORMALIZES, s=_NORMALIZES),
    affine=("scale bias",),
)
def group_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[n, c, p] = scale[c] xhat[n, c, p] + bias[c], normalized over each sample's groups of channels:

    dscale[c] = sum over n, p of g xhat, dbias[c] = sum over n, p of g, dx as in the module's derivation.
    """
    x, scale, bias, gy = n["X"], n["scale"], n["bias"], e.wide(g["Y"])
    groups = n.int("num_groups", 1)
    channels = Channels(e, x)
    dims = [e.dim(x, 0), groups, e.size_div(size_from(e, x, 1), groups)]
    data = e.wide(x)
    normalized = Normalized.of(e, e.reshape(data, dims), e.ints([2]), n.float("epsilon", 1e-5))

    def data_cotangent() -> ir.Value:
        h = e.mul(gy, channels.spread(e.wide(scale)))
        return e.cast_like(e.reshape_like(normalized.pull(e.reshape(h, dims)), data), x)

    return {
        "X": data_cotangent,
        "scale": lambda: e.cast_like(channels.sum(e.mul(gy, e.reshape_like(normalized.value, data))), scale),
        "bias": lambda: e.cast_like(channels.sum(gy), bias),
    }


@per_sample("InstanceNormalization", "GroupNormalization")
def channel_normalization_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y[n, c, p] = scale[c] xhat[n, c, p] + B[c]: dscale[n, c] = sum over p of g xhat, dB[n, c] = sum over p of g."""
    x = e.wide(n.node.inputs[0])  # type: ignore[arg-type] # never absent
    gy, at, epsilon = e.wide(g[n.names[1][0]]), batch.of(n.y), n.float("epsilon", 1e-5)
    bias = n.names[0][2]

    def scale() -> ir.Value:
        if n.node.op_type == "InstanceNormalization":
            value = Normalized.of(e, x, axes_from(e, x, 2), epsilon).value
        else:
            groups = n.int("num_groups", 1)
            grouped = e.reshape(x, [e.dim(x, 0), groups, e.size_div(size_from(e, x, 1), groups)])
            value = e.reshape_like(Normalized.of(e, grouped, e.ints([2]), epsilon).value, x)
        return e.cast_like(batch.sum(e.mul(gy, value), at, [1]), n["scale"])

    return {"scale": scale, bias: lambda: e.cast_like(batch.sum(gy, at, [1]), n[bias])}


# -- LayerNormalization ------------------------------------------------------------------------------------------------


def _layer(n: Call) -> Factors:
    """The axes from `axis` on are normalized; mean and deviation have them with size one."""
    names = axes_of(n["X"])
    (first,) = normalized([n.int("axis", -1)], len(names))
    behind = [None if v is None else names[len(names) - rank_of(v) :] for v in n.inputs[1:]]
    left = tuple(name if axis < first else "" for axis, name in enumerate(names))
    results = (names, left, left)[: len(n.node.outputs)]
    work = dict.fromkeys(names[first:], _NORMALIZES)
    return Factors((names, *behind), results, work, broadcasts=True, ahead=attribute("axis", -1).ahead(n))


@vjp("LayerNormalization", wrt=("X", "Scale", "B"), parameters=("Scale", "B"), factors=_layer, affine=("Scale B",))
def layer_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y = Scale xhat + B, normalized over the M entries of the last axes.

    Cotangents of the outputs Mean and InvStdDev add (dMean - dInvStdDev r^2 xhat) / M to dx.
    """
    x, scale, axis = n["X"], n["Scale"], n.int("axis", -1)
    data = e.wide(x)
    normalized = Normalized.of(e, data, axes_from(e, x, axis), n.float("epsilon", 1e-5))
    gy = None if g["Y"] is None else e.wide(g["Y"])

    def data_cotangent() -> ir.Value:
        terms = [] if gy is None else [normalized.pull(e.mul(gy, e.wide(scale)))]
        count = e.size_as(size_from(e, x, axis), data)
        if g.get("Mean") is not None:
            share = e.div(e.cast_like(g["Mean"], data), count)
            terms.append(share if terms else e.expand(share, data))
        if g.get("InvStdDev") is not None:
            weight = e.mul(e.cast_like(g["InvStdDev"], data), e.square(normalized.inverse))
            terms.append(e.mul(normalized.value, e.neg(e.div(weight, count))))
        return e.cast_like(e.sum(terms), x)

    def summed(value: ir.Value, operand: ir.Value) -> ir.Value:
        return e.cast_like(unbroadcast(e, value, e.wide(operand), data), operand)

    return {
        "X": data_cotangent,
        "Scale": lambda: None if gy is None else summed(e.mul(gy, normalized.value), scale),
        "B": lambda: None if gy is None else summed(gy, n["B"]),
    }


@per_sample("LayerNormalization")
def layer_normalization_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y = Scale xhat + B: dScale[n] = g xhat and dB[n] = g, summed over the axes along which Scale and B broadcast."""
    x, at = e.wide(n["X"]), batch.of(n.y)
    if g["Y"] is None:
        return {}
    gy = e.wide(g["Y"])

    def scale() -> ir.Value:
        normalized = Normalized.of(e, x, axes_from(e, x, n.int("axis", -1)), n.float("epsilon", 1e-5))
        return e.cast_like(batch.fit(e.mul(gy, normalized.value), at, n["Scale"]), n["Scale"])

    return {"Scale": scale, "B": lambda: e.cast_like(batch.fit(gy, at, n["B"]), n["B"])}


_MVN_EPSILON = 1e-9
"""The number that the ONNX specification adds to the deviation."""


# -- without parameters ------------------------------------------------------------------------------------------------


@vjp("LpNormalization", wrt="input", factors=_ALONG_AXIS)
def lp_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = x / s with s = |x|_p: dx = (g - ds/dx sum(g y)) / s, where ds/dx is y for p = 2 and sign(x) for p = 1."""
    x, y, gy = n["input"], n.y, g["output"]
    axis, p = n.int("axis", -1), n.int("p", 2)
    require(p in (1, 2), f"p is {p}; the operator is defined for 1 and 2.")
    norm = e.reduce("ReduceL1" if p == 1 else "ReduceL2", x, [axis])
    nonzero = e.compare("Greater", norm, 0)
    inverse = e.where(nonzero, e.op("Reciprocal", e.where(nonzero, norm, 1)), 0)
    product = e.reduce_sum(e.mul(gy, y), [axis])
    return e.mul(e.sub(gy, e.mul(y if p == 2 else e.op("Sign", x), product)), inverse)


def _listed_axes(n: Call, _: int) -> Sequence[int]:
    return n.ints("axes") or (0, 2, 3)


@vjp("MeanVarianceNormalization", wrt="X", factors=along(_listed_axes, _NORMALIZES))
def mean_variance_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = (x - m) / d with d = s + eps: dx = (g - mean(g)) / d - (x - m) mean(g (x - m)) / (d^2 s)."""
    x, gy = e.wide(n["X"]), e.wide(g["Y"])
    axes = _listed_axes(n, 0)
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


@vjp("LRN", wrt="X", factors=along(fixed(1), _NORMALIZES))
def lrn_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[c] = x[c] s[c]^-beta, s[c] = bias + alpha / size times the sum of x^2 near c:

    dx[i] = g[i] s[i]^-beta - 2 alpha beta / size x[i] times the sum of g[c] y[c] / s[c] over c whose window has i.
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


# -- Softmax -----------------------------------------------------------------------------------------------------------


def _total(e: Emitter, n: Call, value: ir.Value) -> ir.Value:
    """The sum along the axis of the operator, which keeps size one."""
    return e.reduce_sum(value, [n.int("axis", -1)])


@vjp("Softmax", wrt="input", factors=_ALONG_AXIS, bounds=(0, 1))
def softmax_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[i] = exp x[i] / sum over j of exp x[j], so dy[i]/dx[j] = y[i] ([i = j] - y[j]):

    dx[i] = y[i] (g[i] - sum over j of y[j] g[j]).
    """
    y, gy = _without_nan(e, n.y), g["output"]
    return e.mul(y, e.sub(gy, _total(e, n, e.mul(y, gy))))


def _without_nan(e: Emitter, y: ir.Value) -> ir.Value:
    """y with 0 in place of NaN if a later Where discards NaN: attention with a fully masked row computes NaN for it."""
    readers = list(y.uses())
    for reader, index in readers:
        if is_op(reader, "Cast", "CastLike", "Identity", "Dropout") and index == 0:
            readers += reader.outputs[0].uses()
        elif is_op(reader, "Where") and index > 0:
            safe = reader.outputs[0] if _is_zero_for_nan(e, reader, y) else e.where(e.op("IsNaN", y), 0, y)
            return e.typed(safe, y)
    return y


def _is_zero_for_nan(e: Emitter, where: ir.Node, y: ir.Value) -> bool:
    condition, instead, kept = where.inputs
    test = condition.producer() if condition is not None else None
    constant = e.constant_of(instead) if instead is not None else None
    return kept is y and is_op(test, "IsNaN") and test.inputs[0] is y and constant is not None and not constant.any()


@vjp("LogSoftmax", wrt="input", factors=_ALONG_AXIS, bounds=(-math.inf, 0))
def log_softmax_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """dy[i]/dx[j] = [i = j] - exp y[j]: dx[j] = g[j] - exp(y[j]) sum over i of g[i]."""
    gy = g["output"]
    return e.sub(gy, e.mul(e.op("Exp", n.y), _total(e, n, gy)))


zero("Hardmax", factors=_ALONG_AXIS, bounds=(0, 1))
