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


# -- mixtures of experts -----------------------------------------------------------------------------------------------


def experts(h: Rewriter) -> ir.Value:
    """Sum over experts of gate fc2(activation(fc1(X))), with gates TopK(Softmax(router))

    All experts compute all rows; the gates of those that are not chosen are 0.
    """
    for name in ("use_sparse_mixer", "swiglu_limit_after_activation"):
        if h.int(name, 0):
            raise UnsupportedCase(f"its attribute {name} is set")
    if h.operand(6) is not None:
        raise UnsupportedCase("its gate has weights of its own (fc3), which ONNX Runtime's CPU kernel lacks")
    e, x = h.e, h.required(0)
    rows = e.op("Reshape", x, e.vector([-1, e.dim(x, -1)]))
    hidden = _activated(h, _of_experts(h, e.unsqueeze(rows, [0]), 2))
    gates = e.unsqueeze(e.op("Transpose", _gates(h), perm=[1, 0]), [2])
    y = e.op("ReduceSum", e.mul(_of_experts(h, hidden, 4), gates), e.ints([0]), keepdims=0)
    return e.op("Reshape", y, e.op("Shape", x))


def _of_experts(h: Rewriter, x: ir.Value, place: int) -> ir.Value:
    """One layer of each expert: `[experts, rows, outputs]`, with the weight at `place` and the bias behind it."""
    y, bias = h.e.matmul(x, h.e.op("Transpose", h.required(place), perm=[0, 2, 1])), h.operand(place + 1)
    return y if bias is None else h.e.add(y, h.e.unsqueeze(bias, [1]))


def _gates(h: Rewriter) -> ir.Value:
    """The share of each expert in each row."""
    shares = h.e.op("Softmax", h.required(1), axis=-1)
    largest, which = h.e.ops("TopK", shares, h.e.ints([h.int("k", 1)]), outputs=2, axis=-1)
    if h.int("normalize_routing_weights", 0):
        largest = h.e.div(largest, h.e.op("ReduceSum", largest, h.e.ints([-1])))
    return h.e.op("ScatterElements", h.e.zeros_like(shares), which, largest, axis=1)


def _activated(h: Rewriter, x: ir.Value) -> ir.Value:
    e, kind = h.e, h.string("activation_type", "relu")
    if kind == "identity":
        return x
    if kind == "relu":
        return e.op("Relu", x)
    if kind == "gelu":
        return e.op("Gelu", x, approximate="tanh")
    if kind == "silu":
        return e.mul(x, e.op("Sigmoid", x))
    if kind != "swiglu" or h.int("swiglu_fusion", 0) != 1:
        raise UnsupportedCase(f"its activation {kind!r} has a form that ONNX Runtime's CPU kernel lacks")
    last = np.iinfo(np.int64).max
    gate, line = (e.op("Slice", x, e.ints([at]), e.ints([last]), e.ints([-1]), e.ints([2])) for at in (0, 1))
    limit = h.float("swiglu_limit", np.inf)
    if np.isfinite(limit):
        gate, line = e.op("Clip", gate, None, e.scalar(limit, gate)), e.op("Clip", line, -limit, limit)
    share = e.op("Sigmoid", e.mul(gate, h.float("activation_alpha", 1.0)))
    return e.mul(e.mul(gate, share), e.add(line, h.float("activation_beta", 0.0)))
