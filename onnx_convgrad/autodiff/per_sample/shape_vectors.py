"""Evaluate vectors of sizes that the graph computes, such as the target of a Reshape, where shape inference does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import static_dims
from onnx_convgrad.ir.nodes import is_op

_LIMIT = 16
"""Most nodes of shape arithmetic that are followed back."""


def sizes(value: ir.Value, shape: Callable[[ir.Value], list[Any]]) -> list[Any]:
    """The shape of a value, empty if unknown; for a ConstantOfShape its operand, evaluated with `shape`."""
    node = value.producer()
    filled = entries(node.inputs[0], shape) if is_op(node, "ConstantOfShape") else None
    return list(value.shape or ()) if filled is None else filled


def entries(
    value: ir.Value | None, shape: Callable[[ir.Value], list[Any]] = lambda v: list(v.shape or ()), steps: int = _LIMIT
) -> list[Any] | None:
    """The entries of a vector of sizes: numbers, symbols, or `None` for an unknown entry; `shape` gives those of values."""
    constant = constant_of(value)
    if constant is not None:
        return [int(d) for d in constant.reshape(-1)]
    node = None if value is None else value.producer()
    source = None if node is None or node.domain or not node.inputs else node.inputs[0]
    if node is None or source is None or steps == 0 or (node.op_type == "Shape" and source.shape is None):
        return None
    if node.op_type == "Shape" and source.shape is not None:
        start, end = (
            None if name not in node.attributes else node.attributes[name].as_int() for name in ("start", "end")
        )
        return shape(source)[start:end]
    if node.op_type == "Concat":
        parts = [entries(v, shape, steps - 1) or _unknown(v) for v in node.inputs]
    else:
        parts = [entries(source, shape, steps - 1)]
    if any(part is None for part in parts):
        return None
    return _selected(node, [d for part in parts if part is not None for d in part])


def _unknown(value: ir.Value | None) -> list[None] | None:
    """The entries of a vector of which only the length is known."""
    lengths = None if value is None else static_dims(value)
    return [None] * lengths[0] if lengths and lengths[0] is not None else None


def _selected(node: ir.Node, flat: list[Any]) -> list[Any] | None:
    """The entries of the result of an operator, given those of its operands."""
    if is_view(node) or node.op_type in ("Cast", "Concat"):
        return flat
    bounds = [constant_of(v) for v in node.inputs[1:]]
    if node.op_type == "Gather" and bounds[0] is not None:
        return [flat[int(i)] for i in bounds[0].reshape(-1)]
    if node.op_type == "Slice" and all(b is not None and b.size == 1 for b in bounds):
        first, last, *rest = (int(b.item()) for b in bounds if b is not None)
        return flat[first : last : rest[1] if len(rest) > 1 else 1]
    return None
