"""Bounds of the numbers of a value, from the nodes that compute it: whether an output is certainly a probability.

Sigmoid and Softmax give numbers in [0, 1]; selections, pools, means and weighted means keep them there; and sums,
differences and products of bounded values are bounded. What is not known here has no bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of, number_of
from onnx_convgrad.ir.nodes import is_op, subgraphs

Range = tuple[float, float]

_ALL: Range = (-math.inf, math.inf)
_DEEPEST = 200
"""Most nodes that are followed one behind another."""

_FIXED: dict[str, Range] = {
    "Sigmoid": (0, 1), "HardSigmoid": (0, 1), "Softmax": (0, 1), "Hardmax": (0, 1), "LogSoftmax": (-math.inf, 0),
    "Tanh": (-1, 1), "Softsign": (-1, 1), "Erf": (-1, 1), "Sin": (-1, 1), "Cos": (-1, 1), "Softplus": (0, math.inf),
    "ReduceLogSumExp": _ALL,
}  # fmt: skip
_KEPT = frozenset(
    "Identity Cast Reshape Flatten Squeeze Unsqueeze Transpose Slice Gather GatherElements GatherND Split Expand Tile "
    "AveragePool GlobalAveragePool MaxPool GlobalMaxPool ReduceMean ReduceMax ReduceMin DepthToSpace SpaceToDepth "
    "ReverseSequence TopK Dropout Compress QuantizeLinear DequantizeLinear".split()
)
"""Operators whose numbers are some of those of the first operand, or means of them."""

_SUMS = ("ReduceSum", "ReduceL1")

_EXTREMES = frozenset(("Max", "Min", "Mean", "Concat"))

_INCREASING: dict[str, Callable[[float], float]] = {
    "Relu": lambda x: max(x, 0.0), "Exp": lambda x: math.exp(min(x, 700.0)),
    "Log": lambda x: math.log(x) if x > 0 else -math.inf, "Sqrt": lambda x: math.sqrt(max(x, 0.0)),
}  # fmt: skip


def is_probability(value: ir.Value) -> bool:
    """Whether the numbers of a value are certainly between 0 and 1."""
    low, high = Ranges().of(value)
    return low >= -1e-6 and high <= 1 + 1e-6


def excludes_classes(value: ir.Value) -> bool:
    """Whether probabilities come from a Softmax, and not from a Sigmoid that it only weights."""
    found = Ranges()
    found.of(value)
    return "Softmax" in found.sources and not found.sources - {"Softmax", "LogSoftmax", "Clip"}


class Ranges:
    """Bounds of values.

    Attributes:
        sources: Names of the operators that the bounds come from, such as Softmax or Clip.
    """

    def __init__(self) -> None:
        self.sources: set[str] = set()
        self._known: dict[ir.Value, Range] = {}

    def of(self, value: ir.Value | None, depth: int = _DEEPEST) -> Range:
        """The least and the greatest number that a value can have."""
        if value is None or not depth:
            return _ALL
        if value not in self._known:
            self._known[value] = self._of(value, depth - 1)
        return self._known[value]

    def _of(self, value: ir.Value, depth: int) -> Range:
        number, node = number_of(value), value.producer()
        if number is not None:
            numbers = constant_of(value)
            assert numbers is not None
            return (float(numbers.min()), float(numbers.max())) if np.isfinite(numbers).all() else _ALL
        if node is None or node.domain:
            return _ALL
        if is_op(node, "If"):
            return _hull([self.of(body.outputs[value.index() or 0], depth) for _, body in subgraphs(node)])
        if value is not node.outputs[0] and node.op_type != "Split":
            return _ALL
        if value.dtype == ir.DataType.BOOL:
            return (0, 1)
        if node.op_type in _FIXED:
            self.sources.add(node.op_type)
            return _FIXED[node.op_type]
        return self._weighted_mean(node, depth) or self._of_node(node, depth)

    def _of_node(self, node: ir.Node, depth: int) -> Range:
        """Bounds of the first result of a node, from those of its operands."""
        operands, mode = list(node.inputs), Call(node).attributes().get("mode")
        if node.op_type in _ARITHMETIC and len(operands) == 2:
            return _ARITHMETIC[node.op_type](*(self.of(v, depth) for v in operands))
        if node.op_type in _KEPT or (node.op_type == "Resize" and mode != "cubic"):
            return self.of(operands[0], depth)
        if node.op_type in _EXTREMES or node.op_type == "Where":
            return _hull([self.of(v, depth) for v in operands[node.op_type == "Where" :]])
        if node.op_type == "Pad" and mode in (None, "constant"):
            return _hull([self.of(operands[0], depth), (0, 0)])
        return self._of_one(node, depth)

    def _of_one(self, node: ir.Node, depth: int) -> Range:
        """Bounds of a function of one number."""
        low, high = self.of(node.inputs[0] if node.inputs else None, depth)
        if node.op_type == "Clip":
            first, second = (number_of(v) for v in [*node.inputs, None, None][1:3])
            self.sources |= {"Clip"} if first is not None and second is not None else set()
            return max(low, -math.inf if first is None else first), min(high, math.inf if second is None else second)
        if node.op_type == "Reciprocal":
            return _quotient((1, 1), (low, high))
        if node.op_type == "Neg":
            return -high, -low
        if node.op_type == "Abs":
            return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
        if node.op_type in _INCREASING:
            f = _INCREASING[node.op_type]
            return (f(low) if low > -math.inf else f(-math.inf) if node.op_type != "Exp" else 0.0), (
                math.inf if high == math.inf else f(high)
            )
        if node.op_type == "ReduceProd" and low >= 0 and high <= 1:
            return 0, 1
        return _ALL

    def _weighted_mean(self, node: ir.Node, depth: int) -> Range | None:
        """The bounds of shares in a sum, and of values that are added up with weights that add up to 1, as in attention."""
        if is_op(node, "MatMul"):
            weights = node.inputs[0]
            if weights is not None and weights.shape is not None and _normalized(weights, len(weights.shape) - 1):
                return self.of(node.inputs[1], depth)
            return None
        if is_op(node, "ReduceSum"):
            return self._product(node.inputs[0], depth, lambda w: _adds_up(w, node))
        if not is_op(node, "Div"):
            return None
        total, summed = (None if v is None else v.producer() for v in node.inputs)
        if is_op(summed, "Clip", "Max", "Add") and summed.inputs[0] is not None:  # against a division by zero
            guarded = summed.inputs[0].producer()
            summed = guarded if is_op(guarded, *_SUMS) else summed
        if is_op(summed, *_SUMS) and summed.inputs[0] is node.inputs[0] and self.of(node.inputs[0], depth)[0] >= 0:
            self.sources |= {"Softmax"} if is_op(total, "Exp") else set()
            return 0, 1
        if not (is_op(total, "ReduceSum") and is_op(summed, "ReduceSum")):
            return None
        weights = summed.inputs[0]
        return self._product(total.inputs[0], depth, lambda w: w is weights and self.of(w, depth)[0] >= 0)

    def _product(self, product: ir.Value | None, depth: int, is_weight: Callable[[Any], bool]) -> Range | None:
        node = None if product is None else product.producer()
        if not is_op(node, "Mul"):
            return None
        for weight, other in (node.inputs, reversed(node.inputs)):
            if is_weight(weight):
                return _hull([self.of(other, depth), (0, 0)])
        return None


def _adds_up(weight: ir.Value | None, reduction: ir.Node) -> bool:
    """Whether weights are the Softmax along the axis of a sum."""
    axes = constant_of(reduction.inputs[1]) if len(reduction.inputs) > 1 else None
    return weight is not None and axes is not None and axes.size == 1 and _normalized(weight, int(axes.reshape(-1)[0]))


def _normalized(weight: ir.Value, axis: int) -> bool:
    """Whether a value is a Softmax along an axis."""
    node = weight.producer()
    if not is_op(node, "Softmax") or weight.shape is None:
        return False
    rank = len(weight.shape)
    return axis % rank == Call(node).int("axis", -1) % rank


def _hull(ranges: list[Range]) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _product_of(a: Range, b: Range) -> Range:
    """Bounds of a product; none if a factor has none, even if the other is 0, from which trained factors start."""
    corners = [x * y for x in a for y in b]
    return _ALL if any(map(math.isnan, corners)) else (min(corners), max(corners))


def _quotient(a: Range, b: Range) -> Range:
    if b[0] <= 0 <= b[1]:
        return _ALL
    return _product_of(a, (1 / b[1], 1 / b[0]))


def _power(a: Range, b: Range) -> Range:
    if b[0] != b[1] or b[0] <= 0 or a[0] < 0 or a[1] == math.inf:
        return _ALL
    return a[0] ** b[0], a[1] ** b[0]


_ARITHMETIC: dict[str, Callable[[Range, Range], Range]] = {
    "Add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "Sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "Mul": _product_of,
    "Div": _quotient,
    "Pow": _power,
}
