"""What a rule needs to keep the samples of a batch apart: where they are, and sums over everything else."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.layout import ONE, Samples
from onnx_convgrad.autodiff.per_sample.tracking import Tracker
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.emit import Dim, Emitter, known

__all__ = ["Batch"]


class Batch:
    """The samples of one graph. Rules move them to the first axis and sum over all others but some."""

    leading = Samples(0)
    """Samples on the first axis, one row each."""

    def __init__(self, e: Emitter, tracker: Tracker) -> None:
        self.e, self.tracker = e, tracker

    @property
    def count(self) -> Dim:
        """The number of samples."""
        return self.tracker.count

    def of(self, value: ir.Value) -> Samples:
        """Where a value holds the samples; raises `UnsupportedCase` if it holds none."""
        label = self.tracker[value]
        if not isinstance(label, Samples):
            raise UnsupportedCase(f"its operand {value.name!r} holds no samples.")
        return label

    def first(self, value: ir.Value, samples: Samples) -> ir.Value:
        """The samples moved to axis 0: `[N, *axes before, before, after, *axes behind]`, without `before`, `after` of 1."""
        dims, axis = self.e.dims(value), samples.axis
        split = [*dims[:axis], *self._split(samples), *dims[axis + 1 :]]
        at = axis + (samples.before != ONE)
        value = self.e.reshape(value, split) if not samples.plain else value
        return self.e.transpose(value, [at, *(i for i in range(len(split)) if i != at)])

    def _split(self, samples: Samples) -> list[Dim]:
        """The sizes that the axis of the samples is cut into: `before`, N, `after`."""
        before, after = samples.before.known, samples.after.known
        if before is None and after is None:
            raise UnsupportedCase("how many rows each sample has is not known while building.")
        sizes: list[Dim] = [-1 if before is None else before] if samples.before != ONE else []
        sizes.append(self.count)
        return [*sizes, -1 if after is None else after] if samples.after != ONE else sizes

    def sum(self, value: ir.Value, samples: Samples, kept: Sequence[int] = ()) -> ir.Value:
        """The sum over every axis but that of the samples and those `kept`: `[N, *kept]`."""
        rank = len(self.e.dims(value))
        moved = self.first(value, samples)
        own = len(self.e.dims(moved)) - rank  # axes that the axis of the samples was cut into
        axes = [*range(samples.axis), *[None] * own, *range(samples.axis + 1, rank)]
        return self.e.reduce_sum(moved, [i for i, axis in enumerate(axes, 1) if axis not in kept], keepdims=False)

    def fit(self, value: ir.Value, samples: Samples, operand: ir.Value) -> ir.Value:
        """Sum over what `operand` was broadcast along, but not over the samples: `[N, *operand.shape]`."""
        dims = self.e.dims(operand)
        extra = len(self.e.dims(value)) - len(dims)
        if any(known(d) is None for d in operand.shape or ()):
            raise UnsupportedCase(f"the shape {operand.shape} of its operand {operand.name!r} is not known.")
        kept = [i + extra for i, d in enumerate(dims) if d != 1]
        if samples.axis in kept:
            raise UnsupportedCase(f"its operand {operand.name!r} has rows of its own along the axis of the samples.")
        return self.stacked(self.sum(value, samples, kept), operand)

    def stacked(self, value: ir.Value, operand: ir.Value) -> ir.Value:
        """The value as `[N, *operand.shape]`."""
        value = self.e.reshape(value, [self.count, *self.e.dims(operand)])
        value.shape = ir.Shape([self.tracker.size, *(operand.shape or ())])
        return value
