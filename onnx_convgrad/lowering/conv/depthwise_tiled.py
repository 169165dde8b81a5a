"""Depthwise convolutions that make several rows at once, so that each patch is gathered for more than one output.

A depthwise convolution gathers as many values as it multiplies. Taking a tile of outputs for the channels of another
Conv, with kernels as large as what the tile depends on and strides as large as the tile, gathers each value for all of
them; and the product has several rows:

    forward     y[R u + r]  = sum over t of x[s R u + s r + d t - b] w[t]       a kernel of s (R - 1) + span rows
    dX          dx[T u + a] = sum over t of dy[(T u + a + b - d t) / s] w[t]    over the t that divide; T = s R

Tiles are bands of rows, and for dX the phases of the stride on the other axes. Higher bands gather each value for more
outputs and multiply more zeros: the height is that which should take the least time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import Window, biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering.conv.depthwise_bands import ENTRY, samples_of
from onnx_convgrad.lowering.conv.input_grad_phases import interleave
from onnx_convgrad.lowering.conv.interleaved import from_rows, last_unit_stride, rows_of, wide
from onnx_convgrad.lowering.conv.kernels import combined, depthwise, plain_conv, remade
from onnx_convgrad.lowering.conv.shared import (
    conv_kernel,
    known_batch,
    not_empty,
    spatial_axes,
    static_sizes,
    swapped,
    x_dims,
    y_dims,
)
from onnx_convgrad.lowering.conv.stacked import several_samples
from onnx_convgrad.lowering.table import Query, Requirement, lowering

_MOST_ROWS = 28
"""Of a band; of more, the zeros cost too much."""

_MOST_PICKED = 8
"""Of a band of the only axis, along which outputs are picked one at a time."""

_GATHER = 11
"""Multiplications in the time of gathering a value."""

_RUN = 200
"""The same for starting a run of values that lie side by side."""

_ORDER = 12
"""The same for putting an output in its place, where bands do not follow each other in memory."""

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


@cache
def forward_axes(spec: ConvSpec, inside: int = 1) -> list[Tiling | None]:
    """Bands of rows on the first axis; single rows on the others. Every point holds `inside` numbers."""

    def axis_tiling(axis: int, rows: int) -> Tiling | None:
        k, s, d, x, y = spec.kernel[axis] or 1, spec.strides[axis], spec.dilations[axis], spec.x[axis], spec.y[axis]
        reads = s * np.arange(rows)[:, None] + d * np.arange(k) - spec.begin[axis]
        return tiling(reads, np.ones_like(reads, bool), (x or 1, y or 1), s * rows, d if rows == 1 else 1)

    others = [axis_tiling(axis, 1) for axis in range(1, spec.rank)]
    return [_first_axis(axis_tiling, spec.y[0] or 1, others, inside, samples_of(spec)), *others]


@cache
def backward_axes(spec: ConvSpec, inside: int = 1) -> list[Tiling | None]:
    """The phases of the stride on every axis, and bands of rows on the first where its stride is 1."""

    def axis_tiling(axis: int, rows: int) -> Tiling | None:
        k, s, d, x, y = spec.kernel[axis] or 1, spec.strides[axis], spec.dilations[axis], spec.x[axis], spec.y[axis]
        shift = np.arange(s * rows)[:, None] + spec.begin[axis] - d * np.arange(k)
        return tiling(shift // s, shift % s == 0, (y or 1, x or 1), rows, d if s * rows == 1 else 1)

    others = [axis_tiling(axis, 1) for axis in range(1, spec.rank)]
    if spec.strides[0] > 1:
        return [axis_tiling(0, 1), *others]
    return [_first_axis(axis_tiling, spec.x[0] or 1, others, inside, samples_of(spec)), *others]


def _first_axis(
    axis_tiling: Callable[[int, int], Tiling | None],
    size: int,
    others: Sequence[Tiling | None],
    inside: int,
    samples: int,
) -> Tiling | None:
    """The bands of `size` rows that should take the least time per channel, as a number of multiplications."""
    rest = [t for t in others if t is not None]
    if len(rest) < len(others):
        return None
    if not rest:
        return axis_tiling(0, -(-size // -(-size // _MOST_PICKED)))
    copies, taps = math.prod(t.tile for t in rest), math.prod(t.map.shape[2] for t in rest)
    run, columns = rest[-1].count * inside, math.prod(t.count for t in rest) * inside
    found = []
    for rows in range(min(2, size), min(size, _MOST_ROWS) + 1):
        bands = axis_tiling(0, rows)
        if bands is None:
            return None
        alone = rows * copies > bands.count * columns  # one thread gathers for more rows of a product than columns
        window = bands.map.shape[2] * taps
        each = bands.count * window * (rows * copies + _GATHER + _RUN / run)
        each += size * copies * _ORDER if bands.count > 1 else 0
        found.append((alone, samples / inside * columns * each + rows * copies * window * ENTRY, rows))
    return axis_tiling(0, min(found)[2])


# -- requirements ------------------------------------------------------------------------------------------------------


def worth_tiling(*, backward: bool, long: bool = False) -> Requirement:
    """Whether there are tiles of several outputs, where rows are `long` with the samples inside them."""

    def requirement(q: Query) -> str | None:
        if not q.spec.static:
            return None  # another requirement says so
        inside = (q.spec.batch or 1) if long else 1
        axes = backward_axes(q.spec, inside) if backward else forward_axes(q.spec, inside)
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


TILED = [not_empty, conv_kernel, depthwise, static_sizes]

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
    inside: int = 1,
) -> ir.Value:
    """One Conv to tiles, and the tiles put together: [N, C, *size].

    Every point holds `inside` numbers, which are convolved alike: the last axes of v and of `size` are so much longer.
    """
    tilings = [t for t in axes if t is not None]
    tile = [t.tile for t in tilings]
    copies = math.prod(tile)
    kernel = [t.map.shape[2] for t in tilings]
    kernels = remade(e, w, spec, combined([t.map for t in tilings]), kernel, exchange=backward, copies=copies)
    dilations, begin, end = (wide([getattr(t, name) for t in tilings], inside) for name in ("dilation", "begin", "end"))
    win = Window(tuple(t.stride for t in tilings), dilations, begin, end, spec.groups)
    result = plain_conv(e, v, kernels, win)
    images = e.size_mul(*size[:2])
    count: list[Dim] = list(wide([t.count for t in tilings], inside))
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


def tiled_rows(
    e: Emitter,
    v: ir.Value,
    w: ir.Value,
    spec: ConvSpec,
    have: list[Dim],
    want: list[Dim],
    *,
    backward: bool,
) -> ir.Value:
    """The same for v [N, C, *have], with the samples inside the rows: [N, C, *want]."""
    batch = have[0]
    assert isinstance(batch, int), "known_batch requires it"
    v = swapped(e, e.reshape(v, [batch, e.size_mul(*have[1:])]), batch)
    v = e.reshape(v, [1, have[1], *rows_of(have[2:], batch)])
    axes = backward_axes(spec, batch) if backward else forward_axes(spec, batch)
    size = [1, want[1], *rows_of(want[2:], batch)]
    result = tiled_conv(e, v, w, spec, axes, size, backward=backward, inside=batch)
    return from_rows(e, result, want)


def y_size(e: Emitter, x: ir.Value, spec: ConvSpec) -> list[Dim]:
    return [x_dims(e, x, spec)[0], spec.features or 1, *(d or 0 for d in spec.y)]


@lowering("Conv", "tiled_conv", requires=[*TILED, worth_tiling(backward=False)])
def tiled_forward(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: a Conv that makes bands of rows as channels."""
    result = tiled_conv(e, n["X"], n["W"], spec, forward_axes(spec), y_size(e, n["X"], spec), backward=False)
    return biased(e, result, n.get("B"), spec.rank)


@lowering("ConvInputGrad", "tiled_conv", requires=[*TILED, worth_tiling(backward=True)])
def tiled_input_grad(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: a Conv that makes bands of rows, or the phases of the stride, as channels."""
    size = x_dims(e, n["X_like"], spec)
    return tiled_conv(e, n["dY"], n["W"], spec, backward_axes(spec), size, backward=True)


def bands_apart(q: Query) -> str | None:
    return "the rows are the only axis" if q.spec.rank == 1 else None


ROWS = [*TILED, known_batch, several_samples, bands_apart, last_unit_stride]


@lowering("Conv", "tiled_sample_rows", requires=[*ROWS, worth_tiling(backward=False, long=True)])
def tiled_rows_forward(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: `tiled_conv` with the samples inside the rows, which makes them long; for large kernels."""
    x = n["X"]
    result = tiled_rows(e, x, n["W"], spec, x_dims(e, x, spec), y_size(e, x, spec), backward=False)
    return biased(e, result, n.get("B"), spec.rank)


@lowering("ConvInputGrad", "tiled_sample_rows", requires=[*ROWS, worth_tiling(backward=True, long=True)])
def tiled_rows_input_grad(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: `tiled_conv` with the samples inside the rows, which makes them long; for large kernels."""
    dy, want = n["dY"], x_dims(e, n["X_like"], spec)
    return tiled_rows(e, dy, n["W"], spec, y_dims(e, dy, spec), want, backward=True)
