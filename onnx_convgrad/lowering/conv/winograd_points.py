"""Winograd's minimal filtering of several axes: from images to points of tiles, and from points back to images.

The layout of points is [groups * points, tiles * samples, channels per group], a batch of matrices; `winograd` multiplies
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.samples import filled, may_be_empty
from onnx_convgrad.lowering.conv.layout import separate_transpose
from onnx_convgrad.lowering.conv.winograd_axes import TiledAxis


def to_points(
    e: Emitter,
    v: ir.Value,
    size: list[Dim],
    axes: list[TiledAxis],
    kernels: list[np.ndarray],
    pads: Sequence[tuple[int, int]],
    steps: Sequence[int],
    groups: int,
    perm: Sequence[int] | None = None,
) -> ir.Value:
    """Cut [N, C, *size] into tiles, multiply each axis by its matrix [points, rows]: [groups points, tiles N, C / groups].

    `pads` are the rows of zeros around each axis: tile i of phase r begins at row `dilation step i + r - begin`. `perm`
    moves the spatial axes to the front, if `v` has another shape.
    """
    n, c, *spatial = size
    tiles: Dim
    perm = perm or [*range(2, 2 + len(axes)), 0, 1]
    if groups > 1:  # in two passes: ONNX Runtime moves single elements slowly unless it exchanges two axes
        c = e.size_div(c, groups)
        v = e.reshape(separate_transpose(e, v, perm), [e.size_mul(*spatial), n, groups, c])
        v = e.transpose(v, [2, 0, 1, 3])
    else:
        v = e.transpose(v, perm)
    points, tiles = groups, 1
    for i, (axis, kernel, (start, end), step) in enumerate(zip(axes, kernels, pads, steps, strict=True)):
        rows, count, phases = spatial[i], axis.count, axis.dilation
        assert count is not None, "the tiles are counted"
        v = e.reshape(v, [points, 1, tiles, rows, e.size_mul(*spatial[i + 1 :], n, c)])
        if isinstance(rows, int) and isinstance(count, int):
            need = ((count - 1) * step + kernel.shape[1]) * phases
            v = e.slice(v, [max(-start, 0)], [min(need - start, rows)], [3])
            low, high = max(start, 0), max(need - start - rows, 0)
            rows = need - low - high
        else:  # the last tile may reach past the end, and a Conv drops an incomplete one
            low, high = start, end + axis.tile - 1
        if kernel.size == 1 or (low != high and not e.target.asymmetric_pads):
            v = e.pad(v, [low], [high], [3])
            rows, low, high = e.size_add(rows, low + high), 0, 0
        elif phases > 1:
            v = e.pad(v, [low % phases], [high % phases], [3])
            rows = e.size_add(rows, low % phases + high % phases)
        if kernel.size > 1:
            rows = e.size_div(rows, phases)
            v = e.reshape(v, [points, 1, tiles, rows, e.size_mul(phases, *spatial[i + 1 :], n, c)])
            v = e.op(  # over three axes: ONNX Runtime would rearrange the channels of a Conv over two
                "Conv",
                v,
                e.const(kernel.reshape(-1, 1, 1, kernel.shape[1], 1), v.dtype),
                strides=[1, step, 1],
                pads=[0, low // phases, 0, 0, high // phases, 0],
            )
        points, tiles = points * kernel.shape[0], e.size_mul(tiles, count, phases)
    return e.reshape(v, [points, e.size_mul(tiles, n), c])


def from_points(
    e: Emitter, v: ir.Value, size: list[Dim], axes: list[TiledAxis], kernels: list[np.ndarray], groups: int
) -> ir.Value:
    """Multiply each axis of such points by its matrix [rows, points] and join the tiles: [N, C, *size]."""
    samples, channels, *spatial = size
    c, lead = e.size_div(channels, groups), [groups] if groups > 1 else []
    n, rank = filled(e, samples), len(axes)
    counts = [number for axis in axes for number in (axis.count or 0, axis.dilation)]
    behind: Dim = e.size_mul(*counts, n, c)
    points = groups * math.prod(kernel.shape[1] for kernel in kernels)
    for kernel in reversed(kernels):  # the last axis first, so that the last product is one of plain matrices
        points //= kernel.shape[1]
        if kernel.size > 1:
            v = e.reshape(v, [*([points] if points > 1 else []), kernel.shape[1], behind])
            v = e.matmul(e.const(kernel, v.dtype), v)
        behind = e.size_mul(behind, kernel.shape[0])
    heights = [kernel.shape[0] for kernel in kernels]
    places = _places(e, axes, heights, spatial)
    v = e.reshape(v, [*lead, e.size_mul(*heights, *counts), e.size_mul(n, c)])
    v = e.op("Gather", v, places, axis=len(lead))
    if lead:
        v = separate_transpose(e, e.reshape(v, [groups, e.size_mul(*spatial), n, c]), [1, 2, 0, 3])
    v = e.reshape(v, [*spatial, n, channels])
    if may_be_empty(e, samples):
        v = e.slice(v, [0], [samples], [rank])
    return e.transpose(v, [rank, rank + 1, *range(rank)])


def _places(e: Emitter, axes: list[TiledAxis], heights: Sequence[int], spatial: Sequence[Dim]) -> ir.Value:
    """The position in [*heights, *(count, dilation)] of each point of the image, row-major: a sum of one part per axis.

    One Gather joins the tiles, crops rows past the end, and runs on all threads, unlike a Transpose.
    """
    total: ir.Value | None = None
    counts = [e.size_mul(axis.count or 0, axis.dilation) for axis in axes]
    for i, (axis, height, size) in enumerate(zip(axes, heights, spatial, strict=True)):
        behind = e.size_mul(1, *counts[i + 1 :])
        tiles = e.size_mul(*heights[i + 1 :], *counts)
        part = e.reshape(_place(e, axis, height, size, tiles, behind), [size, *[1] * (len(axes) - 1 - i)])
        total = part if total is None else e.add(total, part)
    assert total is not None
    return e.reshape(total, [e.size_mul(*spatial)])


def _place(e: Emitter, axis: TiledAxis, height: int, size: Dim, tiles: Dim, behind: Dim) -> ir.Value:
    """The part of one axis: row `r` of tile `t` is at `r tiles + t behind`, where phases of a dilation count as tiles.

    An axis of unknown size has steps of 1, and makes `tiles` unknown for all axes.
    """
    if isinstance(size, int):
        tile, place = np.divmod(np.arange(size), height * axis.dilation)
        row, phase = np.divmod(place, axis.dilation)
        tile = tile * axis.dilation + phase
        if isinstance(tiles, int) and isinstance(behind, int):
            return e.const(row * tiles + tile * behind, ir.DataType.INT32)
        rows, number = (e.const(a, ir.DataType.INT64) for a in (row, tile))
    else:
        one = e.const(np.asarray(1), ir.DataType.INT64)
        last = e.squeeze(e.vector([size]), [0])
        at = e.op("Range", e.const(np.asarray(0), ir.DataType.INT64), last, one)
        number = e.op("Div", at, e.ints([height]))
        rows = e.op("Sub", at, e.op("Mul", number, e.ints([height])))
    return e.op("Add", e.op("Mul", rows, e.vector([tiles])), e.op("Mul", number, e.vector([behind])))


def weight_to_points(e: Emitter, w: ir.Value, size: list[Dim], kernels: list[np.ndarray], groups: int) -> ir.Value:
    """w [O, C / g, *k] by a matrix [points, k] on each axis: [g points, O / g, C / g].

    Must be emitted before the tiles: ONNX Runtime first runs the nodes that lead to the operand that was emitted last, and
    these values, several times as large as w, would be held for all layers before the first layer runs.
    """
    kernel = reduce(np.kron, kernels)
    points, (features, channels) = kernel.shape[0], (e.size_div(d, groups) for d in size)
    rows = e.reshape(w, [e.size_mul(size[0], channels), kernel.shape[1]])
    w = e.matmul(e.const(kernel, w.dtype), e.swap_last(rows))
    if groups > 1:
        w = e.transpose(e.reshape(w, [points, groups, e.size_mul(features, channels)]), [1, 0, 2])
    return e.reshape(w, [groups * points, features, channels])
