"""Winograd forms of the convolution and its gradients: fewer multiplications for small dense kernels.

One axis, F(m, k): m outputs of a correlation with k taps come from t = m + k - 1 inputs by t multiplications instead of
m k (Winograd 1980; Lavin and Gray, arXiv:1509.09308; the matrices are Toom and Cook's)::

    y = A ((G w) * (B x))       y[m], w[k], x[t];  A[m, t], G[t, k], B[t, t];  * is elementwise

With a stride, each of its phases is such a correlation (`winograd_axes`). Several axes nest: A, G and B act on each, and
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
from functools import reduce

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.samples import filled, may_be_empty, with_samples
from onnx_convgrad.lowering.conv.layout import features_of, separate_transpose, x_dims, y_dims
from onnx_convgrad.lowering.conv.requirements import conv_kernel, not_empty, static_kernel
from onnx_convgrad.lowering.conv.winograd_axes import (
    MOST,
    Axis,
    data_matrices,
    forward_matrices,
    rows_read,
    tiled,
    weight_matrices,
)
from onnx_convgrad.lowering.table import Query, Requirement, lowering

_LEAST = 8
"""Least channels and features of a group, unless there is only one group."""

SIZES = (2, 4, 6)
"""Largest tiles of the lowerings, in outputs along an axis."""

Cut = Callable[[ConvSpec, int], list[Axis]]
"""Cuts the axes of a convolution into tiles of at most a number of outputs."""

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
    """Where the number of rows is unknown, padding must be an attribute of the Conv that cuts tiles."""
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


def _axes(spec: ConvSpec, sizes: Sequence[int | None], most: int) -> list[Axis]:
    rows = zip(sizes, spec.kernel, spec.dilations, spec.strides, strict=True)
    return [tiled(size, taps or 1, dilation, most, stride) for size, taps, dilation, stride in rows]


def _x_axes(spec: ConvSpec, most: int) -> list[Axis]:
    """The axes of the data in tiles of whole strides."""
    rows = zip(spec.x, spec.strides, strict=True)
    return _axes(spec, [None if x is None else -(-x // s) for x, s in rows], most)


def _y_axes(spec: ConvSpec, most: int) -> list[Axis]:
    return _axes(spec, spec.y, most)


def _counted(e: Emitter, axes: list[Axis], sizes: Sequence[Dim]) -> list[Axis]:
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
    small_kernel,
    rows_remain,
    usual_padding,
]

# -- tiles -------------------------------------------------------------------------------------------------------------


def to_points(
    e: Emitter,
    v: ir.Value,
    size: list[Dim],
    axes: list[Axis],
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
    e: Emitter, v: ir.Value, size: list[Dim], axes: list[Axis], kernels: list[np.ndarray], groups: int
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


def _places(e: Emitter, axes: list[Axis], heights: Sequence[int], spatial: Sequence[Dim]) -> ir.Value:
    """Where [*heights, *(count, dilation)] holds each point of the image: a sum of one part per axis, in row-major order.

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


def _place(e: Emitter, axis: Axis, height: int, size: Dim, tiles: Dim, behind: Dim) -> ir.Value:
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
    a, g, b = zip(*map(weight_matrices, axes), strict=True)
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
    where: str,
    emit: Callable[[Emitter, Call, ConvSpec, int], ir.Value],
    cut: Cut,
    requires: Sequence[Requirement],
) -> None:
    """Declare one lowering per size of tile; `cut` cuts the axes into tiles."""
    for most in SIZES:

        def lower(e: Emitter, n: Call, spec: ConvSpec, most: int = most) -> ir.Value:
            return emit(e, n, spec, most)

        lower.__doc__ = f"Winograd's minimal filtering {where}, with tiles of at most {most} outputs."
        lowering(op_type, f"{name}_{most}", requires=[*requires, distinct_tile(most, cut)], exact=False)(lower)


for _op_type, _emit, _cut in (
    ("Conv", forward, _y_axes),
    ("ConvInputGrad", input_grad, _x_axes),
    ("ConvWeightGrad", weight_grad, _y_axes),
):
    declare(_op_type, "winograd", "along every axis", _emit, _cut, REQUIRES)
