"""Remember inferred shapes, so that layers with equal operands are inferred once: arithmetic on symbols is slow."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnx_convgrad.frontend.shapes.shape_rules_layout import Infer
from onnx_convgrad.ir.call import Call

_MOST = 4096
"""Shapes that the memo of one operator keeps; a full one is emptied."""

REMEMBERED: tuple[tuple[str, int], ...] = (
    ("AveragePool", 1),
    ("ConvTranspose", 1),
    ("MaxPool", 1),
    ("Pad", 11),
    ("Reshape", 5),
    ("Slice", 10),
)
"""Operators with symbolic arithmetic, and the first opset that their rule holds for."""


def remembered(infer: Infer) -> Infer:
    """The rule `infer` of an operator with one result, with a memo of the shapes of floating results.

    A shape with a symbol that the rule invented is not kept: it belongs to one node.
    """
    memo: dict[Hashable, ir.Shape] = {}

    def rule(context: ShapeInferenceContext, node: ir.Node) -> None:
        key = _key(context, node)
        if key is None:
            infer(context, node)
            return
        out, first = node.outputs[0], node.inputs[0]
        assert first is not None, "the key has its dtype"
        shape = memo.get(key)
        if shape is None:
            invented = len(context.generated_dim_names)
            shape = _alone(infer, context, node)
            if shape is None:
                return
            if len(context.generated_dim_names) == invented:
                if len(memo) >= _MOST:
                    memo.clear()
                memo[key] = shape
        context.set_shape_and_dtype(out, ir.Shape(shape.dims), first.dtype)

    return rule


def _alone(infer: Infer, context: ShapeInferenceContext, node: ir.Node) -> ir.Shape | None:
    """Run `infer` as if no shape were declared, and return the shape that it finds; the declared one is put back."""
    out = node.outputs[0]
    declared, out.shape = out.shape, None
    try:
        infer(context, node)
        return out.shape
    finally:
        out.shape = declared


def conv(infer: Infer) -> Infer:
    """The rule of Conv, with a memo of the sizes of single axes: layers of other channels have the same ones.

    `infer` stays responsible for what is not plain: unknown kernels, automatic padding, and attributes that do not fit.
    """

    def rule(context: ShapeInferenceContext, node: ir.Node) -> None:
        n = Call(node)
        x, w = n.get("X"), n.get("W")
        if x is None or w is None or x.shape is None or w.shape is None or n.string("auto_pad", "NOTSET") != "NOTSET":
            infer(context, node)
            return
        rank = len(x.shape) - 2
        kernel = n.ints("kernel_shape") or list(w.shape.dims[2:])
        strides, dilations = (n.ints(name) or (1,) * rank for name in ("strides", "dilations"))
        pads = n.ints("pads") or (0,) * (2 * rank)
        fits = [len(v) for v in (kernel, strides, dilations, pads)] == [rank, rank, rank, 2 * rank]
        if not fits or rank < 1 or min(*strides, *dilations) < 1 or not all(isinstance(k, int) for k in kernel):
            infer(context, node)
            return
        spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
        added = [pads[i] + pads[rank + i] - span for i, span in enumerate(spans)]
        sizes = map(_windows, x.shape.dims[2:], added, strides)
        context.set_shape_and_dtype(node.outputs[0], ir.Shape([x.shape[0], w.shape[0], *sizes]), x.dtype)

    return rule


@lru_cache(maxsize=_MOST)
def _windows(size: int | ir.SymbolicDim, added: int, stride: int) -> int | ir.SymbolicDim:
    """The number of windows along an axis; `added` is the padding less the span of the kernel."""
    return (size + added) // stride + 1


def _key(context: ShapeInferenceContext, node: ir.Node) -> Hashable | None:
    """A key of everything that decides the shape of the result, or `None` if a part of it is unknown."""
    first = node.inputs[0] if node.inputs else None
    if first is None or first.dtype is None or not first.dtype.is_floating_point() or len(node.outputs) != 1:
        return None
    parts: list[Hashable] = [node.op_type]
    for value in node.inputs:
        if value is None:
            parts.append(None)
            continue
        if value.shape is None or value.dtype is None:
            return None
        dims = value.shape.dims
        if value.dtype.is_floating_point():
            if any(isinstance(d, ir.SymbolicDim) and d.value is None for d in dims):
                return None
            parts.append(dims)
            continue
        numbers = context.get_symbolic_value(value)
        if numbers is None or any(isinstance(n, ir.SymbolicDim) and n.value is None for n in numbers):
            return None
        parts.append(tuple(numbers))
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            return None
        parts.append((name, attribute.value if isinstance(attribute.value, Hashable) else tuple(attribute.value)))
    return tuple(parts)
