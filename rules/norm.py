"""Normalizations with a scale and a bias: instance, layer and group.

With the mean m and the variance v of a group of entries, and r = (v + eps)^(-1/2),

    xhat = (x - m) r        y = scale xhat + B

If h = scale g is the cotangent of xhat, and m and v are functions of x,

    dx = r (h - mean(h) - xhat mean(h xhat))

The rules recompute the statistics from x and center x before squaring, so that a large mean costs no digits. All sums of
float16 are taken in float32. If the rank is unknown, the graph computes the axes.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import Factors, attribute, mix, normalized, notation, rank_of
from onnx_convgrad.autodiff.registry import Cotangents, vjp
from onnx_convgrad.ir.broadcasting import unbroadcast
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.normalized import Channels, Normalized, axes_from, size_from

# -- InstanceNormalization, GroupNormalization -------------------------------------------------------------------------


_NORMALIZES = mix("normalizes along")


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


# -- LayerNormalization ------------------------------------------------------------------------------------------------


def _layer(n: Call) -> Factors:
    """The axes from `axis` on are normalized; mean and deviation have them with size one."""
    names = tuple(f"i{axis}" for axis in range(rank_of(n["X"])))
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
    x, scale, bias = n["X"], n["Scale"], n.get("B")
    axis = n.int("axis", -1)
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

    def summed(value: ir.Value, operand: ir.Value | None) -> ir.Value:
        assert operand is not None
        return e.cast_like(unbroadcast(e, value, e.wide(operand), data), operand)

    return {
        "X": data_cotangent,
        "Scale": lambda: None if gy is None else summed(e.mul(gy, normalized.value), scale),
        "B": lambda: None if gy is None else summed(gy, bias),
    }
