"""Adapters for operators that were experimental until opset 9; ONNX Runtime still runs them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.frontend.opset.rewriter import Rewriter

__all__ = ["affine", "image_scaler", "mvn", "scaled"]


def mvn(h: Rewriter) -> None:
    """`across_channels` gave the axes, always with the batch; the division was optional."""
    if "axes" in h.node.attributes:
        return
    x = h.required(0)
    rank = 4 if x.shape is None else x.shape.rank()
    axes = [axis for axis in range(rank) if axis != 1 or h.int("across_channels", 0)]
    if h.int("normalize_variance", 1):
        h.become("MeanVarianceNormalization", x, axes=axes)
    else:
        mean = h.e.op("ReduceMean", x, h.e.ints(axes))
        h.become("Sub", x, mean)


def scaled(function: str) -> Callable[[Rewriter], None]:
    """alpha * function(beta * x)"""

    def adapt(h: Rewriter) -> None:
        inner = _times(h, h.required(0), "beta")
        h.become("Mul", h.e.op(function, inner), h.scalar(h.float("alpha", 1.0), h.required(0), h.y))

    return adapt


def affine(h: Rewriter) -> None:
    """alpha * x + beta"""
    x = h.required(0)
    h.become("Add", _times(h, x, "alpha"), h.scalar(h.float("beta", 0.0), x, h.y))


def image_scaler(h: Rewriter) -> None:
    """scale * x + bias, with a bias per channel"""
    x = h.required(0)
    bias = h.e.const(np.array(h.floats("bias") or (0.0,), dtype=np.float32).reshape(-1, 1, 1))
    if h.dtype(x, h.y) != ir.DataType.FLOAT:
        bias = h.e.op("CastLike", bias, x)
    h.become("Add", _times(h, x, "scale"), bias)


def _times(h: Rewriter, x: ir.Value, attribute: str) -> ir.Value:
    return h.e.op("Mul", x, h.scalar(h.float(attribute, 1.0), x, h.y))
