"""Bounds of the numbers of a value, from the nodes that compute it: whether an output is certainly a probability.

Sigmoid and Softmax give numbers in [0, 1]; selections, pools, means and weighted means keep them there; and sums,
differences and products of bounded values are bounded. What is not known here has no bounds.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import rule_of
from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.ir.call import Call, stem
from onnx_convgrad.ir.constants import constant_of, number_of
from onnx_convgrad.ir.nodes import is_op, subgraphs

Range = tuple[float, float]

_ALL: Range = (-math.inf, math.inf)
_DEEPEST = 200
"""Most nodes that are followed one behind another."""

_SUMS = ("ReduceSum", "ReduceL1")


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
            if node is None or (node.domain, node.op_type) != ("ai.onnx.ml", "Normalizer"):
                return _ALL
            return (0, 1) if self.of(node.inputs[0], depth)[0] >= 0 else _ALL
        if is_op(node, "If") or _of_all_turns(node, value):
            return _hull([self.of(body.outputs[value.index() or 0], depth) for _, body in subgraphs(node)])
        if value is not node.outputs[0] and node.op_type != "Split":
            return _ALL
        if value.dtype == ir.DataType.BOOL:
            return (0, 1)
        rule = rule_of(node)
        if rule is not None and rule.bounds is not None:
            self.sources.add(node.op_type)
            return rule.bounds
        return self._weighted_mean(node, depth) or self._of_node(node, rule, depth)

    def _of_node(self, node: ir.Node, rule: Rule | None, depth: int) -> Range:
        """Bounds of the first result of a node, from those of its operands."""
        if node.op_type in _FUNCTIONS:
            if is_op(node, "Clip") and len(node.inputs) == 3 and None not in map(number_of, node.inputs[1:]):
                self.sources.add("Clip")
            return _FUNCTIONS[node.op_type](*(None if v is None else self.of(v, depth) for v in node.inputs))
        first = self.of(node.inputs[0] if node.inputs else None, depth)
        if is_op(node, "Cast", "Dropout", "QuantizeLinear", "DequantizeLinear"):  # what they round does not count
            return first
        if is_op(node, "ReduceProd") and first[0] >= 0 and first[1] <= 1:
            return 0, 1
        n = Call(node)
        hull = "" if rule is None else rule.hull(n)
        if rule is None or not hull:
            return _ALL
        pairs = zip(n.names[0], node.inputs, strict=False)
        found = [self.of(v, depth) for name, v in pairs if v is not None and stem(name) in rule.wrt]
        return _hull([*found, (0.0, 0.0)] if hull == "zero" else found)

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


def _of_all_turns(node: ir.Node, value: ir.Value) -> bool:
    """Whether a value holds the results of all turns of a Scan."""
    return is_op(node, "Scan") and (value.index() or 0) >= len(node.inputs) - Call(node).int("num_scan_inputs", 0)


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


def _ends(function: Callable[..., float]) -> Callable[..., Range]:
    """The bounds of a function that is monotone in each operand: its values at their ends; none if one is not a number.

    So a product with a factor without bounds has none, even if the other is 0, from which trained factors start.
    """

    def bounds(*operands: Range | None) -> Range:
        values = [function(*ends) for ends in itertools.product(*(operand or (None,) for operand in operands))]
        return _ALL if any(map(math.isnan, values)) else (min(values), max(values))

    return bounds


def _quotient(a: Range, b: Range) -> Range:
    return _ALL if b[0] <= 0 <= b[1] else _ends(operator.truediv)(a, b)


def _power(a: Range, b: Range) -> Range:
    if b[0] != b[1] or b[0] <= 0 or a[0] < 0 or a[1] == math.inf:
        return _ALL
    return a[0] ** b[0], a[1] ** b[0]


def _clip(x: float, low: float | None = None, high: float | None = None) -> float:
    raised = x if low is None else max(x, low)
    return raised if high is None else min(raised, high)


def _size(x: Range) -> Range:
    low, high = x
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


_FUNCTIONS: dict[str, Callable[..., Range]] = {
    "Abs": _size,
    "Add": _ends(operator.add),
    "Clip": _ends(_clip),
    "Div": _quotient,
    "Exp": _ends(lambda x: math.inf if x == math.inf else math.exp(min(x, 700.0))),
    "Log": _ends(lambda x: math.log(x) if x > 0 else -math.inf),
    "Mul": _ends(operator.mul),
    "Neg": _ends(operator.neg),
    "Pow": _power,
    "Reciprocal": lambda x: _quotient((1, 1), x),
    "Relu": _ends(lambda x: max(x, 0.0)),
    "Sqrt": _ends(lambda x: math.sqrt(max(x, 0.0))),
    "Sub": _ends(operator.sub),
}
"""Operator -> the bounds of its result from those of its operands."""
