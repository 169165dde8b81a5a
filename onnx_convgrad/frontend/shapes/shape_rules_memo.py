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
        out, shape = node.outputs[0], memo.get(key)
        if shape is None:
            invented, declared = len(context.generated_dim_names), out.shape
            out.shape = None  # the declared shape must not be remembered
            try:
                infer(context, node)
                shape = node.outputs[0].shape
            finally:
                out.shape = declared
            if shape is None:
                return
            if len(context.generated_dim_names) == invented:
                if len(memo) >= _MOST:
                    memo.clear()
                memo[key] = shape
        context.set_shape_and_dtype(out, ir.Shape(shape.dims), node.inputs[0].dtype)  # type: ignore[union-attr]

    return rule


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
        kernel = n.ints("kernel_shape") or w.shape.dims[2:]
        strides, dilations = (n.ints(name) or (1,) * rank for name in ("strides", "dilations"))
        pads = n.ints("pads") or (0,) * (2 * rank)
        fits = [len(v) for v in (kernel, strides, dilations, pads)] == [rank, rank, rank, 2 * rank]
        if not fits or rank < 1 or min(*strides, *dilations) < 1 or not all(isinstance(k, int) for k in kernel):
            infer(context, node)
            return
        added = [pads[i] + pads[rank + i] - dilations[i] * (kernel[i] - 1) - 1 for i in range(rank)]
        sizes = map(_windows, x.shape.dims[2:], added, strides)
        context.set_shape_and_dtype(node.outputs[0], ir.Shape([x.shape[0], w.shape[0], *sizes]), x.dtype)

    return rule


@lru_cache(maxsize=_MOST)
def _windows(size: int | ir.SymbolicDim, added: int, stride: int) -> int | ir.SymbolicDim:
    """The number of windows along an axis; `added` is the padding less the span of the kernel."""
    return size + (added + 1) if stride == 1 else (size + added) // stride + 1


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
        sizes = value.shape.dims if value.dtype.is_floating_point() else context.get_symbolic_value(value)
        if sizes is None or any(isinstance(d, ir.SymbolicDim) and d.value is None for d in sizes):
            return None
        parts.append(tuple(sizes))
    for name, value in Call(node).attributes().items():
        parts.append((name, value if isinstance(value, Hashable) else tuple(value)))
    return tuple(parts)
