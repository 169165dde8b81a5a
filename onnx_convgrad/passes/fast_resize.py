"""Resize as products with its matrices, one per axis, where ONNX Runtime's CPU provider is slow.

The runtime computes every point of a cubic Resize by itself, from 16 others: 20 to 200 times slower than the products. A
linear one takes two to three times as long while the products are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_convgrad.emit import Emitter, static_dims
from onnx_convgrad.graph.constants import is_constant
from onnx_convgrad.registry import Call

__all__ = ["RESIZES"]

_LARGE = 1 << 14
"""Elements of one sample's result that are worth the nodes."""

_SMALL = 128
"""Rows and columns up to which products are the faster way of interpolating along lines."""


def _resized(e: Emitter, node: ir.Node) -> ir.Value | None:
    from onnx_convgrad.rules.resize import by_matrices

    x, sizes, n = node.inputs[0], static_dims(node.outputs[0]), Call(node)
    mode = n.string("mode", "nearest")
    if x is None or mode == "nearest" or sizes is None or None in sizes[1:] or is_constant(x):
        return None
    rows = [size or 0 for size in sizes[1:]]
    have = [size or 0 for size in (static_dims(x) or [])[1:]]
    small = max(rows[1:], default=0) <= _SMALL and math.prod(rows) >= math.prod(have)
    if math.prod(rows) < _LARGE or (mode == "linear" and not small):
        return None
    return by_matrices(e, n)


RESIZES: Mapping[str, Callable[[Emitter, ir.Node], ir.Value | None]] = {"Resize": _resized}
