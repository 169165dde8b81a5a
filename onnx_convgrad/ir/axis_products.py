"""Products of a tensor with one matrix along one axis, and faster forms for special matrices.

    y[.., q, ..] = sum over p of matrix[q, p] g[.., p, ..]

Each function emits reshapes to at most three axes and one product, convolution or pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter


def contract(e: Emitter, g: ir.Value, matrix: ir.Value, axis: int, sizes: list[Dim], size: Dim) -> ir.Value:
    """The product along `axis`, which gets the size `size`; updates `sizes`, the dimensions of g."""
    before, after = sizes[:axis], sizes[axis + 1 :]
    old, sizes[axis] = sizes[axis], size
    if not after and before:
        return e.matmul(g, e.transpose(matrix, [1, 0]))
    if len(after) == 1 and axis < 3:
        return e.matmul(_per_batch(e, matrix, before), g)
    lead: list[Dim] = [before[0], e.size_mul(*before[1:])] if axis > 1 else list(before)
    columns = e.reshape(g, [*lead, old, e.size_mul(*after)])
    return e.reshape(e.matmul(_per_batch(e, matrix, lead), columns), sizes)


def contract_blocks(
    e: Emitter, g: ir.Value, matrices: ir.Value, rows: ir.Value, axis: int, sizes: list[Dim], size: Dim
) -> ir.Value:
    """The product along `axis` with a matrix that is zero outside of blocks; updates `sizes`, the dimensions of g.

    Block k of `matrices` [blocks, height, width] multiplies the elements `rows[k]` of g to the next `width` results.
    """
    before, after = e.size_mul(1, *sizes[:axis]), e.size_mul(1, *sizes[axis + 1 :])
    blocks, height, width = (d for d in e.dims(matrices) if isinstance(d, int))
    v = e.gather(e.reshape(g, [before, sizes[axis], after]), rows, axis=1)
    v = e.reshape(e.transpose(v, [1, 0, 3, 2]), [blocks, e.size_mul(before, after), height])
    v = e.reshape(e.matmul(v, matrices), [blocks, before, after, width])
    v = e.reshape(e.transpose(v, [1, 0, 3, 2]), [before, blocks * width, after])
    sizes[axis] = size
    return e.reshape(e.slice(v, [0], [size], [1]), sizes)


LONG_AXIS = 128
"""Smallest size for which a product with a matrix takes longer than `weigh_windows`."""


def weigh_windows(e: Emitter, g: ir.Value, factor: int, axis: int, sizes: list[Dim]) -> ir.Value:
    """The product with the adjoint of linear interpolation by a whole factor k, as a Conv of stride k; updates `sizes`.

    y[k m + r] = (1 - |d|) x[m] + |d| x[m +- 1] with d = (r + 1/2) / k - 1/2, whose sign determines the neighbor. Beyond
    the ends the first and the last element are repeated; their cotangents are collected by extending g with its mirror
    image.
    """
    before, inner, rows = e.size_mul(1, *sizes[:axis]), e.size_mul(1, *sizes[axis + 1 :]), sizes[axis]
    assert isinstance(rows, int), "the size of the axis is known"
    v = e.reshape(g, [before, rows, inner])
    first = e.slice(v, [factor - 1], [-rows - 1], [1], [-1])
    last = e.slice(v, [rows - 1], [rows - factor - 1], [1], [-1])
    offset = (np.arange(factor) + 0.5) / factor - 0.5
    weights = np.concatenate([offset.clip(0), 1 - np.abs(offset), (-offset).clip(0)])
    extra = [1] if e.target.channel_block > 1 else []  # a third axis, as images would be moved into blocks of channels
    lead = [before, 1, *extra]
    long = [1, rows + 2 * factor] if inner == 1 else [rows + 2 * factor, inner]
    kernel = [*[1] * (len(lead) - 1), *([1, 3 * factor] if inner == 1 else [3 * factor, 1])]
    strides = [*[1] * (len(lead) - 2), *([1, factor] if inner == 1 else [factor, 1])]
    data = e.reshape(e.concat([first, v, last], 1), [*lead, *long])
    sizes[axis] = rows // factor
    return e.reshape(e.conv(data, e.const(weights.reshape([1, *kernel]), g.dtype), strides=strides), sizes)


def _per_batch(e: Emitter, matrix: ir.Value, lead: Sequence[Dim]) -> ir.Value:
    """The matrix, repeated along a batch that may be empty: ONNX Runtime does not broadcast a left operand to size 0."""
    if not lead or (isinstance(lead[0], int) and lead[0] > 0):
        return matrix
    axes = list(range(len(lead)))
    return e.op("Expand", e.unsqueeze(matrix, axes), e.vector([lead[0], *(1 for _ in axes[1:]), 1, 1]))


def contract_unranked(e: Emitter, g: ir.Value, matrix: ir.Value, axis: int) -> ir.Value:
    """The product along `axis` of a tensor of unknown rank: the graph multiplies the sizes before and after the axis."""
    first = e.ints([0])
    before, after = e.op("Shape", g, start=0, end=axis), e.op("Shape", g, start=axis + 1)
    size = e.op("Shape", matrix, start=0, end=1)
    outer, inner = (e.op("ReduceProd", part, first, keepdims=1) for part in (before, after))
    flat: list[Dim] = [outer, e.dim(g, axis), inner]
    columns = e.op("Reshape", g, e.vector(flat), allowzero=1)
    return e.op(
        "Reshape",
        e.matmul(_per_batch(e, matrix, flat[:1]), columns),
        e.op("Concat", before, size, after, axis=0),
        allowzero=1,
    )


def sum_blocks(e: Emitter, g: ir.Value, repeats: dict[int, int], sizes: list[Dim]) -> ir.Value:
    """Sums over blocks of `repeats[axis]` elements, by a pool for its dtypes and ranks, else over split axes."""
    rank = len(sizes)
    if min(repeats) >= 2 and rank <= 5 and g.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        kernel = [repeats.get(axis, 1) for axis in range(2, rank)]
        means = e.op("AveragePool", g, kernel_shape=kernel, strides=kernel)
        return e.mul(means, math.prod(kernel))
    split: list[Dim] = []
    copies = []
    for axis, size in enumerate(sizes):
        if axis not in repeats:
            split.append(size)
            continue
        copies.append(len(split) + 1)
        split += [e.size_div(size, repeats[axis]), repeats[axis]]
    return e.reduce_sum(e.reshape(g, split), copies, keepdims=False)
