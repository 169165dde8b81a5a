"""Gather of sliding windows along the last axis, with which exporters unfold images, as Slices and a Concat.

ONNX Runtime's CPU provider gathers along the last axis element by element; one Slice per tap copies whole rows: 6 to 15
times faster. A Transpose that moves the taps in front of the other axes then costs nothing.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.backends.cpu import Forms
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.ir.indices import sliding_windows
from onnx_convgrad.ir.nodes import is_op, sole_producer

_RUN = 8
"""Smallest number of windows for which a Slice per tap is faster."""

_LARGE = 1 << 14
"""Smallest number of elements for which these nodes are faster."""


def _stacked(e: Emitter, node: ir.Node) -> ir.Value | None:
    """A Gather of windows, unless its only reader is a Transpose that `_stacked_and_moved` rewrites with it."""
    y = node.outputs[0]
    readers = list(y.uses())
    alone = len(readers) == 1 and not y.is_graph_output()
    return None if alone and _tap_axis(readers[0].node) is not None else _stack(e, node, -2)


def _stacked_and_moved(e: Emitter, node: ir.Node) -> ir.Value | None:
    """A Gather of windows together with the Transpose that moves the taps forward."""
    gather, axis = sole_producer(node.inputs[0]), _tap_axis(node)
    return _stack(e, gather, axis) if is_op(gather, "Gather") and axis is not None else None


def _tap_axis(node: ir.Node) -> int | None:
    """The axis that a Transpose moves the second-last axis to, if it moves no other axis and rows stay rows."""
    perm = list(Call(node).ints("perm") or ()) if is_op(node, "Transpose") else []
    taps = len(perm) - 2
    rest = [axis for axis in perm if axis != taps]
    return perm.index(taps) if taps >= 0 and rest == sorted(rest) and perm[-1] != taps else None


def _stack(e: Emitter, node: ir.Node, to: int) -> ir.Value | None:
    """The windows that a Gather reads from the last axis, [..., taps, windows], with the taps at the axis `to`."""
    x, table = node.inputs[0], constant_of(node.inputs[1])
    sizes = None if x is None else static_dims(x)
    slides = None if table is None else sliding_windows(table)
    if x is None or sizes is None or table is None or slides is None:
        return None
    along = Call(node).int("axis", 0)
    taps, count = table.shape
    elements = table.size * math.prod(d or 0 for d in sizes[:-1])
    if along % len(sizes) != len(sizes) - 1 or count < _RUN or elements < _LARGE:
        return None
    place = to % (len(sizes) + 1)
    spread = e.unsqueeze(x, [place])
    starts = [slides.first + slides.tap * i for i in range(taps)]
    reach = slides.step * (count - 1) + 1
    pieces = [e.slice(spread, [start], [start + reach], [len(sizes)], [slides.step]) for start in starts]
    return e.concat(pieces, place)


WINDOWS: Forms = {
    "Gather": _stacked,
    "Transpose": _stacked_and_moved,
}
