"""Compute the kernels of one convolution from those of another, and emit the Conv that applies them.

The lowerings reverse kernels, split them by phase, or repeat them for several output rows. Each of these is a linear map of
the taps with zeros and ones, and runtimes multiply matrices much faster than they reverse or pick single elements: so all
are one product with a constant. Every sum has one nonzero term, and is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.convolution import trim
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.lowering.conv.layout import features_of

# -- kernels -----------------------------------------------------------------------------------------------------------


def remap_taps(
    e: Emitter,
    w: ir.Value,
    spec: ConvSpec,
    selection: np.ndarray,
    kernel: Sequence[int],
    *,
    exchange: bool,
    copies: int = 1,
) -> ir.Value:
    """Kernels with other taps: w [O, C/g, *k] by `selection` [taps, copies, taps'] to [O copies, C/g, *kernel].

    With `exchange` the channel axes trade places within each group, as the data gradient needs it: [C copies, O/g, *kernel].
    """
    g, taps, size = spec.groups, spec.taps or 1, math.prod(kernel)
    features = features_of(e, w, spec)
    inner: Dim = spec.channels // g if spec.channels is not None else e.dim(w, 1)
    per = e.size_div(features, g)
    if (taps, copies, size) != (1, 1, 1):
        rows = e.reshape(w, [e.size_mul(features, inner), taps])
        w = e.matmul(rows, e.const(selection.reshape(taps, copies * size), w.dtype))
    if not exchange:
        if copies > 1 and inner != 1:
            w = e.transpose(e.reshape(w, [features, inner, copies, size]), [0, 2, 1, 3])
        return e.reshape(w, [e.size_mul(features, copies), inner, *kernel])
    if copies == 1 and g == 1:
        w = e.transpose(e.reshape(w, [features, inner, *kernel]), [1, 0, *spec.spatial_axes])
    elif per != 1 or (inner != 1 and copies == 1):
        w = e.transpose(e.reshape(w, [g, per, inner, copies, size]), [0, 2, 3, 1, 4])
    return e.reshape(w, [e.size_mul(inner, g, copies), per, *kernel])


def reverse_taps(e: Emitter, w: ir.Value, spec: ConvSpec) -> ir.Value:
    """The kernels reversed along every spatial axis, channel axes exchanged."""
    taps = spec.taps or 1
    kernel = [k or 1 for k in spec.kernel]
    return remap_taps(e, w, spec, np.eye(taps)[::-1], kernel, exchange=True)


def outer_map(axes: Sequence[np.ndarray]) -> np.ndarray:
    """The map of all taps from one map per axis [taps, copies, taps']: [taps.., copies.., taps'..] in row-major order."""
    rank = len(axes)
    outer = reduce(np.multiply.outer, axes)
    return np.asarray(outer.transpose([3 * axis + part for part in range(3) for axis in range(rank)]))


# -- Conv --------------------------------------------------------------------------------------------------------------


def plain_conv(e: Emitter, x: ir.Value, w: ir.Value, win: Window, bias: ir.Value | None = None) -> ir.Value:
    """A Conv with any padding: negative amounts are sliced off, uneven ones padded first where the provider needs it."""
    x, win = trim(e, x, win)
    if win.begin != win.end and not e.target.asymmetric_pads:
        x = e.pad(x, win.begin, win.end, range(2, 2 + win.rank))
        win = win.padded((0,) * win.rank, (0,) * win.rank)
    return e.op("Conv", x, w, bias, **win.attributes)
