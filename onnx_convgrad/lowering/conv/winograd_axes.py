"""One axis of Winograd's minimal filtering: its tiles, and the matrices of the bilinear form for each phase of a stride.

F(m, k): m outputs of a correlation with k taps come from m + k - 1 inputs by as many multiplications (Winograd 1980),
with Toom and Cook's matrices. With a stride s, output u reads row s (u + j) + a with tap s j + a: for each phase a this is a
correlation of unit stride with the taps and rows of that phase, and a tile sums over the phases::

    y = sum over a of A_a ((G_a w_a) * (B_a x_a)) = A ((G w) * (B x))     A_a side by side, G_a and B_a stacked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from onnx_convgrad.ir.emit import Dim

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
