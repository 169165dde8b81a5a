"""Winograd forms of the convolution and its gradients: fewer multiplications for small dense kernels.

One axis, F(m, k): m outputs of a correlation with k taps come from t = m + k - 1 inputs by t multiplications instead of
m k (Winograd 1980; Lavin and Gray, arXiv:1509.09308; the matrices are Toom and Cook's, below)::

    y = A ((G w) * (B x))       y[m], w[k], x[t];  A[m, t], G[t, k], B[t, t];  * is elementwise

Several axes nest: A, G and B act on each, and the number of multiplications is the product. Summed over channels, every
one of the points p = (p1, .., pd) is one matrix product, with the tiles of all samples as its rows::

    Conv            Y[p, tile, o] = X[p, tile, c] W[p, o, c]^T      x tiles by B, w by G, y by A
    ConvInputGrad   X[p, tile, c] = Y[p, tile, o] W[p, o, c]        the same convolution with w turned around
    ConvWeightGrad  W[p, o, c] = Y[p, tile, o]^T X[p, tile, c]      F(k, m): dY's tiles are the taps, dW the outputs

Time goes into the passes over memory, so the layout decides: spatial axes first, samples and channels last. Then cutting
into tiles moves long runs, B and G on one axis are a strided Conv with a constant kernel (which pads, cuts and
multiplies in one pass), A is a MatMul, one Gather puts the tiles together, and the Transposes that remain exchange two
groups of axes, which runtimes do fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce

import numpy as np
import onnx_ir as ir

from onnx_convgrad.emit import Dim, Emitter
from onnx_convgrad.geometry import ConvSpec
from onnx_convgrad.lowering import Query, Requirement, lowering
from onnx_convgrad.registry import Call
from onnx_convgrad.rules.conv_shared import (
    conv_kernel,
    not_empty,
    static_sizes,
    unit_stride,
    x_dims,
    y_dims,
)
from onnx_convgrad.samples import filled, may_be_empty, with_samples

POINTS = {
    1: (0.0,),
    2: (1.0, -1.0),
    3: (0.0, 1.0, -1.0),
    4: (0.0, 1.25, -1.25, -0.5),
    5: (0.0, 0.75, -0.75, 1.5, -1.5),
    6: (0.0, 1.0, -1.0, 2.0, -2.0, 0.5),
    7: (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5),
}
"""The finite points of evaluation, by their number; chosen for small rounding errors. One more lies at infinity."""

MOST = max(POINTS) + 1
"""The longest window: with more points float32 loses too many digits."""

SIZES = (2, 4, 6)
"""The lowerings: tiles of at most this many outputs on an axis."""

# -- one axis ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """One spatial axis cut into tiles: `count` tiles of `tile` outputs each, of a kernel with `taps` taps.

    With dilation d the rows r, r + d, r + 2 d, .. are an axis of their own for each of the d phases r: there are `count`
    tiles of each phase. An axis with one tap is left whole: its tiles are its rows.
    """

    tile: int
    taps: int
    count: int
    dilation: int = 1

    @property
    def window(self) -> int:
        """Rows that the outputs of one tile depend on, and the number of points."""
        return self.tile + self.taps - 1

    @property
    def outputs(self) -> int:
        """Rows of all tiles; the last tiles may reach past the end."""
        return self.tile * self.count * self.dilation


def tiled(size: int, taps: int, dilation: int, most: int) -> Axis:
    """The axis in as few equal tiles as a tile size of at most `most` allows."""
    if taps == 1:
        return Axis(1, 1, size)
    rows = -(-size // dilation)
    count = -(-rows // min(most, MOST + 1 - taps))
    return Axis(-(-rows // count), taps, count, dilation)


@cache
def matrices(outputs: int, taps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, G and B of F(outputs, taps): evaluation at the points, and interpolation through them, transposed."""
    points = np.array(POINTS.get(outputs + taps - 2, ()))
    others = [np.delete(points, i) for i in range(len(points))]
    scale = np.array([np.prod(p - rest) for p, rest in zip(points, others, strict=True)]).reshape(-1, 1)
    a = np.vander(points, outputs, increasing=True)
    g = np.vander(points, taps, increasing=True) / scale
    b = [[*np.atleast_1d(np.poly(rest))[::-1], 0.0] for rest in others]
    last = np.atleast_1d(np.poly(points))[::-1]
    return np.vstack([a, np.eye(outputs)[-1]]).T, np.vstack([g, np.eye(taps)[-1]]), np.array([*b, last])


# -- requirements ------------------------------------------------------------------------------------------------------


def dense(q: Query) -> str | None:
    return None if q.spec.groups == 1 else f"the convolution has {q.spec.groups} groups"


def small_kernel(q: Query) -> str | None:
    longest = max(q.spec.kernel)
    if longest == 1:
        return "a kernel of one tap leaves nothing to save"
    return None if longest < MOST else f"a kernel of {longest} rows needs more than {MOST} points"


def rows_remain(q: Query) -> str | None:
    pads = zip(q.spec.x, q.spec.begin, q.spec.end, strict=True)
    return None if all(x + min(low, high) > 0 for x, low, high in pads) else "negative padding removes every row"


def own_tile(most: int, of: str) -> Requirement:
    """Whether tiles of at most `most` rows differ from those of the next smaller size."""

    def requirement(q: Query) -> str | None:
        smaller = max((s for s in SIZES if s < most), default=1)
        small, large = (_axes(q.spec, getattr(q.spec, of), m) for m in (smaller, most))
        return "smaller tiles do the same" if small == large else None

    return requirement


def _axes(spec: ConvSpec, sizes: Sequence[int | None], most: int) -> list[Axis]:
    rows = zip(sizes, spec.kernel, spec.dilations, strict=True)
    return [tiled(size or 1, taps or 1, dilation, most) for size, taps, dilation in rows]


REQUIRES = [
    not_empty,
    conv_kernel,
    unit_stride,
    dense,
    static_sizes,
    small_kernel,
    rows_remain,
]

# -- tiles -------------------------------------------------------------------------------------------------------------


def to_points(
    e: Emitter,
    v: ir.Value,
    size: list[Dim],
    axes: list[Axis],
    kernels: list[np.ndarray],
    begin: Sequence[int],
    perm: Sequence[int] | None = None,
) -> ir.Value:
    """Cut [N, C, *size] into tiles and multiply each axis by its matrix [points, rows]: [points, tiles N, C].

    Tile i of phase r begins at row `dilation tile i + r - begin`; rows outside are zeros. `perm` puts the spatial axes
    first, if `v` has another shape.
    """
    n, c, *spatial = size
    v = e.transpose(v, perm or [*range(2, 2 + len(axes)), 0, 1])
    points, tiles = 1, 1
    for i, (axis, kernel, start) in enumerate(zip(axes, kernels, begin, strict=True)):
        rows, phases = spatial[i], axis.dilation
        assert isinstance(rows, int), "static_sizes requires it"
        need = ((axis.count - 1) * axis.tile + kernel.shape[1]) * phases
        v = e.reshape(v, [points, 1, tiles, rows, e.size_mul(*spatial[i + 1 :], n, c)])
        v = e.slice(v, [max(-start, 0)], [min(need - start, rows)], [3])
        low, high = max(start, 0), max(need - start - rows, 0)
        whole = kernel.size == 1 or (low != high and not e.target.asymmetric_pads)
        pads = (low, high) if whole else (low % phases, high % phases)
        v = e.pad(v, [pads[0]], [pads[1]], [3])
        if kernel.size > 1:
            rows = (need - low - high + sum(pads)) // phases
            v = e.reshape(v, [points, 1, tiles, rows, e.size_mul(phases, *spatial[i + 1 :], n, c)])
            v = e.op(  # over three axes: ONNX Runtime would rearrange the channels of a Conv over two
                "Conv",
                v,
                e.const(kernel.reshape(-1, 1, 1, kernel.shape[1], 1), v.dtype),
                strides=[1, axis.tile, 1],
                pads=[0, (low - pads[0]) // phases, 0, 0, (high - pads[1]) // phases, 0],
            )
        points, tiles = points * kernel.shape[0], tiles * axis.count * phases
    return e.reshape(v, [points, e.size_mul(tiles, n), c])


def from_points(e: Emitter, v: ir.Value, size: list[Dim], axes: list[Axis], kernels: list[np.ndarray]) -> ir.Value:
    """Multiply each axis of [points, tiles N, C] by its matrix [tile, points] and put the tiles together: [N, C, *size]."""
    samples, c, *spatial = size
    n, rank = filled(e, samples), len(axes)
    counts = [number for axis in axes for number in (axis.count, axis.dilation)]
    behind: Dim = e.size_mul(*counts, n, c)
    points = math.prod(kernel.shape[1] for kernel in kernels)
    for kernel in reversed(kernels):  # the last axis first, so that the last product is one of plain matrices
        points //= kernel.shape[1]
        if kernel.size > 1:
            lead = [points] if points > 1 else []
            v = e.matmul(e.const(kernel, v.dtype), e.reshape(v, [*lead, kernel.shape[1], behind]))
        behind = e.size_mul(behind, kernel.shape[0])
    rows = math.prod(axis.tile for axis in axes) * math.prod(counts)
    v = e.op("Gather", e.reshape(v, [rows, e.size_mul(n, c)]), _places(e, axes, spatial), axis=0)
    v = e.reshape(v, [*spatial, n, c])
    if may_be_empty(e, samples):
        v = e.slice(v, [0], [samples], [rank])
    return e.transpose(v, [rank, rank + 1, *range(rank)])


def _places(e: Emitter, axes: list[Axis], spatial: Sequence[Dim]) -> ir.Value:
    """Where [*tile, *(count, dilation)] holds each point of the image: the sum of one part per axis, in row-major order.

    One Gather puts the tiles together, crops what reaches past the end and runs on all threads, as no Transpose does.
    """
    total: ir.Value | None = None
    behind = math.prod(axis.count * axis.dilation for axis in axes)
    tiles = math.prod(axis.tile for axis in axes) * behind
    for i, (axis, size) in enumerate(zip(axes, spatial, strict=True)):
        assert isinstance(size, int), "static_sizes requires it"
        tiles //= axis.tile
        behind //= axis.count * axis.dilation
        tile, place = np.divmod(np.arange(size), axis.tile * axis.dilation)
        row, phase = np.divmod(place, axis.dilation)
        part = row * tiles + (tile * axis.dilation + phase) * behind
        index = e.const(part.reshape(-1, *(1,) * (len(axes) - 1 - i)), ir.DataType.INT32)
        total = index if total is None else e.add(total, index)
    assert total is not None
    return e.reshape(total, [math.prod(spatial)])


def weight_to_points(e: Emitter, w: ir.Value, size: list[Dim], kernels: list[np.ndarray]) -> ir.Value:
    """w [O, C, *k] by a matrix [points, k] on each axis: [points, O, C]."""
    kernel = reduce(np.kron, kernels)
    rows = e.reshape(w, [e.size_mul(*size), kernel.shape[1]])
    return e.reshape(e.matmul(e.const(kernel, w.dtype), e.swap_last(rows)), [kernel.shape[0], *size])


# -- the lowerings -----------------------------------------------------------------------------------------------------


def forward(e: Emitter, n: Call, spec: ConvSpec, most: int) -> ir.Value:
    """Y = A ((G W) (B X))."""
    x, w, bias = n["X"], n["W"], n.get("B")
    batch, channels, *rows = x_dims(e, x, spec)
    features: Dim = spec.features if spec.features is not None else e.dim(w, 0)
    axes = _axes(spec, spec.y, most)
    a, g, b = zip(*(matrices(axis.tile, axis.taps) for axis in axes), strict=True)
    x = with_samples(e, x, [batch, channels, *rows])
    tiles = to_points(e, x, [filled(e, batch), channels, *rows], axes, list(b), spec.begin)
    weight = weight_to_points(e, w, [features, channels], list(g))
    y = e.matmul(tiles, e.swap_last(weight))
    result = from_points(e, y, [batch, features, *(size or 0 for size in spec.y)], axes, list(a))
    return result if bias is None else e.add(result, e.unsqueeze(bias, [1 + i for i in range(spec.rank)]))


def input_grad(e: Emitter, n: Call, spec: ConvSpec, most: int) -> ir.Value:
    """The convolution of dY with the kernel turned around, which is G with its columns in reverse."""
    dy, w = n["dY"], n["W"]
    batch, features, *rows = y_dims(e, dy, spec)
    channels, *size = x_dims(e, n["X_like"], spec)[1:]
    axes = _axes(spec, spec.x, most)
    a, g, b = zip(*(matrices(axis.tile, axis.taps) for axis in axes), strict=True)
    begin = [axis.dilation * (axis.taps - 1) - low for axis, low in zip(axes, spec.begin, strict=True)]
    dy = with_samples(e, dy, [batch, features, *rows])
    tiles = to_points(e, dy, [filled(e, batch), features, *rows], axes, list(b), begin)
    weight = weight_to_points(e, w, [features, channels], [m[:, ::-1] for m in g])
    return from_points(e, e.matmul(tiles, weight), [batch, channels, *size], axes, list(a))


def weight_grad(e: Emitter, n: Call, spec: ConvSpec, most: int) -> ir.Value:
    """F(k, m): each tile of dY is a kernel of m taps, the weight's gradient has k outputs; summed over the tiles."""
    x, dy = n["X"], n["dY"]
    x_size, y_size = x_dims(e, x, spec), y_dims(e, dy, spec)
    x, dy = with_samples(e, x, x_size), with_samples(e, dy, y_size)
    x_size[0] = y_size[0] = filled(e, x_size[0])
    axes = _axes(spec, spec.y, most)
    a, g, b = zip(*(matrices(axis.taps, axis.tile) for axis in axes), strict=True)
    # Unlike the tiles of the forward pass to the runtime, which would else keep those, larger than x, until now.
    flat = e.reshape(x, [*x_size[:2], e.size_mul(*x_size[2:]), 1])
    x_tiles = to_points(e, flat, x_size, axes, list(b), spec.begin, [2, 3, 0, 1])
    y_tiles = to_points(e, dy, y_size, axes, list(g), [0] * spec.rank)
    product = e.matmul(e.swap_last(y_tiles), x_tiles)
    kernel = reduce(np.kron, a)
    size = e.size_mul(y_size[1], x_size[1])
    taps = e.matmul(e.const(kernel, x.dtype), e.reshape(product, [kernel.shape[1], size]))
    return e.reshape_like(e.swap_last(taps), n["W_like"])


def _declare(op_type: str, emit: Callable[[Emitter, Call, ConvSpec, int], ir.Value], of: str) -> None:
    """One lowering per size of tile; `of` names the sizes of the spec that are cut into tiles."""
    for most in SIZES:

        def lower(e: Emitter, n: Call, spec: ConvSpec, most: int = most) -> ir.Value:
            return emit(e, n, spec, most)

        lower.__doc__ = f"Winograd's minimal filtering with tiles of at most {most} outputs on each axis."
        lowering(op_type, f"winograd_{most}", requires=[*REQUIRES, own_tile(most, of)], exact=False)(lower)


_declare("Conv", forward, "y")
_declare("ConvInputGrad", input_grad, "x")
_declare("ConvWeightGrad", weight_grad, "y")
