"""Statistics that normalizations share: sums per channel, and values normalized over axes.

All of it also works with axes that the graph computes, because the rank of a value may be unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter

_LISTED = 2**20
"""Most channels for which the mean 0 and the variance 1 are constants."""

# -- axes -------------------------------------------------------------------------------------------------------------


def other_axes(e: Emitter, value: ir.Value, axis: int) -> ir.Value:
    """Every axis of `value` but one, as a vector; the graph computes it if the rank is unknown."""
    if value.shape is not None:
        rank = len(value.shape)
        return e.ints(i for i in range(rank) if i != axis % rank)
    rank_ = e.op("Shape", e.op("Shape", value))
    every = e.arange(rank_)
    here = e.ints([axis]) if axis >= 0 else e.op("Add", rank_, e.ints([axis]))
    return e.op("Compress", every, e.op("Not", e.compare("Equal", every, here)), axis=0)


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
