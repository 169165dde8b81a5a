"""Derivatives of functions with kinks: masks of 0 and 1, and where cotangents must be selected, not multiplied."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.notes import origin_of

STEEP = 2.0**124
"""Slope of the HardSigmoid that stands for a step: only numbers within 2^-124 of zero lie on its ramp."""


def step(e: Emitter, value: ir.Value, at: float = 0.0, *, up: bool = True) -> ir.Value:
    """[value > at] as 0 and 1, or [value < at] with `up=False`; `at` is a float32 number of at most 8.

    In float32 this is one node, a HardSigmoid with the slope `STEEP`; otherwise a comparison and a Cast.
    """
    if value.dtype != ir.DataType.FLOAT:
        return e.mask(e.compare("Greater" if up else "Less", value, at), value)
    slope = STEEP if up else -STEEP
    return e.typed(e.op("HardSigmoid", value, alpha=slope, beta=-slope * at), value)


def selu_scales(n: Call) -> tuple[float, float]:
    """The attributes alpha and gamma of a Selu."""
    return n.float("alpha", 1.67326319217681884765625), n.float("gamma", 1.05070102214813232421875)


_POLES = frozenset({"Sqrt", "Pow", "Log", "Reciprocal", "Div", "ReduceL2"})
_KEEPING_ZERO = frozenset(
    "Abs Cast Clip Concat Div Expand Flatten Gather GlobalAveragePool GlobalMaxPool Identity Max Min Mul Neg ReduceMax"
    " ReduceMean ReduceMin ReduceSum Relu Reshape Slice Split Squeeze Transpose Unsqueeze".split()
)
"""Operators whose result may be 0 because an operand is."""


def meets_a_pole(value: ir.Value) -> bool:
    """Whether the model applies a function with an infinite derivative at 0 (a root, a logarithm) to multiples of `value`.

    The cotangent is then infinite where the value is 0, and must be selected, not multiplied by 0.
    """
    todo, seen = [value], {value}
    while todo:
        for use in todo.pop().uses():
            node = use.node
            if origin_of(node):  # added by differentiation
                continue
            if node.op_type in _POLES and not _is_finite(node, use.idx):
                return True
            if node.op_type in _KEEPING_ZERO:
                todo += [result for result in node.outputs if result not in seen]
                seen.update(node.outputs)
    return False


def _is_finite(node: ir.Node, operand: int) -> bool:
    """Whether the derivative is finite: for the numerator of a quotient, and for a constant exponent of at least 1."""
    exponent = constant_of(node.inputs[1]) if node.op_type == "Pow" else None
    return (node.op_type == "Div" and operand == 0) or (exponent is not None and bool((exponent >= 1).all()))


def chosen(e: Emitter, condition: ir.Value, y: ir.Value) -> ir.Value:
    """A condition as the derivative of y: as 0 and 1, which is fast, or to select cotangents that may be infinite."""
    return condition if meets_a_pole(y) else e.mask(condition, y)
