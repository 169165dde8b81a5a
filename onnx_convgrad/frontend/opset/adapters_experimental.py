"""Adapters for operators that ai.onnx called experimental and dropped by opset 10; ONNX Runtime still runs them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.frontend.opset.rewriter import Rewriter

__all__ = ["affine", "image_scaler", "mvn", "parametric_softplus", "scaled_tanh"]


def mvn(node: ir.Node, version: int, h: Rewriter) -> None:
    """The axes were told by `across_channels`, always with those of the batch; the division could be left out."""
    if "axes" in node.attributes:
        return
    x = h.required(0)
    rank = 4 if x.shape is None else x.shape.rank()
    axes = [axis for axis in range(rank) if axis != 1 or h.get_int("across_channels", 0)]
    if h.get_int("normalize_variance", 1):
        h.become("MeanVarianceNormalization", [x], {"axes": axes})
    else:
        mean = h.emit("ReduceMean", [x, h.ints(axes, "axes")], dtype=h.dtype(x, node.outputs[0]))
        h.become("Sub", [x, mean])


def _scaled(node: ir.Node, h: Rewriter, alpha: float, beta: float, function: str) -> None:
    """alpha * function(beta * x)"""
    x, y = h.required(0), node.outputs[0]
    inner = h.emit("Mul", [x, h.scalar(h.get_float("beta", beta), x, "beta", y)], dtype=h.dtype(x, y))
    outer = h.emit(function, [inner], dtype=h.dtype(x, y))
    h.become("Mul", [outer, h.scalar(h.get_float("alpha", alpha), x, "alpha", y)])


def scaled_tanh(node: ir.Node, version: int, h: Rewriter) -> None:
    """alpha * tanh(beta * x)"""
    _scaled(node, h, 1.0, 1.0, "Tanh")


def parametric_softplus(node: ir.Node, version: int, h: Rewriter) -> None:
    """alpha * log(1 + exp(beta * x))"""
    _scaled(node, h, 1.0, 1.0, "Softplus")


def affine(node: ir.Node, version: int, h: Rewriter) -> None:
    """alpha * x + beta"""
    x, y = h.required(0), node.outputs[0]
    scaled = h.emit("Mul", [x, h.scalar(h.get_float("alpha", 1.0), x, "alpha", y)], dtype=h.dtype(x, y))
    h.become("Add", [scaled, h.scalar(h.get_float("beta", 0.0), x, "beta", y)])


def image_scaler(node: ir.Node, version: int, h: Rewriter) -> None:
    """scale * x + bias, with a bias per channel"""
    x, y, bias = h.required(0), node.outputs[0], h.get_floats("bias") or (0.0,)
    scaled = h.emit("Mul", [x, h.scalar(h.get_float("scale", 1.0), x, "scale", y)], dtype=h.dtype(x, y))
    per_channel = h.constant(np.array(bias, dtype=np.float32).reshape(-1, 1, 1), "bias")
    if h.dtype(x, y) != ir.DataType.FLOAT:
        per_channel = h.emit("CastLike", [per_channel, x])
    h.become("Add", [scaled, per_channel])
