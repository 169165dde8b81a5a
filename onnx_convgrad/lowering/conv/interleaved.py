"""Convolutions along rows that hold the channels, or the samples, of every point side by side.

A runtime gathers patches by short copies, one per row of the result. Where a row of the result is short, it is longer when
every point of an image holds `m` numbers: the last axis [.., size] becomes [.., size m], dilation, padding and stride along
it are `m` times as large, and one copy takes all `m` of a point, or of neighbouring ones::

    weight gradient    dw[o, t, c] = sum over p of dy[o, p] x[s p + d t - b, c]     m channels of a group
    Conv and dX        y[o, p, n]  = sum over c, t of w[o, c, t] x[c, p + d t - b, n]   m samples

In the weight gradient (with stride and dilation swapped, as ever) the taps of a row and their channels are one run: what
a stride skips is skipped between the runs, so that a strided layer costs no more than another one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import Window
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.samples import filled, with_samples
from onnx_convgrad.lowering.conv.input_grad_phases import extra, few_phases, full_phases, interleave, phase_taps, phases
from onnx_convgrad.lowering.conv.kernels import back_padding, plain_conv, remade, strided, turned
from onnx_convgrad.lowering.conv.shared import (
    conv_kernel,
    features_of,
    known_batch,
    known_channels,
    not_empty,
    one_group,
    several_taps,
    static_sizes,
    swapped,
    turned_matrix,
    unit_stride,
    window,
    x_dims,
    y_dims,
)
from onnx_convgrad.lowering.conv.stacked import several_samples
from onnx_convgrad.lowering.conv.weight_grad import batch_sum, sizes_of
from onnx_convgrad.lowering.conv.weight_grad_shift import moves, several_axes, several_rows, unit_row_stride
from onnx_convgrad.lowering.table import Query, lowering

# -- requirements ------------------------------------------------------------------------------------------------------


def several_channels(q: Query) -> str | None:
    """One channel that several features see makes rows of its own taps, which may be many."""
    spec = q.spec
    if spec.channels != spec.groups or (spec.groups == 1 and spec.features is not None and spec.features > 1):
        return None
    return "a group has one channel"


def copied_rows(q: Query) -> str | None:
    """cuDNN has no kernels for dilations as large as a number of channels, and copies no rows that could be longer."""
    return f"the {q.target.name} provider copies no rows to patches" if q.target.name == "cuda" else None


def rows_left(q: Query) -> str | None:
    """Negative padding is cut off before zeros are added, and something must be left in between."""
    spec = q.spec
    if not spec.static:
        return None  # another requirement says so
    ends = (end - (rest or 0) for end, rest in zip(spec.end, spec.leftover, strict=True))
    rows = (x + min(low, 0) + min(high, 0) for x, low, high in zip(spec.x, spec.begin, ends, strict=True))
    return None if min(rows) > 0 else "negative padding removes every row"


def rows_left_backward(q: Query) -> str | None:
    if not q.spec.static:
        return None
    pads = zip(q.spec.y, *back_padding(q.spec), strict=True)
    rows = (y + min(low, 0) + min(high, 0) for y, low, high in pads)
    return None if min(rows) > 0 else "the padding leaves no row of the output gradient"


def last_unit_stride(q: Query) -> str | None:
    step = q.spec.strides[-1]
    return None if step == 1 else f"the stride along the last axis is {step}, not 1"


# -- shared pieces -----------------------------------------------------------------------------------------------------


def wide(values: Sequence[int], count: int) -> tuple[int, ...]:
    """Amounts along each axis, those along the last one `count` times as large."""
    return (*values[:-1], values[-1] * count)


def rows_of(size: Sequence[Dim], count: int) -> list[Dim]:
    """Sizes of an image of which every point holds `count` numbers."""
    last = size[-1]
    assert isinstance(last, int), "static_sizes requires it"
    return [*size[:-1], last * count]


# -- the channels of a group -------------------------------------------------------------------------------------------


CHANNELS = [
    not_empty,
    conv_kernel,
    copied_rows,
    static_sizes,
    known_channels,
    several_channels,
    several_taps,
    rows_left,
]


@lowering("ConvWeightGrad", "channel_rows", requires=CHANNELS)
def channel_rows(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """`conv_swap` with the channels of a group inside the rows: for small groups, strides and few channels."""
    return _channel_rows(e, n, spec, apart=True)


@lowering("ConvWeightGrad", "moved_channel_rows", requires=[*CHANNELS, several_axes, several_rows, unit_row_stride])
def moved_channel_rows(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """The same with dY moved by each tap of the first axis, all moves as features: fewer patches; for small groups."""
    return _channel_rows(e, n, spec, apart=True, moved=True)


@lowering("ConvWeightGrad", "folded_channel_rows", requires=[known_batch, *CHANNELS, one_group, several_samples])
def folded_channel_rows(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """The same with the sum over the samples in the product; for small images with many channels."""
    return _channel_rows(e, n, spec, apart=False)


def _channel_rows(e: Emitter, n: Call, spec: ConvSpec, *, apart: bool, moved: bool = False) -> ir.Value:
    """The samples are groups of their own if they are kept `apart` and their number is known, else channels.

    `moved` makes the taps of the first axis features of dY, each moved by its rows.
    """
    x, dy, g = n["X"], n["dY"], spec.groups
    batch, _, per, y = sizes_of(e, n, spec)
    inner, features = (spec.channels or g) // g, e.size_mul(per, g)
    size = x_dims(e, x, spec)[2:]
    x = with_samples(e, x, [batch, inner * g, *size])  # ONNX Runtime never returns from a Conv over no channels
    first, *lines = [*(k or 1 for k in spec.kernel[:-1]), spec.span[-1] or 1]
    copies = first if moved else 1
    if moved:
        dy = moves(e, n, [batch, features, *y], spec)
        y = [e.size_add(y[0], (first - 1) * spec.dilations[0]), *y[1:]]
    listed: list[Dim] = [batch, e.size_mul(features, copies), *y]
    dy = with_samples(e, e.reshape(dy, listed), listed)
    batch = filled(e, batch)
    pixels = e.reshape(x, [batch, g, inner, e.size_mul(*size)])
    groups, lead = g, 1
    if apart and isinstance(batch, int):
        groups, lead = batch * g, batch
        pixels, dy = swapped(e, pixels, inner), e.reshape(dy, [e.size_mul(batch, features, copies), 1, *y])
    else:
        pixels = swapped(e, pixels, inner) if g == 1 else e.transpose(pixels, [1, 0, 3, 2])
        dy = e.transpose(dy, [1, 0, *range(2, 2 + spec.rank)])
    more = _more(first, math.prod(lines) * inner, per) if lines and not moved else 0
    end = [high - (rest or 0) for high, rest in zip(spec.end, spec.leftover, strict=True)]
    end[0] += more * spec.dilations[0]
    steps = (*spec.dilations[:-1], 1)
    win = Window(steps, wide(spec.strides, inner), wide(spec.begin, inner), wide(end, inner), groups)
    rows = e.reshape(pixels, [1, e.size_mul(batch, g), *rows_of(size, inner)])
    taps = e.reshape(plain_conv(e, rows, dy, win), [lead, features, first + more, *lines, inner])
    taps = e.slice(taps, [0], [first], [2])
    taps = e.slice(taps, [0], [spec.span[-1] or 1], [1 + spec.rank], [spec.dilations[-1]])
    count = spec.taps or 1
    return e.reshape_like(swapped(e, batch_sum(e, taps, [lead, features, count, inner]), count), n["W_like"])


def _more(first: int, row: int, features: Dim) -> int:
    """Further lags along the first axis, so that there are as many as features, if it takes few.

    ONNX Runtime gathers patches on one thread where a convolution has more features than points (`MlasConvPrepare`).
    """
    need = -(-features // row) if isinstance(features, int) else first
    return need - first if first < need <= 2 * first else 0


# -- the samples -------------------------------------------------------------------------------------------------------


def _to_rows(e: Emitter, v: ir.Value, size: list[Dim]) -> tuple[ir.Value, int]:
    """[N, C, *size] as one image [1, C, .., N times the last size], and N."""
    batch = size[0]
    assert isinstance(batch, int), "known_batch requires it"
    v = swapped(e, e.reshape(v, [batch, e.size_mul(*size[1:])]), batch)
    return e.reshape(v, [1, size[1], *rows_of(size[2:], batch)]), batch


def from_rows(e: Emitter, v: ir.Value, size: list[Dim]) -> ir.Value:
    """[N, C, *size] from such an image."""
    return e.reshape(turned_matrix(e, e.reshape(v, [e.size_mul(*size[1:]), size[0]])), size)


def _sample_rows(
    e: Emitter, v: ir.Value, w: ir.Value, win: Window, have: list[Dim], want: list[Dim], bias: ir.Value | None = None
) -> ir.Value:
    """The convolution of v [N, C, *have] to [N, O, *want], with the samples inside the rows."""
    rows, batch = _to_rows(e, v, have)
    flat = Window(win.strides, wide(win.dilations, batch), wide(win.begin, batch), wide(win.end, batch), win.group)
    return from_rows(e, plain_conv(e, rows, w, flat, bias), want)


_SAMPLES = [not_empty, conv_kernel, known_batch, several_samples, static_sizes, several_taps]


@lowering("Conv", "sample_rows", requires=[*_SAMPLES, last_unit_stride])
def sample_rows_forward(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """A Conv with the samples inside the rows: for small images with small groups."""
    have = x_dims(e, n["X"], spec)
    features = features_of(e, n["W"], spec)
    want = [have[0], features, *(size or 0 for size in spec.y)]
    return _sample_rows(e, n["X"], n["W"], window(spec), have, want, n.get("B"))


@lowering("ConvInputGrad", "sample_rows", requires=[*_SAMPLES, unit_stride, rows_left_backward])
def sample_rows_input_grad(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """`flipped_conv` with the samples inside the rows: for small images with small groups."""
    dy, like = n["dY"], n["X_like"]
    win = Window((1,) * spec.rank, spec.dilations, *back_padding(spec), spec.groups)
    return _sample_rows(e, dy, turned(e, n["W"], spec), win, y_dims(e, dy, spec), x_dims(e, like, spec))


@lowering("ConvInputGrad", "sample_phases", requires=[*_SAMPLES, strided, few_phases, full_phases])
def sample_phases(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """`phases` with the samples inside the rows, so that those of all samples are put side by side at once."""
    dy, ones = n["dY"], (1,) * spec.rank
    size = x_dims(e, n["X_like"], spec)
    rows, batch = _to_rows(e, dy, y_dims(e, dy, spec))
    more = [extra(spec, axis) for axis in range(spec.rank)]
    have = [(y or 0) + m for y, m in zip(spec.y, more, strict=True)]
    parts = []
    for chosen in itertools.product(*(phases(spec, axis) for axis in range(spec.rank))):
        phase = [p for p in chosen if p is not None]
        w = remade(e, n["W"], spec, phase_taps(phase, spec), [len(p.taps) for p in phase], exchange=True)
        begin, end = [-p.offset for p in phase], [m + p.last for m, p in zip(more, phase, strict=True)]
        dilations = wide([p.dilation for p in phase], batch)
        parts.append(plain_conv(e, rows, w, Window(ones, dilations, wide(begin, batch), wide(end, batch), spec.groups)))
    whole = interleave(e, parts, size[1], [*have, batch], [*spec.strides, 1])
    full = [d * s for d, s in zip(have, spec.strides, strict=True)]
    whole = e.slice(e.reshape(whole, [size[1], *full, batch]), [0] * spec.rank, size[2:], range(1, 1 + spec.rank))
    return from_rows(e, whole, size)
