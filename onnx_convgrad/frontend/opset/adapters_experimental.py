"""Adapters for operators that were experimental until opset 9; ONNX Runtime still runs them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.frontend.opset.rewriter import Rewriter

__all__ = ["affine", "image_scaler", "mvn", "parametric_softplus", "scaled_tanh"]


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


def _scaled(h: Rewriter, function: str) -> None:
    """alpha * function(beta * x)"""
    x = h.required(0)
    inner = h.e.op("Mul", x, h.scalar(h.float("beta", 1.0), x, h.y))
    outer = h.e.op(function, inner)
    h.become("Mul", outer, h.scalar(h.float("alpha", 1.0), x, h.y))


def scaled_tanh(h: Rewriter) -> None:
    """alpha * tanh(beta * x)"""
    _scaled(h, "Tanh")


def parametric_softplus(h: Rewriter) -> None:
    """alpha * log(1 + exp(beta * x))"""
    _scaled(h, "Softplus")


def affine(h: Rewriter) -> None:
    """alpha * x + beta"""
    x = h.required(0)
    scaled = h.e.op("Mul", x, h.scalar(h.float("alpha", 1.0), x, h.y))
    h.become("Add", scaled, h.scalar(h.float("beta", 0.0), x, h.y))


def image_scaler(h: Rewriter) -> None:
    """scale * x + bias, with a bias per channel"""
    x, bias = h.required(0), h.floats("bias") or (0.0,)
    scaled = h.e.op("Mul", x, h.scalar(h.float("scale", 1.0), x, h.y))
    per_channel = h.e.const(np.array(bias, dtype=np.float32).reshape(-1, 1, 1))
    if h.dtype(x, h.y) != ir.DataType.FLOAT:
        per_channel = h.e.op("CastLike", per_channel, x)
    h.become("Add", scaled, per_channel)
