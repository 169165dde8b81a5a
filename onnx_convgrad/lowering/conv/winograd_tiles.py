"""Tiles of Winograd's minimal filtering: the matrices of one axis, and the way of an image to the points of tiles and back.

F(m, k): m outputs of a correlation with k taps come from m + k - 1 inputs by as many multiplications (Winograd 1980),
with Toom and Cook's matrices. With a stride s, output u reads row s (u + j) + a with tap s j + a: for each phase a this is a
correlation of unit stride with the taps and rows of that phase, and a tile sums over the phases::

    y = sum over a of A_a ((G_a w_a) * (B_a x_a)) = A ((G w) * (B x))     A_a side by side, G_a and B_a stacked

The layout of points is [groups * points, tiles * samples, channels per group], a batch of matrices; `winograd` multiplies
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.samples import filled, may_be_empty
from onnx_convgrad.lowering.conv.layout import separate_transpose

POINTS = {
    1: (0.0,),
    2: (0.625, -0.625),
    3: (0.0, 1.0, -1.0),
    4: (0.375, -0.375, 1.25, -1.25),
    5: (0.0, 0.625, -0.625, 1.5, -1.5),
    6: (0.28125, -0.28125, 0.875, -0.875, 1.75, -1.75),
    7: (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5),
}
"""The finite evaluation points, by their number; one more is at infinity.

They make `rounding` small, symmetric in sign and with few binary digits, so that their powers are exact in float32.
"""

MOST = max(POINTS) + 1
"""The longest window of a phase; with more points float32 loses too many digits."""

Triple = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A, G and B: the matrices of the output, of the kernel, and of the input."""


@dataclass(frozen=True, slots=True)
class TiledAxis:
    """One spatial axis cut into tiles: `count` tiles of `tile` outputs each, of a kernel with `taps` taps.

    With dilation d, the rows r, r + d, r + 2 d, .. of each of the d phases r are a separate axis with `count` tiles. An axis
    with one tap is left whole: its tiles are its rows. If the number of rows is unknown while building, so is that of tiles
    (`None` until it is emitted).
    """

    tile: int
    taps: int
    count: Dim | None
    dilation: int = 1
    stride: int = 1

    @property
    def phases(self) -> list[int]:
        """Number of taps of each phase of the stride."""
        return [-(-(self.taps - a) // self.stride) for a in range(min(self.stride, self.taps))]

    @property
    def step(self) -> int:
        """Rows from the start of a tile's input to that of the next."""
        return self.stride * self.tile


def tiled(size: int | None, taps: int, dilation: int, most: int, stride: int = 1) -> TiledAxis:
    """The axis in the fewest equal tiles of at most `most` outputs; in the largest tiles if its size is unknown."""
    if taps == 1:
        return TiledAxis(1, 1, size)
    largest = min(most, MOST + 1 - -(-taps // stride))
    if size is None:
        return TiledAxis(largest, taps, None, dilation, stride)
    rows = -(-size // dilation)
    count = -(-rows // largest)
    return TiledAxis(-(-rows // count), taps, count, dilation, stride)


@lru_cache(maxsize=1024)
def matrices(outputs: int, taps: int) -> Triple:
    """A, G and B of F(outputs, taps): evaluation at the points, and interpolation through them, transposed."""
    if 1 in (outputs, taps):  # nothing to save and nothing to round
        whole = np.eye(outputs * taps)
        return (whole, np.ones((outputs, 1)), whole) if taps == 1 else (np.ones((1, taps)), whole, whole)
    points = np.array(POINTS[outputs + taps - 2])
    others = [np.delete(points, i) for i in range(len(points))]
    scale = np.array([np.prod(p - rest) for p, rest in zip(points, others, strict=True)]).reshape(-1, 1)
    a = np.vander(points, outputs, increasing=True)
    g = np.vander(points, taps, increasing=True) / scale
    b = [[*np.atleast_1d(np.poly(rest))[::-1], 0.0] for rest in others]
    last = np.atleast_1d(np.poly(points))[::-1]
    return np.vstack([a, np.eye(outputs)[-1]]).T, np.vstack([g, np.eye(taps)[-1]]), np.array([*b, last])


def rounding(form: Triple) -> float:
    """Rounding errors of a bilinear form, as a multiple of those of a direct sum.

    Let kernel and rows be independent, with variance 1, and let each product (G w)_p (B x)_p be rounded by a share of its
    size. The mean square of such errors in an output is proportional to the sum over p of A[p]^2 |G[p]|^2 |B[p]|^2; in a
    direct sum it is the number of terms. Those of nested forms multiply. A factor of a point, which costs no digit, cancels.
    """
    a, g, b = form
    terms = np.einsum("mp,pk,pt->mkt", a, g, b, optimize=True)
    return float(
        np.linalg.norm(np.abs(a) * np.linalg.norm(g, axis=1) * np.linalg.norm(b, axis=1)) / np.linalg.norm(terms)
    )


# -- the three convolutions --------------------------------------------------------------------------------------------


def forward_matrices(axis: TiledAxis, *, weight_grad: bool = False) -> Triple:
    """A [tile, points], G [points, taps] and B [points, rows of x]: the sum of the phases.

    For the weight gradient the taps are the outputs: A [taps, points] and G [points, tile of dY].
    """
    rows = axis.step - axis.stride + axis.taps
    parts = []
    for phase, taps in enumerate(axis.phases):
        a, g, b = matrices(taps, axis.tile) if weight_grad else matrices(axis.tile, taps)
        if weight_grad:
            a = _spread(a.T, axis.taps, phase, axis.stride).T
        else:
            g = _spread(g, axis.taps, phase, axis.stride)
        parts.append((a, g, _spread(b, rows, phase, axis.stride)))
    return _stacked(parts)


def rows_read(axis: TiledAxis, begin: int) -> list[tuple[int, int, int]]:
    """For each row of a stride of dX: its first tap, the number of its taps, and the first row of dY that they read."""
    rows = []
    for row in range(axis.stride):
        shift, first = divmod(row + begin, axis.stride)
        taps = -(-(axis.taps - first) // axis.stride)
        rows.append((first, taps, shift - axis.dilation * (taps - 1)))
    return rows


def data_matrices(axis: TiledAxis, begin: int) -> Triple:
    """A [stride tile, points], G [points, taps] and B [points, rows of dY]: phases are outputs, taps reversed."""
    phases = rows_read(axis, begin)
    low = min(start for _, _, start in phases)
    rows = axis.tile - 1 + max(start - low + taps for _, taps, start in phases)
    parts = []
    for row, (first, taps, start) in enumerate(phases):
        a, g, b = matrices(axis.tile, taps)
        a = _spread(a.T, axis.step, row, axis.stride).T
        parts.append((a, _spread(g[:, ::-1], axis.taps, first, axis.stride), _spread(b, rows, start - low)))
    return _stacked(parts)


def _spread(matrix: np.ndarray, columns: int, first: int, step: int = 1) -> np.ndarray:
    """The columns of a matrix placed among `columns` zero columns, `step` apart, starting at `first`."""
    wide = np.zeros((len(matrix), columns))
    wide[:, first::step][:, : matrix.shape[1]] = matrix
    return wide


def _stacked(parts: Sequence[Triple]) -> Triple:
    """The matrices of one bilinear form from those of all phases."""
    a, g, b = zip(*parts, strict=True)
    return np.hstack(a), np.vstack(g), np.vstack(b)


def to_points(
    e: Emitter,
    v: ir.Value,
    size: list[Dim],
    axes: list[TiledAxis],
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
            v = e.conv(  # over three axes: ONNX Runtime would rearrange the channels of a Conv over two
                v,
                e.const(kernel.reshape(-1, 1, 1, kernel.shape[1], 1), v.dtype),
                strides=[1, step, 1],
                pads=[0, low // phases, 0, 0, high // phases, 0],
            )
        points, tiles = points * kernel.shape[0], e.size_mul(tiles, count, phases)
    return e.reshape(v, [points, e.size_mul(tiles, n), c])


def from_points(
    e: Emitter, v: ir.Value, size: list[Dim], axes: list[TiledAxis], kernels: list[np.ndarray], groups: int
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


def _places(e: Emitter, axes: list[TiledAxis], heights: Sequence[int], spatial: Sequence[Dim]) -> ir.Value:
    """The position in [*heights, *(count, dilation)] of each point of the image, row-major: a sum of one part per axis.

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


def _place(e: Emitter, axis: TiledAxis, height: int, size: Dim, tiles: Dim, behind: Dim) -> ir.Value:
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
