"""Batches of unknown size, which may be empty: a sample of zeros is added to those that have none.

So what an empty axis would break runs for every size. Where the batch is known, or has samples as in training, nothing is
emitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter

__all__ = ["cut_samples", "filled", "may_be_empty", "squares", "with_samples"]


def may_be_empty(e: Emitter, batch: Dim) -> bool:
    """Whether a batch of this size may turn out to have no samples."""
    return not isinstance(batch, int) and not e.samples


def filled(e: Emitter, batch: Dim) -> Dim:
    """The batch size of `with_samples`."""
    return e.size_max(batch, 1) if may_be_empty(e, batch) else batch


def with_samples(e: Emitter, v: ir.Value, shape: Sequence[Dim]) -> ir.Value:
    """`v`, whose shape is `shape` with the batch first, with a sample of zeros if it has none.

    By a Concat, which copies on every thread; equal ones of several gradients are one.
    """
    batch, *rest = shape
    if not may_be_empty(e, batch):
        return v
    missing = e.size_sub(filled(e, batch), batch)
    return e.concat([v, e.op("Expand", e.scalar(0, v), e.vector([missing, *rest]))], 0)


def cut_samples(e: Emitter, v: ir.Value, batch: Dim, axis: int = 0) -> ir.Value:
    """`v` without what `with_samples` added to the batch."""
    return e.slice(v, [0], [batch], [axis]) if may_be_empty(e, batch) else v


def squares(e: Emitter, value: ir.Value) -> ir.Value:
    """The sum of the squares of each sample, in at least single precision: ReduceSumSquare takes three times as long."""
    if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        value = e.cast(value, ir.DataType.FLOAT)
    flat = e.reshape(value, [e.dim(value, 0), e.size_mul(1, *e.dims(value)[1:])])
    return e.reduce_sum(e.square(flat), [1], keepdims=False)
