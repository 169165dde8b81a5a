"""Clamps (Clip, and Max or Min with a bound): which operand bounds, and the derivative at the bounds.

What the exporter noted on the node decides; else what PyTorch does for the operator that the node most likely stands for.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import operation_of

_LARGEST = float(np.finfo(np.float32).max)
"""The number that exporters write where a clamp has no bound."""


def bound_of(n: Call) -> ir.Value | None:
    """The operand of a Max or Min of two that bounds the other: a constant number.

    What the file notes decides: in PyTorch's `clamp` the second operand bounds the first, also as a tensor, and in its
    `maximum` and `minimum` none does, so that equal operands share.
    """
    if len(n.inputs) != 2 or operation_of(n.node) in ("maximum.default", "minimum.default", "max.other", "min.other"):
        return None
    constant = [v for v in n.inputs if number_in(v) is not None]
    if len(constant) == 1:
        return constant[0]
    return n.inputs[1] if _is_clamp(n) else None


def _is_clamp(n: Call) -> bool:
    """Whether the file notes that the node is a clamp of PyTorch."""
    return operation_of(n.node).startswith(("clamp", "clip"))


def number_in(value: ir.Value | None) -> float | None:
    """The number that an operand holds, if it is a constant of one element."""
    constant = constant_of(value)
    return None if constant is None or constant.size != 1 else float(constant.reshape(()))


def excludes_bounds(n: Call, low: ir.Value | None, high: ir.Value | None) -> bool:
    """Whether the derivative is 0 at the bounds, as in PyTorch's ReLU6 and Hardtanh, and not 1 as in its clamp.

    What the file notes decides. Otherwise two constant numbers are the bounds of a Hardtanh, and a Min behind a Relu is the
    upper bound of a ReLU6.
    """
    if _is_clamp(n):
        return False
    bounded = [number is not None and abs(number) < _LARGEST for number in (number_in(low), number_in(high))]
    is_relu6 = n.node.op_type == "Min" and any(v is not None and is_op(v.producer(), "Relu") for v in n.inputs)
    return all(bounded) or is_relu6
