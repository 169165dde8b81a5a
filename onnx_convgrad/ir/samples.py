"""Add a sample of zeros to a batch of unknown size that may turn out to be empty, and remove it again.

Kernels that fail on an empty axis then run for every size (see quirks.EMPTY_BATCH). Nothing is emitted if the size is known,
or if the batch has samples, as in training.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter


def may_be_empty(e: Emitter, batch: Dim) -> bool:
    """Whether a batch of this size may be empty at run time."""
    return not isinstance(batch, int) and not e.samples


def filled(e: Emitter, batch: Dim) -> Dim:
    """The batch size after `with_samples`: at least 1."""
    return e.size_max(batch, 1) if may_be_empty(e, batch) else batch


def with_samples(e: Emitter, v: ir.Value, shape: Sequence[Dim]) -> ir.Value:
    """Append a sample of zeros to `v`, of shape `shape` with the batch first, if it is empty.

    By a Concat, which copies on all threads; several gradients share it.
    """
    batch, *rest = shape
    if not may_be_empty(e, batch):
        return v
    missing = e.size_sub(filled(e, batch), batch)
    return e.concat([v, e.op("Expand", e.scalar(0, v), e.vector([missing, *rest]))], 0)


def cut_samples(e: Emitter, v: ir.Value, batch: Dim, axis: int = 0) -> ir.Value:
    """Remove the sample that `with_samples` added."""
    return e.slice(v, [0], [batch], [axis]) if may_be_empty(e, batch) else v


def squares(e: Emitter, value: ir.Value) -> ir.Value:
    """The sum of squares of each sample, in float32 or wider; three times as fast as ReduceSumSquare."""
    value = e.wide(value)
    flat = e.reshape(value, [e.dim(value, 0), e.size_mul(1, *e.dims(value)[1:])])
    return e.reduce_sum(e.square(flat), [1], keepdims=False)
