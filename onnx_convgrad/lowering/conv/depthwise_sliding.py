"""Depthwise convolutions by bands of rows whose windows are read where they lie.

As in `conv_bands`, a matrix takes a window of rows to a band of them. Consecutive windows overlap by all but one piece, so
one matrix whose rows overlap in memory holds them all: ONNX Runtime's Conv multiplies with such a matrix, without a copy,
where a kernel is as wide as its input (`conv_depthwise`):

    z[n, c, (r, q), u] = sum over w of matrix[c, (r, q), w] x[n, c, u step + w]

for band u and point (r, q) of it. That is a band per column, which a product with the identity puts right, on all threads.
Each image is a product of its own, or all samples of a channel are one, with rows of zeros between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.samples import cut_samples, filled, with_samples
from onnx_convgrad.lowering.conv.depthwise import overlapping_windows
from onnx_convgrad.lowering.conv.depthwise_bands import (
    BANDS,
    ENTRY,
    Bands,
    heights,
    inside,
    lanes,
    padded_rows,
    samples_of,
    whole_map,
)
from onnx_convgrad.lowering.conv.shared import conv_kernel, extend, spatial_axes, x_dims, y_dims
from onnx_convgrad.lowering.table import Query, Requirement, lowering

_PACK = 10
"""Multiplications in the time of packing an element of a window."""

_TURN = 45
"""The same for putting a result in its place."""

_CUT = 20
"""The same for a result that is copied because others behind it are not wanted."""

_START = 5000
"""The same for starting one product."""


def _choices(spec: ConvSpec, *, backward: bool, folded: bool) -> Iterator[tuple[float, Bands]]:
    """Every height of several bands with an estimate of its time per channel, as a number of multiplications."""
    for cut, window, columns in heights(spec, backward=backward):
        if cut.count > 1:
            have, want = ((v[0] or 1) for v in ((spec.y, spec.x) if backward else (spec.x, spec.y)))
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


def several_bands(backward: bool) -> Requirement:
    def requirement(q: Query) -> str | None:
        if not q.spec.static or best(q.spec, backward=backward, folded=False):
            return None
        return "the rows are too long, or there is one band"

    return requirement


SLIDING = [*BANDS, conv_kernel, overlapping_windows]


def sliding(
    e: Emitter,
    v: ir.Value,
    w: ir.Value,
    spec: ConvSpec,
    have: list[Dim],
    want: list[Dim],
    *,
    backward: bool,
    folded: bool,
) -> ir.Value:
    """The convolution of v [N, C, *have], or the gradient for its data: [N, C, *want]."""
    cut = best(spec, backward=backward, folded=folded)
    assert cut is not None, "several_bands requires it"
    maps = whole_map(cut, spec, backward=backward)
    taps, window, columns = maps.shape
    channels, rows, wide = spec.groups, cut.rows, window // cut.pieces
    made = e.matmul(e.reshape(w, [channels, taps]), e.const(maps.transpose(0, 2, 1).reshape(taps, -1), w.dtype))
    kernels = e.reshape(made, [channels * columns, 1, cut.pieces, wide])
    v, samples = with_samples(e, v, have), filled(e, have[0])
    data = (_all_samples if folded else _each_sample)(e, v, [samples, *have[1:]], cut)
    result = e.op("Conv", data, kernels, group=channels)
    if folded:
        assert isinstance(have[2], int), "static_sizes requires it"
        pitch = _pitch(cut, have[2])
        result = _turned(e, result, [channels, columns, e.size_mul(samples, pitch)])
        result = e.reshape(result, [channels, samples, pitch * rows, *want[3:]])
    else:
        result = _turned(e, result, [samples, channels, columns, cut.count])
        result = e.reshape(result, [samples, channels, cut.count * rows, *want[3:]])
    result = e.slice(result, [0], [want[2]], [2])
    if folded:
        result = e.transpose(result, [1, 0, *spatial_axes(spec)])
    return cut_samples(e, result, want[0])


def _turned(e: Emitter, v: ir.Value, size: list[Dim]) -> ir.Value:
    """v, of `size`, with the last two axes exchanged."""
    columns = size[-2]
    assert isinstance(columns, int), "the points of a band are known"
    return e.matmul(e.swap_last(e.reshape(v, size)), e.const(np.eye(columns), v.dtype))


def _each_sample(e: Emitter, v: ir.Value, size: list[Dim], cut: Bands) -> ir.Value:
    """[N, C, pieces, points of a piece]."""
    (batch, channels, have, *_), inner = size, e.size_mul(1, *size[3:])
    v = padded_rows(e, v, e.size_mul(batch, channels), have, inner, cut)
    return e.reshape(v, [batch, channels, cut.count + cut.pieces - 1, e.size_mul(cut.step, inner)])


def _all_samples(e: Emitter, v: ir.Value, size: list[Dim], cut: Bands) -> ir.Value:
    """[1, C, pieces of all samples, points of a piece]."""
    (batch, channels, have, *_), inner = size, e.size_mul(1, *size[3:])
    assert isinstance(have, int), "static_sizes requires it"
    assert isinstance(inner, int), "static_sizes requires it"
    pitch, piece = _pitch(cut, have), cut.step * inner
    v = inside(e, v, batch, channels, have * inner)
    after = pitch * piece - (cut.front + have) * inner
    v = extend(e, v, [e.size_mul(batch, channels), have * inner], 1, cut.front * inner, after)
    pieces = e.size_mul(batch, pitch)
    v = extend(e, v, [channels, e.size_mul(pieces, piece)], 1, 0, (cut.pieces - 1) * piece)
    return e.reshape(v, [1, channels, e.size_add(pieces, cut.pieces - 1), piece])


# -- lowerings ---------------------------------------------------------------------------------------------------------


def _forward(e: Emitter, n: Call, spec: ConvSpec, *, folded: bool) -> ir.Value:
    x, bias = n["X"], n.get("B")
    have = x_dims(e, x, spec)
    want: list[Dim] = [have[0], spec.groups, *(d or 0 for d in spec.y)]
    result = sliding(e, x, n["W"], spec, have, want, backward=False, folded=folded)
    return biased(e, result, bias, spec.rank)


def _input_grad(e: Emitter, n: Call, spec: ConvSpec, *, folded: bool) -> ir.Value:
    dy, want = n["dY"], x_dims(e, n["X_like"], spec)
    return sliding(e, dy, n["W"], spec, y_dims(e, dy, spec), want, backward=True, folded=folded)


@lowering("Conv", "sliding_bands", requires=[*SLIDING, several_bands(backward=False)])
def sliding_forward(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: a Conv per image that reads overlapping windows of rows where they lie; for large kernels."""
    return _forward(e, n, spec, folded=False)


@lowering("ConvInputGrad", "sliding_bands", requires=[*SLIDING, several_bands(backward=True)])
def sliding_input_grad(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: a Conv per image that reads overlapping windows of rows where they lie; for large kernels."""
    return _input_grad(e, n, spec, folded=False)


@lowering("Conv", "folded_sliding_bands", requires=[*SLIDING, several_bands(backward=False)])
def folded_forward(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: the same with the images of all samples one below the other; for small images."""
    return _forward(e, n, spec, folded=True)


@lowering("ConvInputGrad", "folded_sliding_bands", requires=[*SLIDING, several_bands(backward=True)])
def folded_input_grad(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Depthwise: the same with the images of all samples one below the other; for small images."""
    return _input_grad(e, n, spec, folded=True)
