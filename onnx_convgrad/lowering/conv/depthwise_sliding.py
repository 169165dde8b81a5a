"""Depthwise convolutions by bands of rows whose windows are read in place.

As in `depthwise_bands`, a matrix maps a window of rows to a band of them. Consecutive windows overlap by all but one piece,
so one matrix whose rows overlap in memory holds them all: ONNX Runtime's Conv multiplies with such a matrix, without a
copy, where a kernel is as wide as its input (`depthwise`):

    z[n, c, (r, q), u] = sum over w of matrix[c, (r, q), w] x[n, c, u step + w]

for band u and point (r, q) of it. That is a band per column, which a product with the identity transposes on all threads.
Each image is a separate product, or all samples of a channel are one (folded), with rows of zeros between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.samples import cut_samples, filled, with_samples
from onnx_convgrad.lowering.conv.both_ways import Images, both_ways
from onnx_convgrad.lowering.conv.depthwise_bands import (
    BANDS,
    ENTRY,
    Bands,
    channels_first,
    heights,
    lanes,
    padded_rows,
    samples_of,
    whole_map,
)
from onnx_convgrad.lowering.conv.layout import extend
from onnx_convgrad.lowering.conv.requirements import conv_kernel, overlapping_windows
from onnx_convgrad.lowering.table import Requirement

_PACK = 10
"""Multiplications in the time that packing an element of a window takes."""

_TURN = 45
"""Multiplications in the time that transposing a result takes."""

_CUT = 20
"""Multiplications in the time that copying a result takes, where surplus rows behind it are cut off."""

_START = 5000
"""Multiplications in the time that starting one product takes."""


def _choices(spec: ConvSpec, *, backward: bool, folded: bool) -> Iterator[tuple[float, Bands]]:
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


def best(spec: ConvSpec, *, backward: bool, folded: bool) -> Bands | None:
    """The bands that should take the least time, if there are any."""
    found = _choices(spec, backward=backward, folded=folded)
    return min(found, key=lambda pair: pair[0], default=(0.0, None))[1]


def _pitch(cut: Bands, have: int) -> int:
    """Pieces from one sample to the next: the zeros below one may be those above the other."""
    pieces = cut.count + cut.pieces - 1
    below = (pieces * cut.step - cut.front - have) // cut.step
    return pieces - max(0, min(cut.front // cut.step, below, cut.pieces - 1))


def _several_bands(backward: bool) -> list[Requirement]:
    reason = "the rows are too long, or there is one band"
    return [lambda q: None if not q.spec.static or best(q.spec, backward=backward, folded=False) else reason]


_SLIDING = [*BANDS, conv_kernel, overlapping_windows]


@both_ways("sliding_bands", _SLIDING, _several_bands)
def sliding(e: Emitter, spec: ConvSpec, images: Images) -> ir.Value:
    """Depthwise: a Conv per image that reads overlapping windows of rows in place; for large kernels."""
    return _sliding(e, spec, images, folded=False)


@both_ways("folded_sliding_bands", _SLIDING, _several_bands)
def folded_sliding(e: Emitter, spec: ConvSpec, images: Images) -> ir.Value:
    """Depthwise: the same with the images of all samples one below the other; for small images."""
    return _sliding(e, spec, images, folded=True)


def _sliding(e: Emitter, spec: ConvSpec, images: Images, *, folded: bool) -> ir.Value:
    cut = best(spec, backward=images.backward, folded=folded)
    assert cut is not None, "_several_bands requires it"
    want, have, w = images.want, images.have, images.w
    maps = whole_map(cut, spec, backward=images.backward)
    taps, window, columns = maps.shape
    channels, rows, wide = spec.groups, cut.rows, window // cut.pieces
    made = e.matmul(e.reshape(w, [channels, taps]), e.const(maps.transpose(0, 2, 1).reshape(taps, -1), w.dtype))
    kernels = e.reshape(made, [channels * columns, 1, cut.pieces, wide])
    v, samples = with_samples(e, images.v, have), filled(e, have[0])
    result = e.op("Conv", _pieces(e, v, [samples, *have[1:]], cut, folded=folded), kernels, group=channels)
    assert isinstance(have[2], int), "static_sizes requires it"
    count = _pitch(cut, have[2]) if folded else cut.count
    lead: list[Dim] = [channels, samples] if folded else [samples, channels]
    size = [channels, columns, e.size_mul(samples, count)] if folded else [*lead, columns, count]
    result = e.matmul(e.swap_last(e.reshape(result, size)), e.const(np.eye(columns), result.dtype))
    result = e.slice(e.reshape(result, [*lead, count * rows, *want[3:]]), [0], [want[2]], [2])
    if folded:
        result = e.transpose(result, [1, 0, *spec.spatial_axes])
    return biased(e, cut_samples(e, result, want[0]), images.bias, spec.rank)


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
