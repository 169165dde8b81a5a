"""Converters of mixtures of experts in ONNX Runtime (com.microsoft)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.converters_quantized import of_blocks, unpacked
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.constants import constant_of


def experts(h: Rewriter) -> ir.Value:
    """Sum over experts of gate fc2(activation(fc1(X))), with gates TopK(Softmax(router))

    All experts compute all rows; the gates of those that are not chosen are 0.
    """
    gates = _gates(h, h.e.op("Softmax", h.required(1), axis=-1), normalized=h.int("normalize_routing_weights", 0) == 1)
    return _mixed(h, [(h.required(place), h.operand(place + 1)) for place in (2, 4)], gates, own_gate=6)


def quantized_experts(h: Rewriter) -> ir.Value:
    """MoE with DequantizeLinear of the weights, and gates Softmax(TopK(router)) or those in router_weights"""
    if h.string("quant_type", "int") != "int" or h.int("weights_prepacked", -1) == 1:
        raise UnsupportedCase("its weights are not integers in the order of ONNX Runtime's CPU kernel")
    bits = h.int("expert_weight_bits", 4)
    if any(h.int(f"fc{at}_expert_weight_bits", bits) != bits for at in (1, 2)):
        raise UnsupportedCase("its layers have weights of different widths, which ONNX Runtime's CPU kernel lacks")
    shares, given = h.operand(14), h.operand(14) is not None
    shares = h.e.op("Softmax", h.required(1), axis=-1) if shares is None else shares
    gates = _gates(h, shares, normalized=not given or h.int("normalize_routing_weights", 0) == 1)
    layers = [(_of_levels(h, place, behind, bits), h.operand(place + 2)) for place, behind in ((2, 11), (5, 12))]
    return _mixed(h, layers, gates, own_gate=8)


def _of_levels(h: Rewriter, place: int, behind: int, bits: int) -> ir.Value:
    """The weight `[experts, outputs, inputs]` at `place` of QMoE; its zero points, per block or per row, are at `behind`."""
    packed, given, block = constant_of(h.operand(place)), h.operand(behind), h.int("block_size", 0)
    zeros = constant_of(given)
    if packed is None or (zeros is None) != (given is None) or bits not in (2, 4, 8):
        raise UnsupportedCase("its weights and zero points are not stored, in 2, 4 or 8 bits per number")
    inner = packed.shape[2] * 8 // bits
    block = block if block > 0 else inner
    shape = *packed.shape[:2], inner // block
    if zeros is not None:
        zeros = unpacked(zeros, bits)[..., : shape[zeros.ndim - 1]].reshape(shape)
    return of_blocks(h, packed, h.required(place + 1), zeros, bits, block)


def _mixed(h: Rewriter, layers: Sequence[tuple[ir.Value, ir.Value | None]], gates: ir.Value, own_gate: int) -> ir.Value:
    """The sum over experts, with weight and bias of fc1 and fc2; the operand at `own_gate` is the weight of fc3."""
    for name in ("use_sparse_mixer", "swiglu_limit_after_activation"):
        if h.int(name, 0):
            raise UnsupportedCase(f"its attribute {name} is set")
    if h.operand(own_gate) is not None:
        raise UnsupportedCase("its gate has weights of its own (fc3), which ONNX Runtime's CPU kernel lacks")
    e, x, (first, second) = h.e, h.required(0), layers
    rows = e.op("Reshape", x, e.vector([-1, e.dim(x, -1)]))
    hidden = _activated(h, _of_experts(h, e.unsqueeze(rows, [0]), *first))
    shares = e.unsqueeze(e.op("Transpose", gates, perm=[1, 0]), [2])
    y = e.op("ReduceSum", e.mul(_of_experts(h, hidden, *second), shares), e.ints([0]), keepdims=0)
    return e.op("Reshape", y, e.op("Shape", x))


def _of_experts(h: Rewriter, x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
    """One layer of each expert: `[experts, rows, outputs]`."""
    y = h.e.matmul(x, h.e.op("Transpose", weight, perm=[0, 2, 1]))
    return y if bias is None else h.e.add(y, h.e.unsqueeze(bias, [1]))


def _gates(h: Rewriter, shares: ir.Value, *, normalized: bool) -> ir.Value:
    """The share of each expert in each row, or 0 if the router prefers `k` others."""
    e = h.e
    _, which = e.ops("TopK", h.required(1), e.ints([h.int("k", 1)]), outputs=2, axis=-1)
    chosen = e.op("GatherElements", shares, which, axis=1)
    if normalized:
        chosen = e.div(chosen, e.op("ReduceSum", chosen, e.ints([-1])))
    return e.op("ScatterElements", e.zeros_like(shares), which, chosen, axis=1)


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


def group_router(h: Rewriter) -> list[ir.Value]:
    """Log(max(s, 1e-20)) with s = Sigmoid(logits), or router_sentinel for all but the best experts of the best groups

    They are chosen by s + bias, which is the second result; the third is s.
    """
    if h.operand(2) is not None:
        raise UnsupportedCase("it multiplies by projection_weight, which ONNX Runtime's CPU kernel lacks")
    e, logits = h.e, h.required(0)
    rows = e.op("Reshape", e.cast(logits, ir.DataType.FLOAT), e.vector([-1, e.dim(logits, -1)]))
    scores = e.op("Sigmoid", rows)
    preferred = e.add(scores, h.required(1))
    count = h.int("n_group", 1)
    groups = e.op("Reshape", preferred, e.vector([0, count, -1]))
    most = e.size_min(h.int("group_topk", 2), e.size_div(e.dim(logits, -1), count))
    best, _ = e.ops("TopK", groups, e.vector([most]), outputs=2, axis=-1)
    sums = e.op("ReduceSum", best, e.ints([-1]), keepdims=0)
    _, kept = e.ops("TopK", sums, e.ints([h.int("topk_group", 1)]), outputs=2, axis=-1)
    ones = e.op("Expand", e.scalar(1, sums), e.op("Shape", kept))
    open_ = e.op("ScatterElements", e.zeros_like(sums), kept, ones, axis=1)
    shown = e.where(e.op("Greater", e.unsqueeze(open_, [2]), e.scalar(0, sums)), groups, -np.inf)
    flat = e.op("Reshape", shown, e.op("Shape", rows))
    _, which = e.ops("TopK", flat, e.ints([h.int("top_k", 1)]), outputs=2, axis=-1)
    chosen = e.op("Log", e.op("Max", e.op("GatherElements", scores, which, axis=1), e.scalar(1e-20, scores)))
    others = e.op("Expand", e.scalar(h.float("router_sentinel", -10000.0), scores), e.op("Shape", rows))
    y = e.op("ScatterElements", others, which, chosen, axis=1)
    return [e.op("CastLike", y, logits), preferred, scores]
