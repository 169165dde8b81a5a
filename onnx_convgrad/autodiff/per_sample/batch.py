"""The samples of a batch, as rules per sample see them: their axis in a value, and sums over all other axes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.sample_axis import ONE, Samples
from onnx_convgrad.autodiff.per_sample.tracker import Tracker
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.emit import Dim, Emitter, known


class Batch:
    """The samples of one graph. Rules move them to the first axis and sum over other axes."""

    leading = Samples(0)
    """Samples on the first axis, with one row each."""

    def __init__(self, e: Emitter, tracker: Tracker) -> None:
        self.e, self.tracker = e, tracker

    @property
    def count(self) -> Dim:
        """The number of samples."""
        return self.tracker.count

    def of(self, value: ir.Value) -> Samples:
        """The axis of the samples in a value; raises `UnsupportedCase` if it has none."""
        label = self.tracker[value]
        if not isinstance(label, Samples):
            raise UnsupportedCase(f"its operand {value.name!r} holds no samples.")
        return label

    def first(self, value: ir.Value, samples: Samples) -> ir.Value:
        """The value with the samples moved to axis 0: `[N, *axes before, before, after, *axes after]`.

        `before` and `after` are left out if they are 1.
        """
        dims, axis = self.e.dims(value), samples.axis
        split = [*dims[:axis], *self._split(samples), *dims[axis + 1 :]]
        at = axis + (samples.before != ONE)
        value = self.e.reshape(value, split) if not samples.plain else value
        return self.e.transpose(value, [at, *(i for i in range(len(split)) if i != at)])

    def _split(self, samples: Samples) -> list[Dim]:
        """The sizes that the axis of the samples is split into: `before`, N, `after`."""
        before, after = samples.before.known, samples.after.known
        if before is None and after is None:
            raise UnsupportedCase("the number of rows per sample is not known while building.")
        sizes: list[Dim] = [-1 if before is None else before] if samples.before != ONE else []
        sizes.append(self.count)
        return [*sizes, -1 if after is None else after] if samples.after != ONE else sizes

    def sum(self, value: ir.Value, samples: Samples, kept: Sequence[int] = ()) -> ir.Value:
        """The sum over all axes except that of the samples and those `kept`: `[N, *kept]`."""
        rank = len(self.e.dims(value))
        moved = self.first(value, samples)
        own = len(self.e.dims(moved)) - rank  # axes that the axis of the samples was split into
        axes = [*range(samples.axis), *[None] * own, *range(samples.axis + 1, rank)]
        return self.e.reduce_sum(moved, [i for i, axis in enumerate(axes, 1) if axis not in kept], keepdims=False)

    def fit(self, value: ir.Value, samples: Samples, operand: ir.Value) -> ir.Value:
        """The sum over all axes along which `operand` is broadcast, except the samples: `[N, *operand.shape]`."""
        dims = self.e.dims(operand)
        extra = len(self.e.dims(value)) - len(dims)
        if any(known(d) is None for d in operand.shape or ()):
            raise UnsupportedCase(f"the shape {operand.shape} of its operand {operand.name!r} is not known.")
        kept = [i + extra for i, d in enumerate(dims) if d != 1]
        if samples.axis in kept:
            raise UnsupportedCase(f"its operand {operand.name!r} has its own rows along the axis of the samples.")
        return self.stacked(self.sum(value, samples, kept), operand)

    def zeros(self, operand: ir.Value) -> ir.Value:
        """The gradients of an operand that nothing depends on."""
        if self.tracker[operand] is not None:
            return self.e.zeros_like(operand)
        shape = self.e.vector([self.count, *self.e.dims(operand)])
        return self.stacked(self.e.op("Expand", self.e.scalar(0, operand), shape), operand)

    def stacked(self, value: ir.Value, operand: ir.Value) -> ir.Value:
        """The value as `[N, *operand.shape]`."""
        value = self.e.reshape(value, [self.count, *self.e.dims(operand)])
        value.shape = ir.Shape([self.tracker.size, *(operand.shape or ())])
        return value
