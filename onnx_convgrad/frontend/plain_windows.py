"""Padding that is written out where ONNX Runtime and ONNX's shape inference would not see the same windows.

In ceil mode the runtime drops a window that would start in the end padding, and `auto_pad=SAME_*` leaves dilation out;
inference, which runs when a session is made, does neither at opset 21. What follows a pool in the model mostly takes any
size, but gradients put sizes side by side, and the runtime refuses those that seem to differ.

A Conv with `auto_pad=SAME_*` and dilation, which PyTorch's older exporter writes for `padding="same"`, is no model that
ONNX Runtime runs; with its padding written out it is.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import kernel_of, resolve_padding, window
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.pooling import Pool

__all__ = ["use_plain_windows"]

_POOLS = frozenset(("AveragePool", "LpPool", "MaxPool"))


def use_plain_windows(graph: ir.Graph) -> None:
    """Give such pools and convolutions explicit padding, where that says the same."""
    for node in graph:
        if node.op_type in _POOLS and not node.domain and node.inputs[0] is not None:
            _settle(node, node.inputs[0])
        elif is_op(node, "Conv"):
            _pad(node)


def _pad(node: ir.Node) -> None:
    n = Call(node)
    dilations = n.ints("dilations") or ()
    if not n.string("auto_pad", "NOTSET").startswith("SAME") or set(dilations) <= {1}:
        return
    x, rank = n["X"], len(dilations)
    found = resolve_padding(n, window(n, rank), x, kernel_of(n, n["W"], rank))
    if found is not None:
        del node.attributes["auto_pad"]
        node.attributes["pads"] = ir.AttrInt64s("pads", [*found.begin, *found.end])


def _settle(node: ir.Node, x: ir.Value) -> None:
    n = Call(node)
    if x.shape is None or not n.ints("kernel_shape"):
        return
    pool = Pool.of(n, x)
    counts = [pool.windows(axis) for axis in range(pool.rank)]
    if pool.pads is None or None in counts:
        return
    begin, end, differs = [], [], False
    for axis, count in enumerate(counts):
        low, high = pool.pads[axis]
        size, stride = pool.sizes[axis] or 0, pool.strides[axis]
        room = size + low + high - pool.span(axis)
        same = pool.auto_pad.startswith("SAME")
        inferred = -(-size // stride) if same else (math.ceil if pool.ceil else math.floor)(room / stride) + 1
        differs = differs or inferred != count
        begin.append(low)
        end.append(high + max(((count or 1) - 1) * stride - room, 0))
    counted = bool(n.int("count_include_pad", 0)) and end != [high for _, high in pool.pads]
    allowed = all(0 <= pad < kernel for pads in (begin, end) for pad, kernel in zip(pads, pool.kernel, strict=True))
    if differs and allowed and not counted:
        for key in ("auto_pad", "ceil_mode"):
            node.attributes.pop(key, None)
        node.attributes["pads"] = ir.AttrInt64s("pads", [*begin, *end])
