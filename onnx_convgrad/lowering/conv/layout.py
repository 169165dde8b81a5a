"""Sizes, transpositions and padding of operands, in forms that ONNX Runtime executes fast; batches that may be empty.

ONNX Runtime convolves an empty batch, but refuses a spatial axis without points, and refuses to broadcast matrices against
an empty axis; and it leaves a batch of products over no terms unset. So products of one matrix with every sample become a
Conv; a batch that becomes part of a spatial axis gets a sample of zeros if it is empty, and the result is cut; and sums over
no points are replaced by zero. Where the batch is known, or is never empty as in training, nothing is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.samples import cut_samples, filled, may_be_empty, with_samples

_FEW_ROWS = 48
"""Most rows of a matrix that a product with the identity transposes faster than a Transpose.

A Transpose runs on one thread, and takes ten times as long where the rows are a power of two apart.
"""

_FEW_OF_EACH = 32
"""Most rows of each matrix of a batch that a product with the identity transposes faster than a Transpose."""

# -- sizes -------------------------------------------------------------------------------------------------------------


def dims(e: Emitter, value: ir.Value, sizes: Sequence[int | None]) -> list[Dim]:
    """The sizes of a value: known ones as they are, others read at run time."""
    return [size if size is not None else e.dim(value, axis) for axis, size in enumerate(sizes)]


def x_dims(e: Emitter, x: ir.Value, spec: ConvSpec) -> list[Dim]:
    """The sizes of the data."""
    return dims(e, x, spec.x_shape)


def y_dims(e: Emitter, dy: ir.Value, spec: ConvSpec) -> list[Dim]:
    """The sizes of the output's gradient."""
    return dims(e, dy, spec.y_shape)


def features_of(e: Emitter, w: ir.Value, spec: ConvSpec) -> Dim:
    """The number of features, read from the weight if it is not known."""
    return spec.features if spec.features is not None else e.dim(w, 0)


# -- transpositions ----------------------------------------------------------------------------------------------------


def transpose_last(e: Emitter, v: ir.Value, rows: int) -> ir.Value:
    """[.., rows, columns] -> [.., columns, rows]: by a product if there are few rows, else by a Transpose on one thread."""
    if rows <= (_FEW_ROWS if e.rank(v) == 2 else _FEW_OF_EACH):
        return transpose_by_product(e, v, rows)
    return separate_transpose(e, v, [1, 0]) if e.rank(v) == 2 else e.swap_last(v)


def transpose_by_product(e: Emitter, v: ir.Value, rows: int) -> ir.Value:
    """[.., rows, columns] -> [.., columns, rows] by a product with the identity; by a Transpose where products round."""
    if rows == 1:
        return e.unsqueeze(e.squeeze(v, [-2]), [-1])
    columns = e.swap_last(v)
    return columns if e.target.narrow_products else e.matmul(columns, e.const(np.eye(rows), v.dtype))


def separate_transpose(e: Emitter, v: ir.Value, perm: Sequence[int]) -> ir.Value:
    """A Transpose that ONNX Runtime does not merge with a Reshape and Transpose that follow.

    Two that each copy rows or exchange two axes would become one of four axes, which moves single elements and takes up to
    20 times as long as the two. A leading axis of 1 prevents that.
    """
    return e.squeeze(e.transpose(e.unsqueeze(v, [0]), [0, *(axis + 1 for axis in perm)]), [0])


# -- points that hold several numbers ----------------------------------------------------------------------------------


def rows_of(size: Sequence[Dim], count: int) -> list[Dim]:
    """Sizes of an image whose points each hold `count` numbers."""
    last = size[-1]
    assert isinstance(last, int), "static_sizes requires it"
    return [*size[:-1], last * count]


def as_rows(e: Emitter, v: ir.Value, size: list[Dim]) -> tuple[ir.Value, int]:
    """[N, C, *size] as one image [1, C, .., N times the last size], and N."""
    batch = size[0]
    assert isinstance(batch, int), "known_batch requires it"
    v = transpose_last(e, e.reshape(v, [batch, e.size_mul(*size[1:])]), batch)
    return e.reshape(v, [1, size[1], *rows_of(size[2:], batch)]), batch


def from_rows(e: Emitter, v: ir.Value, size: list[Dim]) -> ir.Value:
    """[N, C, *size] from such an image."""
    return e.reshape(separate_transpose(e, e.reshape(v, [e.size_mul(*size[1:]), size[0]]), [1, 0]), size)


def interleave(e: Emitter, parts: list[ir.Value], lead: Dim, size: list[Dim], strides: Sequence[int]) -> ir.Value:
    """Interleave phases, listed in row-major order: each is [lead, *size], the result [lead, *(size * strides)]."""
    size = list(size)
    for axis in reversed(range(len(size))):
        s = strides[axis]
        if s > 1:
            flat = [e.size_mul(lead, *size[: axis + 1]), e.size_mul(*size[axis + 1 :])]
            rows = [e.reshape(part, flat) for part in parts]
            parts = [e.concat(rows[i : i + s], axis=1) for i in range(0, len(rows), s)]
            size[axis] = e.size_mul(size[axis], s)
    return parts[0]


# -- padding -----------------------------------------------------------------------------------------------------------


def zeros(e: Emitter, like: ir.Value, shape: Sequence[Dim]) -> ir.Value:
    """Zeros of the type of `like`."""
    return e.op("Expand", e.scalar(0, like), e.vector(shape))


def extend(e: Emitter, v: ir.Value, shape: Sequence[Dim], axis: int, before: int, after: int) -> ir.Value:
    """`v`, reshaped to `shape`, with zeros added at both ends of one axis; a negative amount trims.

    By a Concat where nothing is trimmed, which copies on every thread; Pad copies on one.
    """
    v = e.reshape(v, shape)
    size = shape[axis]

    def block(count: int) -> list[ir.Value]:
        return [zeros(e, v, [*shape[:axis], count, *shape[axis + 1 :]])] if count else []

    if isinstance(size, int) and min(before, after) <= -size:
        return block(size + before + after)[0]
    if min(before, after) < 0:
        return e.pad(v, [before], [after], [axis])
    return e.concat([*block(before), v, *block(after)], axis)


# -- batches that may be empty -----------------------------------------------------------------------------------------


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
