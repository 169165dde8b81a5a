"""Quantizers: the levels of each type, the operators, and the nodes that derivatives reach through them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import ancestors, floating
from onnx_convgrad.ir.nodes import is_op

_LEVELS = frozenset("INT4 INT8 INT16 UINT4 UINT8 UINT16 FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ".split())
"""Types that numbers are quantized to."""


def level_range(dtype: ir.DataType) -> tuple[float, float] | None:
    """The least and the greatest level of a quantized type; `None` for other types."""
    return (float(dtype.min), float(dtype.max)) if dtype.name in _LEVELS else None


INTEGER_WEIGHTS = frozenset(
    "QLinearConv QLinearMatMul QGemm QLinearConvTranspose ConvInteger MatMulInteger MatMulNBits DynamicQuantizeMatMul "
    "MatMulBnb4 MatMulIntegerToFloat QMoE DequantizeLinear".split()
)
"""Operators that take weights stored as integers."""

_QUANTIZERS = ("DynamicQuantizeLinear", "QuantizeLinear", "QLinearConv", "QLinearMatMul")


def is_quantizer(node: ir.Node | None) -> bool:
    """Whether a node rounds floating numbers, or sums of products, to levels."""
    return is_op(node, *_QUANTIZERS)


def before_quantizer(value: ir.Value) -> ir.Value:
    """The value that a DequantizeLinear of a QuantizeLinear rounds; another value itself."""
    back = value.producer()
    inner = back.inputs[0].producer() if is_op(back, "DequantizeLinear") and back.inputs[0] is not None else None
    if is_op(inner, "QuantizeLinear") and inner.inputs[0] is not None:
        return inner.inputs[0]
    return value


def acting_nodes(graph: ir.Graph, targets: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes that a derivative of `targets` may depend on, if derivatives pass quantizers."""
    within = frozenset(graph)
    found: set[ir.Node] = set()
    todo = list(targets)
    while todo:
        fresh = ancestors(todo, within) - found
        found |= fresh
        todo = [v for node in fresh for v in _quantized_from(node)]
    return found


def _quantized_from(node: ir.Node) -> Iterator[ir.Value]:
    """The floating values that were quantized to the integer operands of a node, directly or through other integers."""
    stack, seen = [v for v in node.inputs if v is not None and not floating(v)], set[ir.Node]()
    while stack:
        producer = stack.pop().producer()
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        if is_op(producer, "QuantizeLinear", "DynamicQuantizeLinear") and producer.inputs[0] is not None:
            yield producer.inputs[0]
        else:
            stack += [v for v in producer.inputs if v is not None and not floating(v)]
