"""Compute the gradient of a convolution's weight only for the output channels that are read.

With w = concat(a, b, ...) along the output channels, as `frontend.parts` stores a weight of which some channels are trained,

    Slice(ConvWeightGrad(x, dy), channels of b) = ConvWeightGrad(x, Slice(dy, channels of b))

which needs a part of the multiplications. With groups, whole groups must be chosen, and x is sliced too. If w is quantized,
the gradient is zero outside the range of the quantizer:

    Slice(Where(outside, 0, ConvWeightGrad(x, dy)), channels of b) = Where(Slice(outside), 0, ConvWeightGrad(x, ...))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from onnx_convgrad.frontend.quantizers import before_quantizer
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import DOMAIN, Emitter, known
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.passes import NodePass


class NarrowWeightGradients(NodePass):
    """Slice the cotangent of a convolution instead of the gradient of its weight, before lowering."""

    operators: ClassVar = ("Slice",)
    label: ClassVar = "narrow"

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | bool | None:
        """Rewrite a slice of a gradient along its output channels."""
        grad = sole_producer(node.inputs[0])
        mask = grad if is_op(grad, "Where") else None
        if mask is not None:
            grad = sole_producer(mask.inputs[2])
        if grad is None or (grad.domain, grad.op_type) != (DOMAIN, "ConvWeightGrad"):
            return None
        n = Call(grad)
        sizes = [known(d) for d in n["W_like"].shape or ()]
        found = _range(node, sizes[0] if sizes else None)
        if found is None:
            return None
        start, stop, size = found
        part, group = _operand(n["W_like"], start, stop), n.int("group", 1)
        per_group = size // group
        if part is None or (group > 1 and (start % per_group or stop % per_group or sizes[1] is None)):
            return None
        x, dy, attributes = n["X"], e.slice(n["dY"], [start], [stop], [1]), dict(n.attributes())
        if group > 1:
            first, last = start // per_group, stop // per_group
            x = e.slice(x, [first * (sizes[1] or 1)], [last * (sizes[1] or 1)], [1])
            attributes["group"] = last - first
        e.origin = origin_of(grad) or e.origin
        result = e.op("ConvWeightGrad", x, dy, part, domain=DOMAIN, **attributes)
        if mask is None:
            return result
        outside, zero = mask.inputs[:2]
        assert outside is not None, "Where has a condition"
        return e.op("Where", _rows(e, outside, range(start, stop), sizes), zero, result)


def _range(node: ir.Node, size: int | None) -> tuple[int, int, int] | None:
    """Start, stop and size of a slice with step 1 along axis 0 alone; `None` for others."""
    operands = [constant_of(v) for v in node.inputs[1:]]
    if size is None or len(operands) < 3 or any(v is None or v.size != 1 for v in operands):
        return None
    start, stop, axis, *step = (int(v.reshape(())) for v in operands if v is not None)
    if axis != 0 or step not in ([], [1]):
        return None
    start, stop, _ = slice(start, stop).indices(size)
    return (start, stop, size) if start < stop else None


def _rows(e: Emitter, value: ir.Value, rows: range, sizes: Sequence[int | None]) -> ir.Value:
    """Rows of an operand that is broadcast against a tensor of `sizes`, computed alone if it is a comparison."""
    node = value.producer()
    if is_op(node, "Or", "Less", "Greater"):
        return e.op(node.op_type, *(None if v is None else _rows(e, v, rows, sizes) for v in node.inputs))
    if value.shape is not None and (len(value.shape) < len(sizes) or value.shape[0] == 1):
        return value
    return _operand(value, rows.start, rows.stop) or e.slice(value, [rows.start], [rows.stop], [0])


def _operand(joined: ir.Value, start: int, stop: int) -> ir.Value | None:
    """The operand of a Concat along axis 0, maybe quantized, that has the rows start .. stop - 1 of its result."""
    node, end = before_quantizer(joined).producer(), 0
    if node is None or not is_op(node, "Concat") or Call(node).int("axis", 0) != 0:
        return None
    for value in node.inputs:
        size = None if value is None or not value.shape else known(value.shape[0])
        if size is None:
            return None
        if (end, end + size) == (start, stop):
            return value
        end += size
    return None
