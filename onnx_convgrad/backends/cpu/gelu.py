"""Replace GELU as exporters write it out by the operator.

    Gelu(x) = x (1 + erf(x / sqrt 2)) / 2        or        x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

The backward part would keep three results of these five operators or more; of the one operator it keeps x. The forward value
may differ in the last digit.

Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx_ir as ir

from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.passes import NodePass
from onnx_convgrad.ir.replace import become

_CLOSE = 1e-4
"""Largest relative error of a constant: exporters write 5 to 17 digits."""


class FuseGelu(NodePass):
    """Replace every written-out GELU, so that its gradient keeps one value instead of three.

    Values inside it must be neither in `keep` nor outputs.
    """

    operators = ("Mul",)
    label = "gelu"

    def rewrite_node(self, e: Emitter, node: ir.Node) -> bool:  # noqa: ARG002 - no node is added
        """Turn the last product into Gelu."""
        found = _Product(node, self.keep).gelu()
        if found is None:
            return False
        x, approximate = found
        become(node, "Gelu", [x], [ir.AttrString("approximate", approximate)])
        return True


def _number(value: ir.Value | None) -> float | None:
    """The number in a constant of one element."""
    array = constant_of(value)
    return float(array.reshape(())) if array is not None and array.size == 1 else None


class _Product:
    """A tree of products, flattened to its factors and the product of its constants, with the nodes above it."""

    def __init__(self, node: ir.Node, keep: Collection[ir.Value]) -> None:
        self.keep = keep
        self.factors, self.scale = self._factors(node)

    def gelu(self) -> tuple[ir.Value, str] | None:
        """x and the approximation, if the product is x (1 + e) / 2."""
        if len(self.factors) != 2 or not math.isclose(self.scale, 0.5, rel_tol=_CLOSE):
            return None
        for x, shifted in (self.factors, self.factors[::-1]):
            gate = self._minus_one(shifted)
            if is_op(gate, "Erf"):
                scaled = self._inside(gate.inputs[0])
                factors, scale = self._factors(scaled) if is_op(scaled, "Mul", "Div") else ([], 0.0)
                if factors == [x] and math.isclose(scale, math.sqrt(0.5), rel_tol=_CLOSE):
                    return x, "none"
            if is_op(gate, "Tanh") and self._is_cubic(gate.inputs[0], x):
                return x, "tanh"
        return None

    def _factors(self, node: ir.Node) -> tuple[list[ir.Value], float]:
        """The factors of a node that are not constants, and the product of the constants."""
        factors: list[ir.Value] = []
        scale = 1.0
        for at, value in enumerate(node.inputs):
            number = _number(value)
            inner = self._inside(value)
            if number is not None:
                scale *= number if node.op_type == "Mul" or at == 0 else 1 / number
            elif is_op(inner, "Mul") or (is_op(inner, "Div") and _number(inner.inputs[1])):
                more, times = self._factors(inner)
                factors += more
                scale *= times
            elif is_op(inner, "Pow") and _number(inner.inputs[1]) == 3:
                factors += [v for v in inner.inputs[:1] if v is not None] * 3
            elif value is not None:
                factors.append(value)
        return factors, scale

    def _inside(self, value: ir.Value | None) -> ir.Node | None:
        """The node that computes a value with a single reader, unless the value is in `keep`."""
        return None if value in self.keep else sole_producer(value)

    def _minus_one(self, value: ir.Value) -> ir.Node | None:
        """The node that computes e, if `value` is 1 + e."""
        node = self._inside(value)
        if not is_op(node, "Add"):
            return None
        for number, other in (node.inputs, node.inputs[::-1]):
            if _number(number) == 1:
                return self._inside(other)
        return None

    def _is_cubic(self, value: ir.Value | None, x: ir.Value) -> bool:
        """Whether the value is sqrt(2 / pi) (x + 0.044715 x^3)."""
        node = self._inside(value)
        if not is_op(node, "Mul"):
            return False
        factors, scale = self._factors(node)
        total = self._inside(factors[0]) if len(factors) == 1 else None
        if not is_op(total, "Add") or not math.isclose(scale, math.sqrt(2 / math.pi), rel_tol=_CLOSE):
            return False
        for first, second in (total.inputs, total.inputs[::-1]):
            cube = self._inside(second)
            if first is x and is_op(cube, "Mul"):
                factors, scale = self._factors(cube)
                return factors == [x] * 3 and math.isclose(scale, 0.044715, rel_tol=_CLOSE)
        return False
