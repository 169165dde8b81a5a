"""Products and sums over batches of unknown size, which may be empty.

ONNX Runtime convolves an empty batch, but refuses a spatial axis without points, and refuses to broadcast matrices against
an empty axis; and it leaves a batch of products over no terms unset. So products of one matrix with every sample become a
Conv; a batch that becomes part of a spatial axis gets a sample of zeros if it is empty, and the result is cut; and sums over
no points are replaced by zero. Where the batch is known, or is never empty as in training, nothing is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.samples import cut_samples, filled, may_be_empty, with_samples


def zero_if_empty(e: Emitter, total: ir.Value, batch: Dim) -> ir.Value:
    """A sum over the batch, replaced by zero if the batch is empty: the runtime leaves that unset."""
    if not may_be_empty(e, batch):
        return total
    return e.where(e.op("Greater", batch, e.ints([0])), total, 0)


def product_of_samples(e: Emitter, matrix: ir.Value, v: ir.Value, shape: Sequence[Dim], groups: int) -> ir.Value:
    """matrix [M, K] or [g, M, K] times every sample of v [N, g * K, P], for `shape` N, M, K, P: [N, g * M, P]."""
    batch, rows, inner, points = shape
    if may_be_empty(e, batch) and v.dtype in e.target.conv_dtypes:
        kernels = e.reshape(matrix, [e.size_mul(rows, groups), inner, 1])
        return e.conv(e.reshape(v, [batch, e.size_mul(inner, groups), points]), kernels, group=groups)
    size: list[Dim] = [batch, *([groups] if groups > 1 else []), inner, points]
    v = with_samples(e, e.reshape(v, size), size)
    product = e.reshape(e.matmul(matrix, v), [filled(e, batch), e.size_mul(rows, groups), points])
    return cut_samples(e, product, batch)
