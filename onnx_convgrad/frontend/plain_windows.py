"""Write padding explicitly where ONNX Runtime and ONNX's shape inference disagree about the windows.

In ceil mode the runtime drops a window that would start in the end padding, and with `auto_pad=SAME_*` it ignores dilation.
Shape inference, which runs when a session is created, does neither at opset 21. The nodes that follow a pool mostly accept
any size, but gradients compare sizes, and the runtime refuses those that seem to differ.

ONNX Runtime refuses a Conv with `auto_pad=SAME_*` and dilation, which PyTorch's older exporter writes for
`padding="same"`; it accepts explicit padding.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import conv_window
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.ir.pooling import POOLS, Pool


class UsePlainWindows(GraphPass):
    """Give such pools and convolutions explicit padding, where it has the same effect."""

    def rewrite(self, model: ir.Model) -> bool:
        changed = False
        for node in model.graph:
            if is_op(node, *POOLS):
                changed |= pad_pool(node)
            elif is_op(node, "Conv"):
                changed |= _pad_conv(node)
        return changed


def _pad_conv(node: ir.Node) -> bool:
    n = Call(node)
    dilations = n.ints("dilations") or ()
    if not n.string("auto_pad", "NOTSET").startswith("SAME") or set(dilations) <= {1}:
        return False
    padding = conv_window(n, n["X"], n["W"], len(dilations))
    if padding is None:
        return False
    del node.attributes["auto_pad"]
    node.attributes["pads"] = ir.AttrInt64s("pads", [*padding.begin, *padding.end])
    return True


def pad_pool(node: ir.Node) -> bool:
    """Give a pool explicit padding if shape inference finds other windows than ONNX Runtime; whether it changed."""
    n = Call(node)
    x = n["X"]
    if x.shape is None or not n.ints("kernel_shape"):
        return False
    pool = Pool.of(n, x)
    counts = [pool.windows(axis) for axis in range(pool.rank)]
    if pool.pads is None or None in counts:
        return False
    end, differs = [], False
    for axis, count in enumerate(counts):
        low, high = pool.pads[axis]
        size, stride = pool.sizes[axis] or 0, pool.strides[axis]
        room = size + low + high - pool.span(axis)
        same = pool.auto_pad.startswith("SAME")
        inferred = -(-size // stride) if same else (math.ceil if pool.ceil else math.floor)(room / stride) + 1
        differs = differs or inferred != count
        end.append(high + max(((count or 1) - 1) * stride - room, 0))
    begin = [low for low, _ in pool.pads]
    counted = bool(n.int("count_include_pad", 0)) and end != [high for _, high in pool.pads]
    allowed = all(0 <= pad < kernel for pads in (begin, end) for pad, kernel in zip(pads, pool.kernel, strict=True))
    if not differs or not allowed or counted:
        return False
    for key in ("auto_pad", "ceil_mode"):
        node.attributes.pop(key, None)
    node.attributes["pads"] = ir.AttrInt64s("pads", [*begin, *end])
    return True
