"""Correct the shape inference of layout operators, which guesses sizes that are known only at run time.

Squeeze without axes removes every axis of size one, also those of unknown size. Split with computed sizes need not be even.
The rank of the result of Expand, and of Compress with an axis, is unknown if that of the data is. Slice with bounds
beyond the end takes fewer rows than their distance, and backwards it may take the first element. Where chooses among sizes
by comparisons that can be evaluated. Unique with an axis keeps the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import backwards, constant_of
from onnx_convgrad.ir.nodes import is_op

Infer = Callable[[ShapeInferenceContext, ir.Node], None]


def _squeeze(_: ShapeInferenceContext, node: ir.Node) -> None:
    n = Call(node)
    x, axes = n.get("data"), n.get("axes")
    if x is None or x.shape is None or "axes" in node.attributes:
        return
    values = constant_of(axes)
    if values is not None:
        gone = {int(a) % len(x.shape) for a in values.reshape(-1)}
        n.y.shape = ir.Shape([d for i, d in enumerate(x.shape) if i not in gone])
    elif axes is not None or not x.shape.is_static():
        n.y.shape = None


def _split(context: ShapeInferenceContext, node: ir.Node) -> None:
    n = Call(node)
    x, split = n.get("input"), n.get("split")
    if x is None or x.shape is None or split is None:
        return
    sizes, dims = constant_of(split), list(x.shape)
    for i, y in enumerate(node.outputs):
        dims[n.int("axis", 0)] = context.new_symbolic_dim() if sizes is None else int(sizes.reshape(-1)[i])
        y.shape = ir.Shape(dims)


def _needs_rank(_: ShapeInferenceContext, node: ir.Node) -> None:
    x = node.inputs[0]
    if x is not None and x.shape is None and (node.op_type != "Compress" or "axis" in node.attributes):
        node.outputs[0].shape = None


def _unique(context: ShapeInferenceContext, node: ir.Node) -> None:
    x, axis = node.inputs[0], node.attributes.get_int("axis")
    if x is None or axis is None:
        return
    dims = None if x.shape is None else list(x.shape)
    if dims is not None:
        dims[axis] = context.new_symbolic_dim()
    node.outputs[0].shape = None if dims is None else ir.Shape(dims)


def _slice(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Make sizes unknown that follow from constant bounds on an axis of unknown size, except 1."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.shape is None or y.shape is None:
        return
    bounds = [constant_of(v) for v in node.inputs[1:]]
    if len(bounds) == 4 and all(b is not None for b in bounds):
        _slice_exactly(context, x, y, np.stack([b.reshape(-1) for b in bounds if b is not None], 1))
    for axis, (old, new) in enumerate(zip(x.shape, y.shape, strict=True)):
        if isinstance(new, int) and new > 1 and not isinstance(old, int):
            y.shape = ir.Shape([*y.shape[:axis], context.new_symbolic_dim(), *y.shape[axis + 1 :]])


def _slice_exactly(context: ShapeInferenceContext, x: ir.Value, y: ir.Value, bounds: np.ndarray) -> None:
    """Slice known sizes, and the known elements of a vector, by bounds (start, end, axis, step)."""
    assert x.shape is not None and y.shape is not None  # noqa: PT018
    members, dims = context.get_symbolic_value(x), list(y.shape)
    for start, end, axis, step in bounds.tolist():
        size = x.shape[axis]
        if isinstance(size, int):
            taken = backwards(start, end, step, size) if step < 0 else slice(start, end, step)
            dims[axis] = len(range(size)[taken])
            if members is not None and len(dims) == 1:
                y.const_value = None
                context.set_symbolic_value(y, members[taken])
    y.shape = ir.Shape(dims)


def _where(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Evaluate Where(sizes == -1, 1, sizes), which PyTorch's older exporter writes for an expansion."""
    condition, *choices = node.inputs
    equal = None if condition is None else condition.producer()
    if not is_op(equal, "Equal"):
        return
    vectors = [_members(context, v) for v in (*equal.inputs, *choices)]
    if not all(vectors) or len({len(v) for v in vectors if v is not None}) > 1:
        return
    symbols = {str(d) for v in node.graph.inputs for d in v.shape or ()} if node.graph is not None else set[str]()
    picked = []
    for left, right, one, other in zip(*(v for v in vectors if v is not None), strict=True):
        if isinstance(left, int) and isinstance(right, int):
            picked.append(one if left == right else other)
        elif isinstance(right, int) and right < 0 and str(left) in symbols:  # sizes are not negative
            picked.append(other)
        else:
            return
    context.set_symbolic_value(node.outputs[0], picked)


def _members(context: ShapeInferenceContext, value: ir.Value | None) -> list[Any] | None:
    """The elements of a vector, numbers or symbols, if they are known."""
    symbolic = None if value is None else context.get_symbolic_value(value)
    constant = constant_of(value) if symbolic is None else None
    if constant is None or constant.ndim > 1 or constant.dtype.kind not in "iu":
        return symbolic
    return list(map(int, constant.reshape(-1)))


CORRECTIONS: tuple[tuple[str, int, Infer], ...] = (
    ("Squeeze", 1, _squeeze),
    ("Split", 2, _split),
    ("Expand", 8, _needs_rank),
    ("Compress", 9, _needs_rank),
    ("Slice", 10, _slice),
    ("Where", 9, _where),
    ("Unique", 11, _unique),
)
"""(operator, opset, rule that runs after that of the library)"""
