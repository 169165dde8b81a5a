"""Operators of ONNX Runtime (com.microsoft) that its optimizer does not make: their authors write them into a file."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.cofactors import cofactors
from onnx_convgrad.ir.constants import constant_of


def plain(h: Rewriter) -> None:
    """The operator of ai.onnx that has its name"""
    h.node.domain = ""


def newer(h: Rewriter) -> None:
    """The operator of ai.onnx 27 that has its name"""
    for name in ("state_window", "channels_last", "state_update_capacity", "dilation", "ndim"):
        usual = int(name in ("dilation", "ndim"))
        if h.int(name, usual) != usual:
            raise UnsupportedCase(f"its attribute {name} is {h.int(name, usual)}, which ai.onnx has not")
        h.drop(name)
    h.node.domain, h.node.version = "", 27


def grid_modes(h: Rewriter) -> None:
    """Rename the modes of GridSample to those of opset 20"""
    mode = h.string("mode", "bilinear")
    h.set_attributes(mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


def grid_sample(h: Rewriter) -> None:
    """The operator of ai.onnx that has its name"""
    grid_modes(h)
    plain(h)


def expand_dims(h: Rewriter) -> ir.Value:
    """Unsqueeze(X, axis)"""
    axis = h.e.reshape(h.e.cast(h.required(1), ir.DataType.INT64), [1])
    return h.e.op("Unsqueeze", h.required(0), axis)


def range_(h: Rewriter) -> ir.Value:
    """Range(start, limit, delta or 1)"""
    start, limit, delta = (
        None if value is None else h.e.reshape(value, []) for value in (h.required(0), h.required(1), h.operand(2))
    )
    assert start is not None
    return h.e.op("Range", start, limit, h.e.scalar(1, start) if delta is None else delta)


def inverse(h: Rewriter) -> ir.Value:
    """Transposed cofactors of X, which are determinants, divided by Det(X)"""
    x = h.required(0)
    rank = h.e.rank(x, "its replacement by determinants")
    swapped = h.e.op("Transpose", cofactors(h.e, x), perm=[*range(rank - 2), rank - 1, rank - 2])
    return h.e.div(swapped, h.e.unsqueeze(h.e.op("Det", x), [-2, -1]))


def distances(h: Rewriter) -> ir.Value:
    """Sums over n of (A[m, n] - B[k, n])^2, or their roots"""
    metric = h.string("metric", "sqeuclidean")
    if metric not in ("sqeuclidean", "euclidean"):
        raise UnsupportedCase(f"its metric is {metric!r}, which ONNX Runtime's CPU kernel lacks")
    differences = h.e.sub(h.e.unsqueeze(h.required(0), [1]), h.e.unsqueeze(h.required(1), [0]))
    squares = h.e.op("ReduceSum", h.e.square(differences), h.e.ints([2]), keepdims=0)
    return squares if metric == "sqeuclidean" else h.e.op("Sqrt", squares)


def gated_add(h: Rewriter) -> ir.Value:
    """X + Y gate"""
    if h.operand(3) is not None:
        raise UnsupportedCase("its gate has a weight, which ONNX Runtime's CPU kernel lacks")
    return h.e.add(h.required(0), h.e.mul(h.required(1), h.required(2)))


def scaled_silu(h: Rewriter) -> ir.Value:
    """z Sigmoid(z) with z = scale X"""
    x, scale = h.required(0), h.operand(1)
    z = h.e.mul(x, h.float("alpha", 1.0)) if scale is None else h.e.mul(x, h.e.op("CastLike", scale, x))
    return h.e.mul(z, h.e.op("Sigmoid", z))


def attention_gate(h: Rewriter) -> list[ir.Value | None]:
    """decay_scale Softplus(a + dt_bias), and Sigmoid(b)"""
    e, a, b = h.e, h.required(0), h.operand(3)
    wide = e.add(e.cast(a, ir.DataType.FLOAT), h.required(1))
    decay = e.op("CastLike", e.mul(e.op("Softplus", wide), h.required(2)), a)
    return [decay, None if b is None else e.op("Sigmoid", b)]


def gated_rms_norm(h: Rewriter) -> ir.Value:
    """X / sqrt(mean(X^2) + epsilon) scale activation(gate), over as many numbers as there are scales"""
    e, x, scale, z = h.e, *(h.e.cast(h.required(index), ir.DataType.FLOAT) for index in range(3))
    groups = e.op("Reshape", x, e.vector([-1, e.dim(scale, 0)]))
    mean = e.op("ReduceMean", e.square(groups), e.ints([-1]))
    normal = e.div(groups, e.op("Sqrt", e.add(mean, h.float("epsilon", 1e-5))))
    gate = e.op("Sigmoid", z)
    gate = gate if h.string("activation", "silu") == "sigmoid" else e.mul(z, gate)
    y = e.mul(e.op("Reshape", e.mul(normal, scale), e.op("Shape", x)), gate)
    return e.op("CastLike", y, h.required(0))


def unfold(h: Rewriter) -> ir.Value:
    """Gather of the windows of `size` along an axis, with their numbers along a new last axis"""
    e, x, size, step = h.e, h.required(0), h.int("size", 1), h.int("step", 1)
    rank = e.rank(x, "its replacement by Gather")
    axis = h.int("dim", -1) % rank
    count = e.size_add(e.size_div(e.size_sub(e.dim(x, axis), size), step), 1)
    starts = e.reshape(e.arange(count, step), [-1, 1])
    windows = e.gather(x, e.op("Add", starts, e.const(np.arange(size))), axis=axis)
    order = [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1]
    return e.op("Transpose", windows, perm=order)


def conv_transpose(h: Rewriter) -> ir.Value:
    """ConvTranspose with the stored operand Pads as its attribute"""
    pads = constant_of(h.operand(2))
    if h.operand(2) is not None and pads is None:
        raise UnsupportedCase("its operand Pads is not stored: replace it by a constant")
    padding = None if pads is None else [int(number) for number in pads]
    return h.e.op("ConvTranspose", h.required(0), h.required(1), h.operand(3), pads=padding, **h.attributes())
