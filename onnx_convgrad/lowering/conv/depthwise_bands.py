"""Depthwise convolutions as one batch of matrix products: bands of rows by windows of rows.

A band of rows written depends on a window of rows read, by the same linear map all over the image and for all samples.
As a matrix (Toeplitz along the rows for unit stride) it is mostly zeros, but a processor that multiplies matrices at full
speed multiplies it sooner than it gathers patches for products with a single row:

    y[c, (n, u), (r, q)] = sum over w of windows[c, (n, u), w] matrix[c, w, (r, q)]

for band u and row r of it, and position q within the row. A window is a few pieces of consecutive rows, each copied at
once: bands of several rows copy fewer and longer pieces, and multiply more zeros. One band may be the whole image.

The weight gradient is another derivative of the same form: products of windows and bands, summed over n and u, and for each
tap the sum over the pairs of points that it connects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import HINT_BATCH, Axis, ConvSpec
from onnx_convgrad.ir.samples import cut_samples, filled, with_samples
from onnx_convgrad.lowering.conv.both_ways import Images, both_ways
from onnx_convgrad.lowering.conv.kernels import outer_map
from onnx_convgrad.lowering.conv.layout import extend, x_dims, y_dims, zero_if_empty
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    depthwise,
    not_empty,
    one_per_group,
    overlapping_windows,
    static_sizes,
)
from onnx_convgrad.lowering.table import Requirement, lowering, needs

_MOST_ENTRIES = 2_000_000
"""Most entries of the stored constant that the matrices are computed from."""

_PIECE = 500
"""Multiplications in the time that copying a piece takes."""

ENTRY = 35
"""Multiplications in the time that computing and packing one entry of a matrix takes."""

_LANES = 16
"""Columns that are multiplied at once."""

# -- which point of one axis reads which -------------------------------------------------------------------------------


def rows_read(axis: Axis, rows: int, *, backward: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row that each of the first rows written reads with each tap, and whether it does: [rows, taps]."""
    at, taps = np.arange(rows)[:, None], axis.dilation * np.arange(axis.kernel)
    if backward:
        shift = at + axis.begin - taps
        return shift // axis.stride, shift % axis.stride == 0
    return axis.stride * at + taps - axis.begin, np.ones((rows, taps.size), bool)


def _whole_axis(axis: Axis) -> np.ndarray:
    """1 where a row of y reads a row of x with a tap, else 0: [taps, x, y]."""
    reads, _ = rows_read(axis, axis.y, backward=False)
    return np.asarray(reads.T[:, None, :] == np.arange(axis.x)[:, None], float)


@dataclass(frozen=True, slots=True)
class Reach:
    """The rows that bands of one axis read: `count` bands of `rows` rows, each of which reads `step` rows on.

    The first band reads from row `low` to row `high`. `reads` and `used` are those of `rows_read`, without the taps that
    read nothing but padding in every band.
    """

    rows: int
    count: int
    step: int
    low: int
    high: int
    reads: np.ndarray
    used: np.ndarray


def reach(axis: Axis, unit: int, *, backward: bool) -> Reach | None:
    """Bands of `unit` rows of y, or of the rows of x that belong to them; `None` if all windows reach only padding."""
    s = axis.stride
    rows, step, have, want = (s * unit, unit, axis.y, axis.x) if backward else (unit, s * unit, axis.x, axis.y)
    count = -(-want // rows)
    reads, used = rows_read(axis, rows, backward=backward)
    used = used & (reads < have) & (reads + (count - 1) * step >= 0)
    if not used.any():
        return None
    return Reach(rows, count, step, int(reads[used].min()), int(reads[used].max()), reads, used)


@dataclass(frozen=True, slots=True)
class Bands:
    """The first axis in `count` bands of `rows` rows, each from `pieces` pieces of `step` rows, one further for the next.

    The window of the first band begins with row `-front`.
    """

    rows: int
    count: int
    pieces: int
    step: int
    front: int


def bands(axis: Axis, unit: int, *, backward: bool) -> Bands | None:
    """The bands of `reach`, with the pieces of their windows."""
    found = reach(axis, unit, backward=backward)
    if found is None:
        return None
    window = found.high - found.low + 1
    if found.count == 1:
        return Bands(found.rows, 1, 1, window, -found.low)
    return Bands(found.rows, found.count, -(-window // found.step), found.step, -found.low)


def _first_map(cut: Bands, axis: Axis, *, backward: bool) -> np.ndarray:
    """1 where a row of the first band reads a row of its window with a tap, else 0: [taps, rows read, rows written]."""
    found = reach(axis, cut.rows // axis.stride if backward else cut.rows, backward=backward)
    assert found is not None, "`bands` looked"
    entries = np.zeros((axis.kernel, cut.pieces * cut.step, cut.rows))
    rows, taps = np.nonzero(found.used)
    entries[taps, found.reads[rows, taps] + cut.front, rows] = 1
    return entries


@lru_cache(maxsize=1024)
def heights(spec: ConvSpec, *, backward: bool) -> tuple[tuple[Bands, int, int], ...]:
    """Bands of every height whose matrices can be stored, with the points of a window and those of a band."""
    first, *inner = spec.axes
    read, written = math.prod(a.x for a in inner), math.prod(a.y for a in inner)
    last = first.y
    if backward:
        read, written, last = written, read, -(-first.x // first.stride)
    found: list[tuple[Bands, int, int]] = []
    unit, each = 1, written * (first.stride if backward else 1) * (spec.taps or 1)
    while unit <= last and unit * each <= _MOST_ENTRIES:
        cut = bands(first, unit, backward=backward)
        if cut is None:
            break
        window, columns = cut.pieces * cut.step * read, cut.rows * written
        if window * columns * (spec.taps or 1) <= _MOST_ENTRIES:
            found.append((cut, window, columns))
            unit += 1
        else:  # higher bands have larger matrices, except the whole image, which reads no padding
            unit = last + (unit == last)
    return tuple(found)


def lanes(columns: int) -> int:
    """Columns of a matrix product, rounded up to whole lanes."""
    return -(-columns // _LANES) * _LANES


def samples_of(spec: ConvSpec) -> int:
    """The batch size, or a typical one."""
    return HINT_BATCH if spec.batch is None else spec.batch


def _choices(spec: ConvSpec, *, backward: bool) -> Iterator[tuple[float, Bands]]:
    """Bands of every height with an estimate of their time per channel, as a number of multiplications."""
    for found, window, columns in heights(spec, backward=backward):
        copies = found.pieces if found.count > 1 else 0
        each = found.count * (copies * _PIECE + window * lanes(columns))
        yield samples_of(spec) * each + window * columns * ENTRY, found


def best(spec: ConvSpec, *, backward: bool, folded: bool | None = None) -> Bands | None:
    """The bands that should take the least time, if there are any; with `folded`, bands whose windows are read in place."""
    choices = _choices(spec, backward=backward)
    found = choices if folded is None else _sliding_choices(spec, backward=backward, folded=folded)
    return min(found, key=lambda pair: pair[0], default=(0.0, None))[1]


def cheaper(spec: ConvSpec) -> tuple[bool, Bands] | None:
    """For the weight gradient: windows of x and bands of dy, or the reverse (`True`), whichever is cheaper."""
    found = [(cost, way, cut) for way in (False, True) for cost, cut in _choices(spec, backward=way)]
    return min(found, key=lambda choice: choice[0])[1:] if found else None


# -- requirements ------------------------------------------------------------------------------------------------------


_TOO_LONG = "the rows are too long, or the windows reach nothing but padding"


def _small_matrices(backward: bool) -> list[Requirement]:
    return [needs(lambda s: not s.static or best(s, backward=backward), _TOO_LONG)]


_small_products = needs(lambda s: not s.static or cheaper(s), _TOO_LONG)

BANDS = [not_empty, depthwise, one_per_group, static_sizes]

# -- emission ----------------------------------------------------------------------------------------------------------


def whole_map(cut: Bands, spec: ConvSpec, *, backward: bool) -> np.ndarray:
    """1 where a point of a band reads a point of its window with a tap, else 0: [taps, window, band]."""
    inner = [_whole_axis(axis) for axis in spec.axes[1:]]
    maps = [_first_map(cut, spec.axes[0], backward=backward), *(m.transpose(0, 2, 1) if backward else m for m in inner)]
    size = [math.prod(m.shape[part] for m in maps) for part in range(3)]
    return outer_map(maps).reshape(size)


def channels_first(e: Emitter, v: ir.Value, batch: Dim, channels: Dim, points: Dim) -> ir.Value:
    """[N, C, points] -> [C, N, points]."""
    return e.transpose(e.reshape(v, [batch, channels, points]), [1, 0, 2])


def padded_rows(e: Emitter, v: ir.Value, images: Dim, have: Dim, inner: Dim, cut: Bands) -> ir.Value:
    """Images of `have` rows with the rows of zeros that the windows read: [images, rows * inner]."""
    assert isinstance(have, int), "static_sizes requires it"
    assert isinstance(inner, int), "static_sizes requires it"
    rows = (cut.count + cut.pieces - 1) * cut.step
    return extend(e, v, [images, have * inner], 1, cut.front * inner, (rows - have - cut.front) * inner)


def windows(e: Emitter, v: ir.Value, size: list[Dim], cut: Bands) -> ir.Value:
    """[N, C, *size] as windows of rows: [C, N * bands, rows * inner size]."""
    (batch, channels, *space), inner = size, e.size_mul(*size[3:])
    images = e.size_mul(batch, channels)
    v = padded_rows(e, channels_first(e, v, batch, channels, e.size_mul(*space)), images, space[0], inner, cut)
    if cut.pieces > 1:
        v = e.reshape(v, [images, cut.count + cut.pieces - 1, e.size_mul(cut.step, inner)])
        e.check_bytes(8 * cut.count * cut.pieces, "The table of the pieces of each window")
        at = np.arange(cut.count)[:, None] + np.arange(cut.pieces)
        v = e.op("Gather", v, e.const(at.reshape(-1)), axis=1)
    return e.reshape(v, [channels, e.size_mul(batch, cut.count), e.size_mul(cut.pieces * cut.step, inner)])


@both_ways("bands", BANDS, _small_matrices)
def by_bands(e: Emitter, spec: ConvSpec, images: Images) -> ir.Value:
    """Depthwise: bands of rows, one matrix per channel for the bands of all samples; for small images."""
    cut = best(spec, backward=images.backward)
    assert cut is not None, "_small_matrices requires it"
    maps, w = whole_map(cut, spec, backward=images.backward), images.w
    have, want = images.have, images.want
    window, columns = maps.shape[1:]
    channels = spec.groups
    matrices = e.matmul(e.reshape(w, [channels, spec.taps or 1]), e.const(maps.reshape(len(maps), -1), w.dtype))
    product = e.matmul(windows(e, images.v, have, cut), e.reshape(matrices, [channels, window, columns]))
    result = e.reshape(product, [channels, want[0], cut.count * cut.rows, *want[3:]])
    result = e.slice(result, [0], [want[2]], [2])
    return biased(e, e.transpose(result, [1, 0, *spec.spatial_axes]), images.bias, spec.rank)


@lowering("ConvWeightGrad", "bands", requires=[*BANDS, _small_products])
def bands_weight_grad(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: products of all points of a band and of its window, summed over those of each tap; for strides."""
    x, dy = n["X"], n["dY"]
    found = cheaper(spec)
    assert found is not None, "_small_products requires it"
    backward, cut = found
    maps = whole_map(cut, spec, backward=backward)
    taps = len(maps)
    x_size, y_size = x_dims(e, x, spec), y_dims(e, dy, spec)
    whole = Bands(cut.rows, cut.count, 1, cut.rows, 0)
    x_cut, y_cut = (whole, cut) if backward else (cut, whole)
    rows, columns = windows(e, dy, y_size, y_cut), windows(e, x, x_size, x_cut)
    products = e.matmul(e.swap_last(rows), columns)
    takes = maps.transpose(1, 2, 0) if backward else maps.transpose(2, 1, 0)
    total = e.matmul(e.reshape(products, [spec.groups, takes[..., 0].size]), e.const(takes.reshape(-1, taps), x.dtype))
    return e.reshape_like(zero_if_empty(e, total, x_size[0]), n["W_like"])


# -- windows read in place ---------------------------------------------------------------------------------------------
#
# Consecutive windows overlap by all but one piece, so one matrix whose rows overlap in memory holds them all. ONNX Runtime's
# Conv multiplies with such a matrix, without a copy, where a kernel is as wide as its input (`depthwise`):
#
#     z[n, c, (r, q), u] = sum over w of matrix[c, (r, q), w] x[n, c, u step + w]
#
# for band u and point (r, q) of it. That is a band per column, which a product with the identity transposes on all threads.
# Each image is a separate product, or all samples of a channel are one (folded), with rows of zeros between them.

_PACK = 10
"""Multiplications in the time that packing an element of a window takes."""

_TURN = 45
"""Multiplications in the time that transposing a result takes."""

_CUT = 20
"""Multiplications in the time that copying a result takes, where surplus rows behind it are cut off."""

_START = 5000
"""Multiplications in the time that starting one product takes."""


def _sliding_choices(spec: ConvSpec, *, backward: bool, folded: bool) -> Iterator[tuple[float, Bands]]:
    """Several bands of every height with an estimate of their time per channel, as a number of multiplications."""
    for cut, window, columns in heights(spec, backward=backward):
        if cut.count > 1:
            axis = spec.axes[0]
            have, want = (axis.y, axis.x) if backward else (axis.x, axis.y)
            many, pitch = samples_of(spec), _pitch(cut, have) if folded else cut.count
            products, count = (1, many * pitch) if folded else (many, pitch)
            turning = _TURN + lanes(columns) + (_CUT if pitch * cut.rows > want else 0)
            each = _START + lanes(count) * window * (columns + _PACK) + count * columns * turning
            yield products * each + window * columns * ENTRY, cut


def _pitch(cut: Bands, have: int) -> int:
    """Pieces from one sample to the next: the zeros below one may be those above the other."""
    pieces = cut.count + cut.pieces - 1
    below = (pieces * cut.step - cut.front - have) // cut.step
    return pieces - max(0, min(cut.front // cut.step, below, cut.pieces - 1))


def _several_bands(backward: bool) -> list[Requirement]:
    reason = "the rows are too long, or there is one band"
    return [needs(lambda s: not s.static or best(s, backward=backward, folded=False), reason)]


_SLIDING = [*BANDS, conv_kernel, overlapping_windows]


@both_ways("sliding_bands", _SLIDING, _several_bands)
def sliding(e: Emitter, spec: ConvSpec, images: Images, *, folded: bool = False) -> ir.Value:
    """Depthwise: a Conv per image that reads overlapping windows of rows in place; for large kernels."""
    cut = best(spec, backward=images.backward, folded=folded)
    assert cut is not None, "_several_bands requires it"
    want, have, w = images.want, images.have, images.w
    maps = whole_map(cut, spec, backward=images.backward)
    taps, window, columns = maps.shape
    channels, rows, wide = spec.groups, cut.rows, window // cut.pieces
    made = e.matmul(e.reshape(w, [channels, taps]), e.const(maps.transpose(0, 2, 1).reshape(taps, -1), w.dtype))
    kernels = e.reshape(made, [channels * columns, 1, cut.pieces, wide])
    v, samples = with_samples(e, images.v, have), filled(e, have[0])
    result = e.conv(_pieces(e, v, [samples, *have[1:]], cut, folded=folded), kernels, group=channels)
    assert isinstance(have[2], int), "static_sizes requires it"
    count = _pitch(cut, have[2]) if folded else cut.count
    lead: list[Dim] = [channels, samples] if folded else [samples, channels]
    size = [channels, columns, e.size_mul(samples, count)] if folded else [*lead, columns, count]
    result = e.matmul(e.swap_last(e.reshape(result, size)), e.const(np.eye(columns), result.dtype))
    result = e.slice(e.reshape(result, [*lead, count * rows, *want[3:]]), [0], [want[2]], [2])
    if folded:
        result = e.transpose(result, [1, 0, *spec.spatial_axes])
    return biased(e, cut_samples(e, result, want[0]), images.bias, spec.rank)


@both_ways("folded_sliding_bands", _SLIDING, _several_bands)
def folded_sliding(e: Emitter, spec: ConvSpec, images: Images) -> ir.Value:
    """Depthwise: the same with the images of all samples one below the other; for small images."""
    return sliding(e, spec, images, folded=True)


def _pieces(e: Emitter, v: ir.Value, size: list[Dim], cut: Bands, *, folded: bool) -> ir.Value:
    """[N, C, pieces, points of a piece]; folded, [1, C, pieces of all samples, points of a piece]."""
    (batch, channels, have, *_), inner = size, e.size_mul(1, *size[3:])
    assert isinstance(have, int), "static_sizes requires it"
    assert isinstance(inner, int), "static_sizes requires it"
    if not folded:
        v = padded_rows(e, v, e.size_mul(batch, channels), have, inner, cut)
        return e.reshape(v, [batch, channels, cut.count + cut.pieces - 1, cut.step * inner])
    pitch, piece = _pitch(cut, have), cut.step * inner
    v = channels_first(e, v, batch, channels, have * inner)
    after = pitch * piece - (cut.front + have) * inner
    v = extend(e, v, [e.size_mul(batch, channels), have * inner], 1, cut.front * inner, after)
    pieces = e.size_mul(batch, pitch)
    v = extend(e, v, [channels, e.size_mul(pieces, piece)], 1, 0, (cut.pieces - 1) * piece)
    return e.reshape(v, [1, channels, e.size_add(pieces, cut.pieces - 1), piece])
