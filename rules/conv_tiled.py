"""Depthwise convolutions that make several rows at once, so that each patch is gathered for more than one output.

A depthwise convolution gathers as many values as it multiplies. Taking a tile of outputs for the channels of another
Conv, with kernels as large as what the tile depends on and strides as large as the tile, gathers each value for all of
them; and the product has several rows:

    forward     y[R u + r]  = sum over t of x[s R u + s r + d t - b] w[t]       a kernel of s (R - 1) + span rows
    dX          dx[T u + a] = sum over t of dy[(T u + a + b - d t) / s] w[t]    over the t that divide; T = s R

Tiles are bands of rows, and for dX the phases of the stride on the other axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.emit import Dim, Emitter
from onnx_convgrad.geometry import ConvSpec
from onnx_convgrad.lowering import Query, Requirement, lowering
from onnx_convgrad.registry import Call
from onnx_convgrad.rules.conv import Window
from onnx_convgrad.rules.conv_kernels import combined, depthwise, plain_conv, remade, static_space
from onnx_convgrad.rules.conv_phases import interleave
from onnx_convgrad.rules.conv_shared import conv_kernel, not_empty, spatial_axes, x_dims

_MOST_ROWS = 8
_MOST_COPIES = 64
_MOST_ENTRIES = 2_000_000
"""Of a constant that makes the kernels, which is kept in the model."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """One axis of the Conv that makes a tile at once: `map` [taps, tile, taps'] makes its kernel."""

    map: np.ndarray
    count: int
    stride: int
    dilation: int
    begin: int
    end: int

    @property
    def tile(self) -> int:
        return int(self.map.shape[1])


def tiling(reads: np.ndarray, used: np.ndarray, size: tuple[int, int], stride: int, dilation: int) -> Tiling | None:
    """A tiling from the rows that each output of the first tile reads, by tap; `None` if none reads any.

    `reads` and `used` are [tile, taps]; the next tile reads `stride` rows on. `size` counts the rows read and written.
    """
    have, want = size
    tile, taps = reads.shape
    count = -(-want // tile)
    used = used & (reads < have) & (reads + (count - 1) * stride >= 0)  # else only padding is read, or nothing is left
    if not used.any():
        return None
    low, high = int(reads[used].min()), int(reads[used].max())
    positions = np.zeros((taps, tile, (high - low) // dilation + 1))
    for a, t in np.argwhere(used):
        positions[t, a, (reads[a, t] - low) // dilation] = 1
    return Tiling(positions, count, stride, dilation, -low, high + (count - 1) * stride + 1 - have)


def band(size: int) -> int:
    """Rows of a band: as many as there may be, in bands of equal size."""
    return -(-size // -(-size // _MOST_ROWS))


def forward_axes(spec: ConvSpec) -> list[Tiling | None]:
    """Bands of rows on the first axis; single rows on the others."""
    found = []
    for axis in range(spec.rank):
        k, s, d, x, y = spec.kernel[axis] or 1, spec.strides[axis], spec.dilations[axis], spec.x[axis], spec.y[axis]
        rows = band(y or 1) if axis == 0 else 1
        reads = s * np.arange(rows)[:, None] + d * np.arange(k) - spec.begin[axis]
        found.append(tiling(reads, np.ones_like(reads, bool), (x or 1, y or 1), s * rows, d if rows == 1 else 1))
    return found


def backward_axes(spec: ConvSpec) -> list[Tiling | None]:
    """The phases of the stride on every axis, and bands of rows on the first where its stride is 1."""
    found = []
    for axis in range(spec.rank):
        k, s, d, x, y = spec.kernel[axis] or 1, spec.strides[axis], spec.dilations[axis], spec.x[axis], spec.y[axis]
        rows = band(x or 1) if axis == 0 and s == 1 else 1
        shift = np.arange(s * rows)[:, None] + spec.begin[axis] - d * np.arange(k)
        found.append(tiling(shift // s, shift % s == 0, (y or 1, x or 1), rows, d if s * rows == 1 else 1))
    return found


# -- requirements ------------------------------------------------------------------------------------------------------


def worth_tiling(backward: bool) -> Requirement:
    def requirement(q: Query) -> str | None:
        if not q.spec.static:
            return None  # another requirement says so
        axes = backward_axes(q.spec) if backward else forward_axes(q.spec)
        maps = [t.map for t in axes if t]
        if len(maps) < len(axes):
            return "the windows reach nothing but padding"
        copies = math.prod(m.shape[1] for m in maps)
        if copies == 1:
            return "every tile would be one row"
        if copies > _MOST_COPIES or math.prod(m.size for m in maps) > _MOST_ENTRIES:
            return "the tiles would be too large"
        return None

    return requirement


TILED = [not_empty, conv_kernel, depthwise, static_space]

# -- tiles -------------------------------------------------------------------------------------------------------------


def tiled_conv(
    e: Emitter,
    v: ir.Value,
    w: ir.Value,
    spec: ConvSpec,
    axes: Sequence[Tiling | None],
    size: list[Dim],
    *,
    backward: bool,
) -> ir.Value:
    """One Conv to tiles, and the tiles put together: [N, C, *size]."""
    tilings = [t for t in axes if t is not None]
    tile = [t.tile for t in tilings]
    copies = math.prod(tile)
    kernel = [t.map.shape[2] for t in tilings]
    kernels = remade(e, w, spec, combined([t.map for t in tilings]), kernel, exchange=backward, copies=copies)
    win = Window(
        tuple(t.stride for t in tilings),
        tuple(t.dilation for t in tilings),
        tuple(t.begin for t in tilings),
        tuple(t.end for t in tilings),
        spec.groups,
    )
    result = plain_conv(e, v, kernels, win)
    images = e.size_mul(*size[:2])
    count: list[Dim] = [t.count for t in tilings]
    others = copies // tile[0]
    if others > 1:  # phases of the other axes: neighbours in a row come from different channels
        flat = e.reshape(result, [e.size_mul(images, tile[0]), others, e.size_mul(*count)])
        parts = list(e.ops("Split", flat, outputs=others, axis=1, num_outputs=others))
        result = interleave(e, parts, e.size_mul(images, tile[0]), count, [1, *tile[1:]])
        count = [count[0], *(e.size_mul(c, t) for c, t in zip(count[1:], tile[1:], strict=True))]
    result = e.reshape(result, [*size[:2], e.size_mul(tile[0], count[0]), *count[1:]])
    if tile[0] > 1 and count[0] != 1:  # from rows of all bands to bands of rows, which no view of another shape follows
        order = np.arange(tile[0] * tilings[0].count).reshape(tile[0], -1).T.reshape(-1)
        result = e.op("Gather", result, e.ints(order[: size[2]].tolist()), axis=2)
    return e.slice(result, [0] * spec.rank, size[2:], spatial_axes(spec))


@lowering("Conv", "tiled_conv", requires=[*TILED, worth_tiling(backward=False)])
def tiled_forward(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: a Conv that makes bands of rows as channels."""
    x, bias = n["X"], n.get("B")
    size: list[Dim] = [x_dims(e, x, spec)[0], spec.features or 1, *(d or 0 for d in spec.y)]
    result = tiled_conv(e, x, n["W"], spec, forward_axes(spec), size, backward=False)
    return result if bias is None else e.add(result, e.unsqueeze(bias, [1 + i for i in range(spec.rank)]))


@lowering("ConvInputGrad", "tiled_conv", requires=[*TILED, worth_tiling(backward=True)])
def tiled_input_grad(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: a Conv that makes bands of rows, or the phases of the stride, as channels."""
    size = x_dims(e, n["X_like"], spec)
    return tiled_conv(e, n["dY"], n["W"], spec, backward_axes(spec), size, backward=True)
