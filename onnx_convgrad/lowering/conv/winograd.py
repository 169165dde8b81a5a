"""Winograd forms of the convolution and its gradients: fewer multiplications for small dense kernels.

One axis, F(m, k): m outputs of a correlation with k taps come from t = m + k - 1 inputs by t multiplications instead of
m k (Winograd 1980; Lavin and Gray, arXiv:1509.09308; the matrices are Toom and Cook's)::

    y = A ((G w) * (B x))       y[m], w[k], x[t];  A[m, t], G[t, k], B[t, t];  * is elementwise

With a stride, each of its phases is such a correlation (`winograd_tiles`). Several axes nest: A, G and B act on each, and
the number of multiplications is the product. Summed over channels, each point p = (p1, .., pd) is one matrix product, with
the tiles of all samples as its rows::

    Conv            Y[p, tile, o] = X[p, tile, c] W[p, o, c]^T      x tiles by B, w by G, y by A
    ConvInputGrad   X[p, tile, c] = Y[p, tile, o] W[p, o, c]        the same convolution with w reversed
    ConvWeightGrad  W[p, o, c] = Y[p, tile, o]^T X[p, tile, c]      F(k, m): dY's tiles are the taps, dW the outputs

Passes over memory take most of the time, so the layout decides: spatial axes first, samples and channels last. Then cutting
into tiles moves long runs, B and G on one axis are a strided Conv with a constant kernel (which pads, cuts and
multiplies in one pass), A is a MatMul, one Gather joins the tiles, and the Transposes that remain exchange two groups of
axes, which runtimes do fast.

Each group has its own products, which pay off only with several channels per group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir import geometry
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.ir.samples import cut_samples, filled, with_samples
from onnx_convgrad.lowering.conv.both_ways import OPERATOR, Images
from onnx_convgrad.lowering.conv.kernels import plain_conv, reverse_taps
from onnx_convgrad.lowering.conv.layout import features_of, x_dims, y_dims
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    few_points,
    not_empty,
    static_groups,
    static_kernel,
    static_sizes,
    unit_stride,
)
from onnx_convgrad.lowering.conv.winograd_tiles import (
    MOST,
    TiledAxis,
    Triple,
    data_matrices,
    forward_matrices,
    from_points,
    matrices,
    rounding,
    rows_read,
    tiled,
    to_points,
    weight_to_points,
)
from onnx_convgrad.lowering.table import Query, Requirement, lowering, needs

_LEAST = 8
"""Least channels and features of a group, unless there is only one group."""

SIZES = (2, 3, 4, 6)
"""Largest tiles of the lowerings, in outputs along an axis."""

Cut = Callable[[ConvSpec, int], list[TiledAxis]]
"""Cuts the axes of a convolution into tiles of at most a number of outputs."""

Form = Callable[[TiledAxis, int], Triple]
"""The matrices of one axis, given the padding in front of it."""

# -- requirements ------------------------------------------------------------------------------------------------------


def wide_groups(q: Query) -> str | None:
    """Products with fewer rows or columns take longer than the saved multiplications."""
    spec = q.spec
    if spec.groups == 1:
        return None
    if spec.channels is None or spec.features is None:
        return "the number of channels is not known"
    least = min(spec.channels, spec.features) // spec.groups
    return None if least >= _LEAST else f"a group has {least} channels or features, fewer than {_LEAST}"


def small_kernel(q: Query) -> str | None:
    longest = max(-(-(k or 1) // s) for k, s in zip(q.spec.kernel, q.spec.strides, strict=True))
    if longest == 1:
        return f"{'a kernel' if q.spec.unit_stride else 'a phase'} of one tap leaves nothing to save"
    return None if longest < MOST else f"a kernel of {longest} rows needs more than {MOST} points"


def strides_of_taps(q: Query) -> str | None:
    for axis, (k, s, d) in enumerate(zip(q.spec.kernel, q.spec.strides, q.spec.dilations, strict=True)):
        if s > 1 and (k is None or k < s or d > 1):
            return f"along axis {axis} the stride is {s}, with {f'dilation {d}' if d > 1 else f'a kernel of {k}'}"
    return None


def rows_remain(q: Query) -> str | None:
    ends = (high - (rest or 0) for high, rest in zip(q.spec.end, q.spec.leftover, strict=True))
    left = all(x is None or x + min(low, high) > 0 for x, low, high in zip(q.spec.x, q.spec.begin, ends, strict=True))
    return None if left else "the windows reach nothing but padding"


def usual_padding(q: Query) -> str | None:
    """The Conv that cuts tiles can pad by its attribute, which must do where the number of rows is unknown."""
    spec = q.spec
    for x, y, k, d, s, *pads in zip(
        spec.x, spec.y, spec.kernel, spec.dilations, spec.strides, spec.begin, spec.end, strict=True
    ):
        if None in (x, y) and ((max(d, s) != 1 and k != 1) or min(pads) < 0 or max(pads) >= k):
            return "a spatial size is not known while building, and the kernel is dilated, strided or unusually padded"
    return None


def distinct_tile(most: int, cut: Cut) -> Requirement:
    """Tiles of at most `most` rows differ from those of the next smaller size."""

    def requirement(q: Query) -> str | None:
        smaller = max((s for s in SIZES if s < most), default=1)
        small, large = (cut(q.spec, m) for m in (smaller, most))
        return "smaller tiles do the same" if small == large else None

    return requirement


def _axes(spec: ConvSpec, sizes: Sequence[int | None], most: int) -> list[TiledAxis]:
    rows = zip(sizes, spec.kernel, spec.dilations, spec.strides, strict=True)
    return [tiled(size, taps or 1, dilation, most, stride) for size, taps, dilation, stride in rows]


def _x_axes(spec: ConvSpec, most: int) -> list[TiledAxis]:
    """The axes of the data in tiles of whole strides."""
    rows = zip(spec.x, spec.strides, strict=True)
    return _axes(spec, [None if x is None else -(-x // s) for x, s in rows], most)


def _y_axes(spec: ConvSpec, most: int) -> list[TiledAxis]:
    return _axes(spec, spec.y, most)


def _counted(e: Emitter, axes: list[TiledAxis], sizes: Sequence[Dim]) -> list[TiledAxis]:
    """The axes with the number of their tiles."""
    return [
        axis if axis.count is not None else replace(axis, count=e.size_div(e.size_add(size, axis.tile - 1), axis.tile))
        for axis, size in zip(axes, sizes, strict=True)
    ]


REQUIRES = [
    not_empty,
    conv_kernel,
    strides_of_taps,
    wide_groups,
    static_kernel,
    few_points,
    small_kernel,
    rows_remain,
    usual_padding,
]

# -- the lowerings -----------------------------------------------------------------------------------------------------


def forward(e: Emitter, n: Call, spec: ConvSpec, most: int) -> ir.Value:
    """Y = A ((G W) (B X))."""
    x, w, bias = n["X"], n["W"], n.get("B")
    batch, channels, *rows = x_dims(e, x, spec)
    features = features_of(e, w, spec)
    pads = list(zip(spec.begin, spec.end, strict=True))
    y: list[Dim] = [
        size if size is not None else e.size_add(have, low + high + 1 - (taps or 1))
        for size, have, taps, (low, high) in zip(spec.y, rows, spec.kernel, pads, strict=True)
    ]
    axes = _counted(e, _y_axes(spec, most), y)
    a, g, b = zip(*map(forward_matrices, axes), strict=True)
    weight = weight_to_points(e, w, [features, channels], list(g), spec.groups)
    x = with_samples(e, x, [batch, channels, *rows])
    steps = [axis.step for axis in axes]
    tiles = to_points(e, x, [filled(e, batch), channels, *rows], axes, list(b), pads, steps, spec.groups)
    product = e.matmul(tiles, e.swap_last(weight))
    result = from_points(e, product, [batch, features, *y], axes, list(a), spec.groups)
    return biased(e, result, bias, spec.rank)


def input_grad(e: Emitter, n: Call, spec: ConvSpec, most: int) -> ir.Value:
    """The convolution of dY with the kernel reversed; with strides, one for each phase of the rows of dX."""
    dy, w = n["dY"], n["W"]
    batch, features, *rows = y_dims(e, dy, spec)
    channels, *size = x_dims(e, n["X_like"], spec)[1:]
    axes = _counted(e, _x_axes(spec, most), size)
    a, g, b = zip(*map(data_matrices, axes, spec.begin), strict=True)
    starts = [min(start for *_, start in rows_read(*pair)) for pair in zip(axes, spec.begin, strict=True)]
    pads = [(-start, end) for start, end in zip(starts, spec.back_window.end, strict=True)]
    weight = weight_to_points(e, w, [features, channels], list(g), spec.groups)
    dy = with_samples(e, dy, [batch, features, *rows])
    steps = [axis.tile for axis in axes]
    tiles = to_points(e, dy, [filled(e, batch), features, *rows], axes, list(b), pads, steps, spec.groups)
    return from_points(e, e.matmul(tiles, weight), [batch, channels, *size], axes, list(a), spec.groups)


def weight_grad(e: Emitter, n: Call, spec: ConvSpec, most: int) -> ir.Value:
    """F(k, m): each tile of dY is a kernel of m taps, the weight's gradient has k outputs; summed over the tiles."""
    x, dy = n["X"], n["dY"]
    x_size, y_size = x_dims(e, x, spec), y_dims(e, dy, spec)
    x, dy = with_samples(e, x, x_size), with_samples(e, dy, y_size)
    x_size[0] = y_size[0] = filled(e, x_size[0])
    axes = _counted(e, _y_axes(spec, most), y_size[2:])
    a, g, b = zip(*(forward_matrices(axis, weight_grad=True) for axis in axes), strict=True)
    # A shape of its own, so that the runtime does not share tiles, larger than x, with the forward pass and hold them.
    flat = e.reshape(x, [*x_size[:2], e.size_mul(*x_size[2:]), 1])
    pads = list(zip(spec.begin, spec.end, strict=True))
    x_tiles = to_points(e, flat, x_size, axes, list(b), pads, [axis.step for axis in axes], spec.groups, [2, 3, 0, 1])
    steps = [axis.tile for axis in axes]
    y_tiles = to_points(e, dy, y_size, axes, list(g), [(0, 0)] * spec.rank, steps, spec.groups)
    product = e.matmul(e.swap_last(y_tiles), x_tiles)
    kernel = reduce(np.kron, a)
    size = e.size_mul(*(e.size_div(channels, spec.groups) for channels in (y_size[1], x_size[1])))
    lead = [spec.groups] if spec.groups > 1 else []
    points = e.swap_last(e.reshape(product, [*lead, kernel.shape[1], size]))  # transposed while the product packs them
    return e.reshape_like(e.matmul(points, e.const(kernel.T, x.dtype)), n["W_like"])


def declare(
    op_type: str,
    name: str,
    emit: Callable[[Emitter, Call, ConvSpec, int], ir.Value],
    cut: Cut,
    form: Form,
    requires: Sequence[Requirement],
) -> None:
    """Declare one lowering per size of tile; `cut` cuts the axes into tiles, `form` gives their matrices."""
    where = "along every axis" if name == "winograd" else "along the first axis alone"
    for most in SIZES:

        def lower(e: Emitter, n: Call, spec: ConvSpec, most: int = most) -> ir.Value:
            return emit(e, n, spec, most)

        def rounds(spec: ConvSpec, most: int = most) -> float:
            return math.prod(map(rounding, map(form, cut(spec, most), spec.begin)))

        lower.__doc__ = f"Winograd's minimal filtering {where}, with tiles of at most {most} outputs."
        lowering(op_type, f"{name}_{most}", requires=[*requires, distinct_tile(most, cut)], rounding=rounds)(lower)


declare("Conv", "winograd", forward, _y_axes, lambda axis, _: forward_matrices(axis), REQUIRES)
declare("ConvInputGrad", "winograd", input_grad, _x_axes, data_matrices, REQUIRES)
declare(
    "ConvWeightGrad",
    "winograd",
    weight_grad,
    _y_axes,
    lambda axis, _: forward_matrices(axis, weight_grad=True),
    REQUIRES,
)

# -- the first axis alone ---------------------------------------------------------------------------------------------
#
# Filtering all axes saves most multiplications, but reorders both operands twice: on processors whose cores share no cache,
# waiting for values that other cores wrote takes as long as the products do. Along the first axis alone the samples stay in
# place, so that each core continues with the values that it wrote itself:
#
#     X[n, p, c, tile, ..] = sum over r of B[p, r] x[n, c, step tile + r, ..]       a Conv of [n, 1, c, rows, ..]
#     Y[n, p] = Conv of X[n, p] with sum over k of G[p, k] w[.., k, ..]             one Conv, the points as groups
#     y[n, o, step tile + r, ..] = sum over p of A[r, p] Y[n, p, o, tile, ..]       one product
#
# with `m + k - 1` points for the `m k` multiplications of m rows and k taps, and rounding errors of a single axis.

other_axes = needs(lambda s: s.rank > 1, "there is one axis, along which a runtime copies single elements")


def filtered_axis(q: Query) -> str | None:
    """The first axis has taps to save, next to each other."""
    taps, stride, dilation = q.spec.kernel[0] or 1, q.spec.strides[0], q.spec.dilations[0]
    if taps == 1:
        return "the kernel has one row"
    if taps >= MOST:
        return f"a kernel of {taps} rows needs more than {MOST} points"
    return None if stride == dilation == 1 else f"the stride and dilation of the rows are {stride} and {dilation}"


def rows_padded(backward: bool) -> Requirement:
    """No rows are cut off: the Conv that cuts tiles also pads them."""

    def requirement(q: Query) -> str | None:
        win = q.spec.back_window if backward else q.spec.window
        begin, end = win.begin[0], win.end[0]
        return None if min(begin, end) >= 0 else f"the rows are padded by {begin} and {end}, which cuts some off"

    return requirement


_ALONG_ROWS = [not_empty, conv_kernel, static_kernel, static_sizes, static_groups, other_axes, filtered_axis]


def _both_axes(spec: ConvSpec, *, backward: bool) -> tuple[geometry.Axis, ...]:
    return spec.back_axes if backward else spec.axes


def _cut_rows(spec: ConvSpec, most: int, *, backward: bool) -> list[TiledAxis]:
    first = _both_axes(spec, backward=backward)[0]
    return [tiled(first.y, first.kernel, 1, most)]


def _filtered(e: Emitter, n: Call, spec: ConvSpec, most: int, *, backward: bool) -> ir.Value:
    """The convolution, of dY with the reversed kernel for dX, its first axis cut into tiles."""
    images = Images(e, n, spec, backward)
    win = spec.back_window if backward else spec.window
    first, *inner = _both_axes(spec, backward=backward)
    (batch, channels, *_), features = images.have, images.want[1]
    width_read, width = math.prod(at.x for at in inner), math.prod(at.y for at in inner)
    w = reverse_taps(e, images.w, spec) if backward else images.w
    (axis,) = _cut_rows(spec, most, backward=backward)
    a, g, b = matrices(axis.tile, axis.taps)
    points, rows = b.shape
    count = -(-first.y // axis.tile)
    samples = filled(e, batch)
    w = _kernel(e, w, g, features, e.size_div(channels, win.group), [at.kernel for at in inner])
    x = e.reshape(with_samples(e, images.v, images.have), [samples, 1, channels, first.x, width_read])
    begin = win.begin[0]
    end = (count - 1) * axis.tile + rows - first.x - begin
    tiles = Window((1, axis.tile, 1), (1, 1, 1), (0, begin, 0), (0, end, 0), 1)
    x = plain_conv(e, x, e.const(b.reshape(points, 1, 1, rows, 1), x.dtype), tiles)

    along = Window(
        (1, *win.strides[1:]), (1, *win.dilations[1:]), (0, *win.begin[1:]), (0, *win.end[1:]), points * win.group
    )
    x = e.reshape(x, [samples, e.size_mul(points, channels), count, *(at.x for at in inner)])
    y = plain_conv(e, x, w, along)

    lines = e.size_mul(features, count)
    y = e.matmul(e.const(a, y.dtype), e.reshape(y, [samples, points, e.size_mul(lines, width)]))
    y = e.transpose(e.reshape(y, [samples, axis.tile, lines, width]), [0, 2, 1, 3])
    y = e.reshape(y, [samples, features, count * axis.tile, *(at.y for at in inner)])
    if count * axis.tile > first.y:
        y = e.slice(y, [0], [first.y], [2])
    return biased(e, cut_samples(e, y, batch), images.bias, spec.rank)


def _kernel(e: Emitter, w: ir.Value, g: np.ndarray, features: Dim, channels: Dim, along: Sequence[int]) -> ir.Value:
    """w [O, C / g, k, *along] by G [points, k] along its first axis: [points O, C / g, 1, *along]."""
    points, taps = g.shape
    flat = e.reshape(w, [e.size_mul(features, channels), taps, math.prod(along)])
    flat = e.reshape(e.transpose(flat, [1, 0, 2]), [taps, e.size_mul(features, channels, *along)])
    return e.reshape(e.matmul(e.const(g, w.dtype), flat), [e.size_mul(points, features), channels, 1, *along])


for _backward, _op_type in OPERATOR.items():
    declare(
        _op_type,
        "winograd_rows",
        partial(_filtered, backward=_backward),
        partial(_cut_rows, backward=_backward),
        lambda axis, _: matrices(axis.tile, axis.taps),
        [*_ALONG_ROWS, *([unit_stride] if _backward else []), rows_padded(_backward)],
    )
