"""Data gradients of strided convolutions by phase: rows of dX that lie a stride apart form a dense convolution of dY.

Row i = s u + a of dX sums dY[p] w[t] over s p + d t = i + b, so for each remainder a of the stride

    dX[s u + a] = sum over t with d t = a + b (mod s) of dY[u + o_t] w[t],      o_t = (a + b - d t) / s

is a convolution of unit stride with the taps of that phase, and no product with an inserted zero is formed. The phases are
interleaved in the end: the last axis first, each by a Concat of rows.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.lowering.conv.depthwise_tiled import Tiling, tilings
from onnx_convgrad.lowering.conv.kernels import outer_map, plain_conv, remap_taps
from onnx_convgrad.lowering.conv.layout import as_rows, from_rows, interleave, x_dims, y_dims
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    known_channels,
    not_empty,
    samples_in_rows,
    static_groups,
    static_kernel,
    static_sizes,
    strided,
)
from onnx_convgrad.lowering.table import Query, lowering, needs

_MOST_PHASES = 16


@dataclass(frozen=True, slots=True)
class Phase:
    """The taps of one phase, the one that reads the earliest row of dY first; that row's offset; the distance of rows."""

    taps: tuple[int, ...]
    offset: int
    dilation: int

    @property
    def last(self) -> int:
        """Offset of the latest row."""
        return self.offset + self.dilation * (len(self.taps) - 1)


def extra(spec: ConvSpec, axis: int) -> int:
    """Number of rows that a phase has more than dY: enough to cover dX, at any size if that is not known."""
    x, y, s = spec.x[axis], spec.y[axis], spec.strides[axis]
    if x is not None and y is not None:
        return -(-x // s) - y
    return -(-((spec.span[axis] or 1) - spec.begin[axis] - spec.end[axis] + s - 1) // s) - 1


def phases(spec: ConvSpec, axis: int) -> list[Phase | None]:
    """One phase per remainder of the stride; `None` for rows that no window reaches."""
    s, d, b, y = spec.strides[axis], spec.dilations[axis], spec.begin[axis], spec.y[axis]
    found: list[Phase | None] = []
    for a in range(s):
        taps = [t for t in range(spec.kernel[axis] or 1) if (a + b - d * t) % s == 0]
        offsets = {t: (a + b - d * t) // s for t in taps}
        if y is not None and spec.x[axis] is not None:  # taps that read nothing but padding would leave nothing to read
            taps = [t for t in taps if -(y + extra(spec, axis)) < offsets[t] < y]
        taps.reverse()
        distance = offsets[taps[1]] - offsets[taps[0]] if len(taps) > 1 else 1
        found.append(Phase(tuple(taps), offsets[taps[0]], distance) if taps else None)
    return found


# -- requirements ------------------------------------------------------------------------------------------------------


def few_phases(q: Query) -> str | None:
    count = math.prod(q.spec.strides)
    return None if count <= _MOST_PHASES else f"there are {count} phases"


def full_phases(q: Query) -> str | None:
    found = [p for axis in range(q.spec.rank) for p in phases(q.spec, axis)]
    return "some rows belong to no window" if None in found else None


def phases_within(q: Query) -> str | None:
    """Slicing rows off dY needs its size, so that some remain."""
    for axis in range(q.spec.rank):
        known = q.spec.x[axis] is not None and q.spec.y[axis] is not None
        for p in phases(q.spec, axis):
            if p and not known and (p.offset > 0 or p.last + extra(q.spec, axis) < 0):
                return "the rows to cut off depend on a size not known while building"
    return None


# -- emission ----------------------------------------------------------------------------------------------------------


def phase_convs(e: Emitter, dy: ir.Value, w: ir.Value, spec: ConvSpec, inside: int = 1) -> list[ir.Value]:
    """One Conv of unit stride per phase, in row-major order, of rows of dY whose points each hold `inside` numbers."""
    more, ones, parts = [extra(spec, axis) for axis in range(spec.rank)], (1,) * spec.rank, []
    kernel = [k or 1 for k in spec.kernel]
    for chosen in itertools.product(*(phases(spec, axis) for axis in range(spec.rank))):
        phase = [p for p in chosen if p is not None]
        picked = [np.ravel_multi_index(t, kernel) for t in itertools.product(*(p.taps for p in phase))]
        selection = np.eye(math.prod(kernel))[:, picked]  # [taps, taps']
        kernels = remap_taps(e, w, spec, selection, [len(p.taps) for p in phase], exchange=True)
        begin = tuple(-p.offset for p in phase)
        end = tuple(m + p.last for m, p in zip(more, phase, strict=True))
        win = Window(ones, tuple(p.dilation for p in phase), begin, end, spec.groups)
        parts.append(plain_conv(e, dy, kernels, win.interleaved(inside)))
    return parts


_REQUIRES = [not_empty, conv_kernel, strided, static_kernel, static_groups, few_phases, full_phases, phases_within]


@lowering("ConvInputGrad", "phases", requires=_REQUIRES)
def phases_conv(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """One Conv of unit stride per phase, and Concats that interleave them."""
    dy = n["dY"]
    batch, channels, *x = x_dims(e, n["X_like"], spec)
    size = [e.size_add(d, extra(spec, axis)) for axis, d in enumerate(y_dims(e, dy, spec)[2:])]
    parts = phase_convs(e, dy, n["W"], spec)
    whole = interleave(e, parts, e.size_mul(batch, channels), size, spec.strides)
    full = [e.size_mul(d, s) for d, s in zip(size, spec.strides, strict=True)]
    whole = e.reshape(whole, [batch, channels, *full])
    return e.slice(whole, [0] * spec.rank, x, spec.spatial_axes)


# -- rows in order -----------------------------------------------------------------------------------------------------
#
# Along all axes but the last, the phases can as well be features of the same Conv, which reads what several of them need
# only once:
#
#     z[c, a, u] = sum over t with d t = a + b (mod s) of dy[u + o_t] w[t]        dx[c, s u + a] = z[c, a, u]
#
# One Gather of whole rows then puts them in order, on all threads and in the shape of the result. Along the last axis,
# phases stay separate, since points that alternate are interleaved fastest from one operand for each phase.

strided_rows = needs(
    lambda s: any(step != 1 for step in s.strides[:-1]), "every stride but that along the last axis is 1"
)
_ROWS = [not_empty, conv_kernel, static_sizes, static_groups, known_channels, strided_rows, few_phases, full_phases]


def _rows(spec: ConvSpec) -> list[Tiling]:
    """All axes but the last: tiles of one row per phase, and on a first axis whose stride is 1, bands of rows."""
    found = tilings(spec, backward=True)[:-1]
    assert None not in found, "full_phases requires it"
    return [t for t in found if t]


def _order(spec: ConvSpec, rows: list[Tiling]) -> np.ndarray:
    """The position in [*tile, *count] of each row of dX, rows of several axes in row-major order."""
    at = np.indices([axis.x for axis in spec.axes[:-1]]).reshape(len(rows), -1)
    tile = np.array([t.tile for t in rows]).reshape(-1, 1)
    places = np.ravel_multi_index((*(at % tile), *(at // tile)), (*(t.tile for t in rows), *(t.count for t in rows)))
    return np.asarray(places)


@lowering("ConvInputGrad", "row_phases", requires=_ROWS)
def row_phases(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """One Conv per phase of the last axis, for all phases of the others, and a Gather of rows."""
    dy, rows, last = n["dY"], _rows(spec), spec.rank - 1
    batch, channels, *x = x_dims(e, n["X_like"], spec)
    copies, more, axis = math.prod(t.tile for t in rows), extra(spec, last), spec.axes[last]
    width, stride = axis.y + more, axis.stride
    parts = []
    for p in phases(spec, last):
        assert p is not None, "full_phases requires it"
        kernel = [*(t.map.shape[2] for t in rows), len(p.taps)]
        entries = math.prod(t.map.size for t in rows) * axis.kernel * len(p.taps)
        e.check_bytes(8 * entries, "The map of the taps to each phase")
        selection = outer_map([*(t.map for t in rows), np.eye(axis.kernel)[:, None, list(p.taps)]])
        w = remap_taps(e, n["W"], spec, selection, kernel, exchange=True, copies=copies)
        dilations = (*(t.dilation for t in rows), p.dilation)
        begin, end = (*(t.begin for t in rows), -p.offset), (*(t.end for t in rows), more + p.last)
        strides = (*(t.stride for t in rows), 1)
        parts.append(plain_conv(e, dy, w, Window(strides, dilations, begin, end, spec.groups)))
    points = copies * math.prod(t.count for t in rows)
    whole = interleave(e, parts, e.size_mul(batch, channels, points), [width], [stride])
    whole = e.reshape(whole, [batch, channels, points, width * stride])
    whole = e.slice(whole, [0], [x[last]], [3])
    size: list[Dim] = [batch, channels, *x]
    return e.reshape(e.op("Gather", whole, e.const(_order(spec, rows)), axis=2), size)


# -- all samples in a row ----------------------------------------------------------------------------------------------


@lowering("ConvInputGrad", "sample_phases", requires=[*samples_in_rows, strided, few_phases, full_phases])
def sample_phases(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """`phases` with the samples inside the rows, so that the phases of all samples are interleaved at once."""
    dy = n["dY"]
    size = x_dims(e, n["X_like"], spec)
    rows, batch = as_rows(e, dy, y_dims(e, dy, spec))
    have = [axis.y + extra(spec, i) for i, axis in enumerate(spec.axes)]
    parts = phase_convs(e, rows, n["W"], spec, batch)
    whole = interleave(e, parts, size[1], [*have, batch], [*spec.strides, 1])
    full = [d * s for d, s in zip(have, spec.strides, strict=True)]
    whole = e.slice(e.reshape(whole, [size[1], *full, batch]), [0] * spec.rank, size[2:], range(1, 1 + spec.rank))
    return from_rows(e, whole, size)
