"""Depthwise convolutions that compute several rows at once, so that each patch is gathered for more than one output.

A depthwise convolution gathers as many values as it multiplies. A Conv whose channels are the outputs of a tile, with
kernels as large as the region that the tile reads and strides as large as the tile, gathers each value for all of them;
and its product has several rows:

    forward     y[R u + r]  = sum over t of x[s R u + s r + d t - b] w[t]       a kernel of s (R - 1) + span rows
    dX          dx[T u + a] = sum over t of dy[(T u + a + b - d t) / s] w[t]    over the t that divide; T = s R

Tiles are bands of rows, and for dX the phases of the stride on the other axes. Higher bands gather each value for more
outputs and multiply more zeros: the height is that which should take the least time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import Axis, ConvSpec, Window
from onnx_convgrad.lowering.conv.both_ways import Images, both_ways
from onnx_convgrad.lowering.conv.depthwise_bands import ENTRY, reach, samples_of
from onnx_convgrad.lowering.conv.kernels import outer_map, plain_conv, remap_taps
from onnx_convgrad.lowering.conv.layout import as_rows, from_rows, interleave, rows_of
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    depthwise,
    known_batch,
    last_unit_stride,
    not_empty,
    several_axes,
    several_samples,
    static_sizes,
)
from onnx_convgrad.lowering.table import Query, Requirement

_MOST_ROWS = 28
"""Most rows of a band; with more, the zeros cost too much."""

_MOST_PICKED = 8
"""Most rows of a band of the only axis, along which outputs are picked one at a time."""

_GATHER = 11
"""Multiplications in the time that gathering a value takes."""

_RUN = 200
"""Multiplications in the time that starting a run of consecutive values takes."""

_ORDER = 12
"""Multiplications in the time that reordering an output takes, where bands do not follow each other in memory."""

_MOST_COPIES = 64
_MOST_ENTRIES = 2_000_000
"""Most entries of the stored constant that the kernels are computed from."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """One axis of the Conv that computes a tile at once: `map` [taps, tile, taps'] gives its kernel."""

    map: np.ndarray
    count: int
    stride: int
    dilation: int
    begin: int
    end: int

    @property
    def tile(self) -> int:
        return int(self.map.shape[1])


def tiling(axis: Axis, unit: int, *, backward: bool) -> Tiling | None:
    """The tiling of one axis by the bands of `reach`; `None` if they read only padding."""
    found = reach(axis, unit, backward=backward)
    if found is None:
        return None
    low, high, dilation = found.low, found.high, axis.dilation if found.rows == 1 else 1
    shape = axis.kernel, found.rows, (high - low) // dilation + 1
    if math.prod(shape) > _MOST_ENTRIES:  # too many to store: `_worth_tiling` declines them by their number
        positions = np.broadcast_to(0.0, shape)
    else:
        positions = np.zeros(shape)
        rows, taps = np.nonzero(found.used)
        positions[taps, rows, (found.reads[rows, taps] - low) // dilation] = 1
    end = high + (found.count - 1) * found.step + 1 - (axis.y if backward else axis.x)
    return Tiling(positions, found.count, found.step, dilation, -low, end)


@lru_cache(maxsize=1024)
def tilings(spec: ConvSpec, inside: int = 1, *, backward: bool) -> list[Tiling | None]:
    """Bands of rows on the first axis, single rows on the others; for dX the phases of the stride on every axis.

    On a first axis with a stride, dX has no bands. Every point holds `inside` numbers.
    """
    first, *inner = spec.axes
    others = [tiling(axis, 1, backward=backward) for axis in inner]
    if backward and first.stride > 1:
        return [tiling(first, 1, backward=True), *others]
    size = first.x if backward else first.y
    return [_first_axis(partial(tiling, first, backward=backward), size, others, inside, samples_of(spec)), *others]


def _first_axis(
    tile: Callable[[int], Tiling | None],
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
        return tile(-(-size // -(-size // _MOST_PICKED)))
    copies, taps = math.prod(t.tile for t in rest), math.prod(t.map.shape[2] for t in rest)
    run, columns = rest[-1].count * inside, math.prod(t.count for t in rest) * inside
    costs = []
    for rows in range(min(2, size), min(size, _MOST_ROWS) + 1):
        bands = tile(rows)
        if bands is None:
            return None
        alone = rows * copies > bands.count * columns  # with more rows of a product than columns, one thread gathers
        window = bands.map.shape[2] * taps
        each = bands.count * window * (rows * copies + _GATHER + _RUN / run)
        each += size * copies * _ORDER if bands.count > 1 else 0
        costs.append((alone, samples / inside * columns * each + rows * copies * window * ENTRY, rows))
    return tile(min(costs)[2])


# -- requirements ------------------------------------------------------------------------------------------------------


def _worth_tiling(backward: bool, *, interleaved: bool = False) -> list[Requirement]:
    """There are tiles of several outputs; `interleaved`, where rows hold the points of all samples."""

    def requirement(q: Query) -> str | None:
        if not q.spec.static:
            return None  # another requirement gives the reason
        if backward and max(axis.stride * axis.kernel for axis in q.spec.axes) > _MOST_ENTRIES:
            return "the tiles would be too large"
        axes = tilings(q.spec, (q.spec.batch or 1) if interleaved else 1, backward=backward)
        maps = [t.map for t in axes if t]
        if len(maps) < len(axes):
            return "the windows reach nothing but padding"
        copies = math.prod(m.shape[1] for m in maps)
        if copies == 1:
            return "every tile would be one row"
        if copies > _MOST_COPIES or math.prod(m.size for m in maps) > _MOST_ENTRIES:
            return "the tiles would be too large"
        return None

    return [requirement]


_TILED = [not_empty, conv_kernel, depthwise, static_sizes]
_ROWS = [*_TILED, known_batch, several_samples, several_axes, last_unit_stride]

# -- tiles -------------------------------------------------------------------------------------------------------------


@both_ways("tiled_conv", _TILED, _worth_tiling)
def tiled_conv(e: Emitter, spec: ConvSpec, images: Images) -> ir.Value:
    """Depthwise: a Conv that computes bands of rows, or the phases of dX's stride, as channels."""
    result = _tiled(e, images.v, spec, images, images.want, 1)
    return biased(e, result, images.bias, spec.rank)


@both_ways("tiled_sample_rows", _ROWS, lambda backward: _worth_tiling(backward, interleaved=True))
def tiled_sample_rows(e: Emitter, spec: ConvSpec, images: Images) -> ir.Value:
    """Depthwise: `tiled_conv` with the samples inside the rows, which makes them long; for large kernels."""
    v, batch = as_rows(e, images.v, images.have)
    size = [1, images.want[1], *rows_of(images.want[2:], batch)]
    result = from_rows(e, _tiled(e, v, spec, images, size, batch), images.want)
    return biased(e, result, images.bias, spec.rank)


def _tiled(e: Emitter, v: ir.Value, spec: ConvSpec, images: Images, size: list[Dim], inside: int) -> ir.Value:
    """One Conv of v to tiles, and the tiles in order: [N, C, *size].

    Every point holds `inside` numbers, convolved alike: the last axes of v and of `size` are `inside` times as long.
    """
    axes = [t for t in tilings(spec, inside, backward=images.backward) if t is not None]
    tile = [t.tile for t in axes]
    copies = math.prod(tile)
    kernel = [t.map.shape[2] for t in axes]
    selection = outer_map([t.map for t in axes])
    kernels = remap_taps(e, images.w, spec, selection, kernel, exchange=images.backward, copies=copies)
    strides, dilations, begin, end = zip(*((t.stride, t.dilation, t.begin, t.end) for t in axes), strict=True)
    result = plain_conv(e, v, kernels, Window(strides, dilations, begin, end, spec.groups).interleaved(inside))
    planes = e.size_mul(*size[:2])
    count = rows_of([t.count for t in axes], inside)
    others = copies // tile[0]
    if others > 1:  # phases of the other axes: neighbors in a row come from different channels
        flat = e.reshape(result, [e.size_mul(planes, tile[0]), others, e.size_mul(*count)])
        parts = list(e.ops("Split", flat, outputs=others, axis=1, num_outputs=others))
        result = interleave(e, parts, e.size_mul(planes, tile[0]), count, [1, *tile[1:]])
        count = [count[0], *(e.size_mul(c, t) for c, t in zip(count[1:], tile[1:], strict=True))]
    result = e.reshape(result, [*size[:2], e.size_mul(tile[0], count[0]), *count[1:]])
    if tile[0] > 1 and count[0] != 1:  # rows are listed band by band for each row of a band; no view reorders them
        order = np.arange(tile[0] * axes[0].count).reshape(tile[0], -1).T.reshape(-1)
        result = e.op("Gather", result, e.const(order[: size[2]]), axis=2)
    return e.slice(result, [0] * spec.rank, size[2:], spec.spatial_axes)
