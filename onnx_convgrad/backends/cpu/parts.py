"""Convolve the parts of a concatenation one by one, and add the results.

    conv([a, b], [V, W]) = conv(a, V) + conv(b, W)

The concatenation, as of the skip connections of a U-Net, is a copy that the gradient of the kernel reads again, and the
gradient of the data is copied into its parts. Without them a step holds less: the parts are mostly held anyway.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, known, static_dims
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.passes import NodePass

_MOST = 4
"""Most parts, each of which is a convolution."""

_BLOCK = 16
"""Channels that the kernels of the CPU compute together."""

_LARGER = 4
"""Smallest number of entries of the concatenation, as a multiple of those of the kernel."""


class ConvolveParts(NodePass):
    """Rewrite the convolution of a concatenation of channels that nothing else reads."""

    operators = ("Conv",)
    label = "parts"

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | None:
        """Rewrite one convolution."""
        n, y = Call(node), node.outputs[0]
        joined = n["X"]
        concat = None if joined in self.keep or y in self.keep else sole_producer(joined)
        if not e.target.on_cpu or not is_op(concat, "Concat") or Call(concat).int("axis", 0) != 1:
            return None
        parts = [v for v in concat.inputs if v is not None]
        sizes = [None if v.shape is None else known(v.shape[1]) for v in parts]
        if n.int("group", 1) != 1 or not _worthwhile(sizes, static_dims(joined), static_dims(n["W"])):
            return None
        kernels = e.ops("Split", n["W"], e.ints([size or 0 for size in sizes]), outputs=len(parts), axis=1)
        total = None
        for part, kernel in zip(parts, kernels, strict=True):
            bias = n.get("B") if total is None else None
            product = e.typed(e.op("Conv", part, kernel, bias, **n.attributes()), y)
            total = product if total is None else e.add(total, product)
        return total


def _worthwhile(sizes: list[int | None], joined: list[int | None] | None, kernel: list[int | None] | None) -> bool:
    """Whether there are few parts of whole blocks, and the kernel is small against them."""
    if joined is None or kernel is None or None in kernel or not 1 < len(sizes) <= _MOST:
        return False
    if any(size is None or size % _BLOCK for size in sizes):
        return False
    entries = math.prod(size or 1 for size in joined)
    return entries >= _LARGER * math.prod(size or 1 for size in kernel)
