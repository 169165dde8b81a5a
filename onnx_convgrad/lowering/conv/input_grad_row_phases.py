"""Data gradients of strided convolutions whose rows come in order from one Conv.

`input_grad_phases` computes every phase of the stride by a Conv of its own and interleaves them axis by axis. Along all axes
but the last, the phases can as well be features of the same Conv, which reads what several of them need only once:

    z[c, a, u] = sum over t with d t = a + b (mod s) of dy[u + o_t] w[t]        dx[c, s u + a] = z[c, a, u]

One Gather of whole rows then puts them in order, on all threads and in the shape of the result. Along the last axis, phases
stay separate, since points that alternate are interleaved fastest from one operand for each phase.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.lowering.conv.depthwise_tiled import Tiling, tilings
from onnx_convgrad.lowering.conv.input_grad_phases import extra, few_phases, full_phases, interleave, phases
from onnx_convgrad.lowering.conv.kernels import outer_map, plain_conv, remap_taps
from onnx_convgrad.lowering.conv.layout import x_dims
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    known_channels,
    not_empty,
    static_groups,
    static_sizes,
)
from onnx_convgrad.lowering.table import lowering, needs

strided_rows = needs(
    lambda s: any(step != 1 for step in s.strides[:-1]), "every stride but that along the last axis is 1"
)
_REQUIRES = [not_empty, conv_kernel, static_sizes, static_groups, known_channels, strided_rows, few_phases, full_phases]


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


@lowering("ConvInputGrad", "row_phases", requires=_REQUIRES)
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
