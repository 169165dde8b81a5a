"""Normalizations with a scale and a bias: instance, layer and group, and what they share with `norm_batch`.

With the mean m and the variance v of a group of entries, and r = (v + eps)^(-1/2),

    xhat = (x - m) r        y = scale xhat + B

If h = scale g is the cotangent of xhat, and m and v are functions of x,

    dx = r (h - mean(h) - xhat mean(h xhat))

The rules recompute the statistics from x and center x before squaring, so that a large mean costs no digits. All sums of
float16 are taken in float32. If the rank is unknown, the graph computes the axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import Factors, attribute, mix, normalized, notation, rank_of
from onnx_convgrad.autodiff.registry import Cotangents, vjp
from onnx_convgrad.ir.broadcasting import unbroadcast
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.rules.movement import other_axes

_LISTED = 2**20
"""Channels up to which the mean 0 and the variance 1 are constants."""

# -- precision and axes ------------------------------------------------------------------------------------------------


def wide(e: Emitter, value: ir.Value) -> ir.Value:
    """The value in a dtype for sums: float32 in place of half precision."""
    return e.wide(value)


def narrow(e: Emitter, value: ir.Value, like: ir.Value) -> ir.Value:
    """The value in the dtype of `like`."""
    return e.cast_like(value, like)


def axes_from(e: Emitter, value: ir.Value, axis: int) -> ir.Value:
    """The axes from `axis` to the last, as a vector: constant if `axis` is negative or the rank is known."""
    if axis < 0:
        return e.ints(range(axis, 0))
    if value.shape is not None:
        return e.ints(range(axis, len(value.shape)))
    return e.op("Range", e.const(axis), _rank_at_run_time(e, value), e.const(1))


def _rank_at_run_time(e: Emitter, value: ir.Value) -> ir.Value:
    return e.squeeze(e.op("Shape", e.op("Shape", value)), [0])


def size_from(e: Emitter, value: ir.Value, axis: int) -> Dim:
    """The product of the sizes from `axis` to the last."""
    if value.shape is not None:
        rank = len(value.shape)
        return e.size_mul(*(e.dim(value, i) for i in range(axis % rank if axis < 0 else axis, rank)))
    return e.op("ReduceProd", e.op("Shape", value, start=axis), keepdims=1)


def reduce(e: Emitter, op_type: str, value: ir.Value, axes: ir.Value, *, keepdims: bool = True) -> ir.Value:
    """A Reduce operator over axes that the graph may compute."""
    return e.op(op_type, value, axes, keepdims=int(keepdims), noop_with_empty_axes=1)


@dataclass(frozen=True, slots=True)
class Channels:
    """The channels of `x`, its axis 1: sums over all other axes, and broadcasting along them. A vector is one channel."""

    e: Emitter
    x: ir.Value

    @property
    def rank(self) -> int | None:
        return None if self.x.shape is None else len(self.x.shape)

    @property
    def axes(self) -> ir.Value:
        return self.e.ints([0]) if self.rank == 1 else other_axes(self.e, self.x, 1)

    def spread(self, value: ir.Value) -> ir.Value:
        """A vector with an entry per channel, reshaped to broadcast against x."""
        if self.rank is not None:
            return self.e.unsqueeze(value, range(1, self.rank - 1))
        at = self.e.op("Range", self.e.const(0), _rank_at_run_time(self.e, self.x), self.e.const(1))
        here = self.e.compare("Equal", at, self.e.const(1))
        return self.e.op("Reshape", value, self.e.op("Where", here, self.e.ints([-1]), self.e.ints([1])))

    def sum(self, value: ir.Value) -> ir.Value:
        """The sum over all axes but that of the channels: a vector."""
        flat = self.rank is not None and self.rank != 1
        total = reduce(self.e, "ReduceSum", value, self.axes, keepdims=not flat)
        return total if flat else self.flat(total)

    def affine(self, value: ir.Value, slope: ir.Value, shift: ir.Value) -> ir.Value:
        """slope[c] value + shift[c] as one node: a BatchNormalization with mean 0 and variance 1."""
        if self.rank is None or self.rank < 2:
            return self.e.add(self.e.mul(value, self.spread(slope)), self.spread(shift))
        size = self.e.dim(slope, 0)
        listed = isinstance(size, int) and size <= _LISTED
        plain = [self.e.const(np.full(size, v), slope.dtype) if listed else self.e.full_like(slope, v) for v in (0, 1)]
        return self.e.typed(self.e.op("BatchNormalization", value, slope, shift, *plain, epsilon=0.0), value)

    def flat(self, value: ir.Value) -> ir.Value:
        """A vector from a value whose other axes have size one."""
        return self.e.reshape(value, [-1])


@dataclass(frozen=True, slots=True)
class Normalized:
    """x normalized over `axes`: x - m and r, in which these axes have size one."""

    e: Emitter
    centered: ir.Value
    inverse: ir.Value
    axes: ir.Value

    @classmethod
    def of(cls, e: Emitter, x: ir.Value, axes: ir.Value, epsilon: float) -> Normalized:
        centered = e.sub(x, reduce(e, "ReduceMean", x, axes))
        return cls(e, centered, inverse_deviation(e, reduce(e, "ReduceMean", e.square(centered), axes), epsilon), axes)

    @property
    def value(self) -> ir.Value:
        return self.e.mul(self.centered, self.inverse)

    def mean(self, value: ir.Value) -> ir.Value:
        return reduce(self.e, "ReduceMean", value, self.axes)

    def moment(self, h: ir.Value) -> ir.Value:
        """mean(h (x - m)), with h centered first, so that rounding errors of m have no effect."""
        return self.mean(self.e.mul(self._centre(h), self.centered))

    def pull(self, h: ir.Value, scale: ir.Value | None = None) -> ir.Value:
        """dx = scale r (h - mean(h) - (x - m) r^2 mean(h (x - m))), where scale h is the cotangent of xhat.

        `scale` is constant over `axes`, and 1 by default. This form does not compute xhat, which would be another product.
        """
        e = self.e
        slope = e.mul(self.moment(h), e.square(self.inverse))
        factor = self.inverse if scale is None else e.mul(self.inverse, scale)
        return e.mul(e.sub(self._centre(h), e.mul(self.centered, slope)), factor)

    def _centre(self, h: ir.Value) -> ir.Value:
        return self.e.sub(h, self.mean(h))


def inverse_deviation(e: Emitter, variance: ir.Value, epsilon: float) -> ir.Value:
    """(v + eps)^(-1/2)."""
    return e.op("Reciprocal", e.op("Sqrt", e.add(variance, epsilon)))


# -- InstanceNormalization, GroupNormalization -------------------------------------------------------------------------


_NORMALIZES = mix("normalizes along")


@vjp(
    "InstanceNormalization",
    wrt=("input", "scale", "B"),
    parameters=("scale", "B"),
    factors=notation("n c *s, c, c -> n c *s", broadcasts=True, s=_NORMALIZES),
)
def instance_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[n, c, p] = scale[c] xhat[n, c, p] + B[c], normalized over the positions p of each sample and channel:

    dscale[c] = sum over n, p of g xhat, dB[c] = sum over n, p of g, dx as in the module's derivation.
    """
    x, scale, bias, gy = n["input"], n["scale"], n["B"], wide(e, g["output"])
    channels = Channels(e, x)
    data = wide(e, x)
    normalized = Normalized.of(e, data, axes_from(e, x, 2), n.float("epsilon", 1e-5))

    def scale_cotangent() -> ir.Value:
        each, count = e.mul(normalized.moment(gy), normalized.inverse), size_from(e, x, 2)  # the mean of g xhat
        return e.multiplied(channels.sum(e.unless_empty(each, count)), count)

    return {
        "input": lambda: narrow(e, normalized.pull(gy, channels.spread(wide(e, scale))), x),
        "scale": lambda: narrow(e, scale_cotangent(), scale),
        "B": lambda: narrow(e, channels.sum(gy), bias),
    }


@vjp(
    "GroupNormalization",
    wrt=("X", "scale", "bias"),
    parameters=("scale", "bias"),
    factors=notation("n c *s, c, c -> n c *s", broadcasts=True, c=_NORMALIZES, s=_NORMALIZES),
)
def group_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[n, c, p] = scale[c] xhat[n, c, p] + bias[c], normalized over each sample's groups of channels:

    dscale[c] = sum over n, p of g xhat, dbias[c] = sum over n, p of g, dx as in the module's derivation.
    """
    x, scale, bias, gy = n["X"], n["scale"], n["bias"], wide(e, g["Y"])
    groups = n.int("num_groups", 1)
    channels = Channels(e, x)
    dims = [e.dim(x, 0), groups, e.size_div(size_from(e, x, 1), groups)]
    data = wide(e, x)
    normalized = Normalized.of(e, e.reshape(data, dims), e.ints([2]), n.float("epsilon", 1e-5))

    def data_cotangent() -> ir.Value:
        h = e.mul(gy, channels.spread(wide(e, scale)))
        return narrow(e, e.reshape_like(normalized.pull(e.reshape(h, dims)), data), x)

    return {
        "X": data_cotangent,
        "scale": lambda: narrow(e, channels.sum(e.mul(gy, e.reshape_like(normalized.value, data))), scale),
        "bias": lambda: narrow(e, channels.sum(gy), bias),
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


@vjp("LayerNormalization", wrt=("X", "Scale", "B"), parameters=("Scale", "B"), factors=_layer)
def layer_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y = Scale xhat + B, normalized over the M entries of the last axes.

    Cotangents of the outputs Mean and InvStdDev add (dMean - dInvStdDev r^2 xhat) / M to dx.
    """
    x, scale, bias = n["X"], n["Scale"], n.get("B")
    axis = n.int("axis", -1)
    data = wide(e, x)
    normalized = Normalized.of(e, data, axes_from(e, x, axis), n.float("epsilon", 1e-5))
    gy = None if g["Y"] is None else wide(e, g["Y"])

    def data_cotangent() -> ir.Value:
        terms = [] if gy is None else [normalized.pull(e.mul(gy, wide(e, scale)))]
        count = e.size_as(size_from(e, x, axis), data)
        if g.get("Mean") is not None:
            share = e.div(narrow(e, g["Mean"], data), count)
            terms.append(share if terms else e.expand(share, data))
        if g.get("InvStdDev") is not None:
            weight = e.mul(narrow(e, g["InvStdDev"], data), e.square(normalized.inverse))
            terms.append(e.mul(normalized.value, e.neg(e.div(weight, count))))
        return narrow(e, e.sum(terms), x)

    def summed(value: ir.Value, operand: ir.Value | None) -> ir.Value:
        assert operand is not None
        return narrow(e, unbroadcast(e, value, wide(e, operand), data), operand)

    return {
        "X": data_cotangent,
        "Scale": lambda: None if gy is None else summed(e.mul(gy, normalized.value), scale),
        "B": lambda: None if gy is None else summed(gy, bias),
    }
