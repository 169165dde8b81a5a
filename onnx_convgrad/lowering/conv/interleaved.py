"""Convolutions along rows that hold the channels, or the samples, of every point side by side.

A runtime gathers patches by short copies, one per row of the result. Where rows of the result are short, they become longer
if every point of an image holds `m` numbers: the last axis [.., size] becomes [.., size m], dilation, padding and stride
along it are `m` times as large, and one copy takes all `m` of a point, or of neighboring ones::

    weight gradient    dw[o, t, c] = sum over p of dy[o, p] x[s p + d t - b, c]     m channels of a group
    Conv and dX        y[o, p, n]  = sum over c, t of w[o, c, t] x[c, p + d t - b, n]   m samples

In the weight gradient (with stride and dilation exchanged) the taps of a row and their channels are one run: the stride
skips values between the runs, so that a strided layer costs no more than another one.
"""

from __future__ import annotations

import math
from functools import partial

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.ir.samples import filled, with_samples
from onnx_convgrad.lowering.conv.both_ways import Images, both_ways
from onnx_convgrad.lowering.conv.kernels import plain_conv, reverse_taps
from onnx_convgrad.lowering.conv.layout import as_rows, from_rows, rows_of, transpose_last, x_dims
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    known_batch,
    known_channels,
    last_unit_stride,
    not_empty,
    one_group,
    samples_in_rows,
    several_axes,
    several_rows,
    several_samples,
    several_taps,
    static_sizes,
    unit_row_stride,
    unit_stride,
)
from onnx_convgrad.lowering.conv.weight_grad import batch_sum, sizes_of
from onnx_convgrad.lowering.conv.weight_grad_shift import shifted_copies
from onnx_convgrad.lowering.table import Query, lowering, needs

# -- requirements ------------------------------------------------------------------------------------------------------


several_channels = needs(  # one channel that several features read gives rows of its taps, which may be many
    lambda s: s.channels != s.groups or (s.groups == 1 and s.features is not None and s.features > 1),
    "a group has one channel",
)


def copied_rows(q: Query) -> str | None:
    """cuDNN has no kernels for dilations as large as a number of channels, and copies no rows that could be longer."""
    return f"the {q.target.name} provider copies no rows to patches" if q.target.name == "cuda" else None


def _rows_left(spec: ConvSpec, *, backward: bool) -> bool:
    """Some rows remain after negative padding is sliced off, before zeros are added."""
    if not spec.static:
        return True  # another requirement gives the reason
    ends = (
        spec.back_window.end if backward else [b - (rest or 0) for b, rest in zip(spec.end, spec.leftover, strict=True)]
    )
    axes = spec.back_axes if backward else spec.axes
    return min(axis.x + min(axis.begin, 0) + min(end, 0) for axis, end in zip(axes, ends, strict=True)) > 0


rows_left = needs(partial(_rows_left, backward=False), "negative padding removes every row")
rows_left_backward = needs(partial(_rows_left, backward=True), "the padding leaves no row of the output gradient")

# -- the channels of a group -------------------------------------------------------------------------------------------


_CHANNELS = [
    *(not_empty, conv_kernel, copied_rows, static_sizes, known_channels, several_channels, several_taps, rows_left)
]


@lowering("ConvWeightGrad", "channel_rows", requires=_CHANNELS)
def channel_rows(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """`conv_swap` with the channels of a group inside the rows: for small groups, strides and few channels."""
    return _channel_rows(e, n, spec, apart=True)


@lowering("ConvWeightGrad", "moved_channel_rows", requires=[*_CHANNELS, several_axes, several_rows, unit_row_stride])
def moved_channel_rows(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """`channel_rows` of dY shifted by each tap of the first axis, shifts as features: fewer patches; for small groups."""
    return _channel_rows(e, n, spec, apart=True, moved=True)


@lowering("ConvWeightGrad", "folded_channel_rows", requires=[known_batch, *_CHANNELS, one_group, several_samples])
def folded_channel_rows(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """`channel_rows` with the sum over the samples in the product; for small images with many channels."""
    return _channel_rows(e, n, spec, apart=False)


def _channel_rows(e: Emitter, n: Call, spec: ConvSpec, *, apart: bool, moved: bool = False) -> ir.Value:
    """The samples become groups if they are kept `apart` and their number is known, else channels.

    With `moved`, the taps of the first axis become features of dY, each shifted by its rows.
    """
    x, dy, g = n["X"], n["dY"], spec.groups
    batch, _, per, y = sizes_of(e, n, spec)
    inner, features = (spec.channels or g) // g, e.size_mul(per, g)
    size = x_dims(e, x, spec)[2:]
    x = with_samples(e, x, [batch, inner * g, *size])  # ONNX Runtime hangs in a Conv over no channels
    first, *lines = [*(k or 1 for k in spec.kernel[:-1]), spec.span[-1] or 1]
    copies = first if moved else 1
    if moved:
        dy = shifted_copies(e, n, [batch, features, *y], spec)
        y = [e.size_add(y[0], (first - 1) * spec.dilations[0]), *y[1:]]
    listed: list[Dim] = [batch, e.size_mul(features, copies), *y]
    dy = with_samples(e, e.reshape(dy, listed), listed)
    batch = filled(e, batch)
    pixels = e.reshape(x, [batch, g, inner, e.size_mul(*size)])
    groups, lead = g, 1
    if apart and isinstance(batch, int):
        groups, lead = batch * g, batch
        pixels, dy = transpose_last(e, pixels, inner), e.reshape(dy, [e.size_mul(batch, features, copies), 1, *y])
    else:
        pixels = transpose_last(e, pixels, inner) if g == 1 else e.transpose(pixels, [1, 0, 3, 2])
        dy = e.transpose(dy, [1, 0, *range(2, 2 + spec.rank)])
    more = _more(first, math.prod(lines) * inner, per) if lines and not moved else 0
    end = [high - (rest or 0) for high, rest in zip(spec.end, spec.leftover, strict=True)]
    end[0] += more * spec.dilations[0]
    win = Window((*spec.dilations[:-1], 1), spec.strides, spec.begin, tuple(end), groups).interleaved(inner)
    rows = e.reshape(pixels, [1, e.size_mul(batch, g), *rows_of(size, inner)])
    taps = e.reshape(plain_conv(e, rows, dy, win), [lead, features, first + more, *lines, inner])
    taps = e.slice(taps, [0], [first], [2])
    taps = e.slice(taps, [0], [spec.span[-1] or 1], [1 + spec.rank], [spec.dilations[-1]])
    count = spec.taps or 1
    return e.reshape_like(transpose_last(e, batch_sum(e, taps, [lead, features, count, inner]), count), n["W_like"])


def _more(first: int, row: int, features: Dim) -> int:
    """Surplus lags along the first axis that make the points as many as the features, if few are enough.

    ONNX Runtime gathers patches on one thread where a convolution has more features than points (`MlasConvPrepare`).
    """
    need = -(-features // row) if isinstance(features, int) else first
    return need - first if first < need <= 2 * first else 0


# -- the samples -------------------------------------------------------------------------------------------------------


@both_ways(
    "sample_rows",
    samples_in_rows,
    lambda backward: [unit_stride, rows_left_backward] if backward else [last_unit_stride],
)
def sample_rows(e: Emitter, spec: ConvSpec, images: Images) -> ir.Value:
    """A Conv, of the reversed kernel for dX, with the samples inside the rows: for small images with small groups."""
    win = spec.back_window if images.backward else spec.window
    w = reverse_taps(e, images.w, spec) if images.backward else images.w
    rows, batch = as_rows(e, images.v, images.have)
    return from_rows(e, plain_conv(e, rows, w, win.interleaved(batch), images.bias), images.want)
