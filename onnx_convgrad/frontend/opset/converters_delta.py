"""The converter of GatedDeltaNet of ONNX Runtime (com.microsoft): linear attention with a state, as in Qwen3-Next.

Letters in formulas are sizes: batch B, turns S, heads N, numbers in a key K and in a value V.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.converters_attention import rank_of, refuse_operands
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.emit import Dim
from onnx_convgrad.ir.loop_bodies import Carried, Layout, Slices, emit_loop, placeholder

_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}
"""Value of `update_rule` -> whether the state decays, and whether what it gives for a key is subtracted from the value."""


def gated_delta_net(h: Rewriter) -> list[ir.Value]:
    """Scan of S = exp(g) S + beta (v - exp(g) S k) k' and y = scale S q, in float32, with a state S per head"""
    refuse_operands(h, cu_seqlens=3, capture_count=9)
    e, state = h.e, h.operand(6)
    decays, subtracts = _RULES.get(h.string("update_rule", "gated_delta"), (True, True))
    whole, (q, k, v) = _operands(h)
    batch = e.dim(v if whole else h.required(6), 0)
    heads, values, keys = e.dim(v, -2), e.dim(v, -1), e.dim(q, -1)
    scanned: dict[ir.Value, Slices] = {}

    def turn(x: ir.Value, *sizes: Dim) -> ir.Value:
        """The slice `[B, N, *sizes]` of a turn."""
        rows = e.op("Reshape", e.cast(x, ir.DataType.FLOAT), e.vector([batch, -1, heads, *sizes]))
        slices = e.op("Transpose", rows, perm=[1, 0, 2, 3, 4])
        one = placeholder(e, slices, slices.shape and ir.Shape(slices.shape[1:]))
        scanned[one] = Slices(slices)
        return one

    one_q, one_k, one_v = (
        turn(_scaled(h, _spread(h, q, heads)), 1, keys),
        turn(_spread(h, k, heads), 1, keys),
        turn(v, values, 1),
    )
    g = _decay(h, heads, whole=whole) if decays else None
    factor = None if g is None else turn(e.op("Exp", g), 1, e.dim(g, -1))
    beta = turn(_beta(h), 1, 1) if subtracts else None
    if state is None:
        state = e.op("Expand", e.scalar(0, None), e.vector([batch, heads, values, keys]))
    before = placeholder(e, state, state.shape)
    start = len(e.emitted)
    kept = before if factor is None else e.mul(before, factor)
    change = one_v
    if beta is not None:
        change = e.mul(beta, e.sub(one_v, e.op("ReduceSum", e.mul(kept, one_k), e.ints([-1]))))
    after = e.typed(e.add(kept, e.mul(change, one_k)), before)
    y = e.op("ReduceSum", e.mul(after, one_q), e.ints([-1]), keepdims=0)
    y.shape = ir.Shape([None] * 3)
    (last,), (turns,) = emit_loop(e, start, [Carried(state, before, after)], scanned, [(y, Layout())])
    y = e.op("Transpose", turns, perm=[1, 0, 2, 3])
    y = y if whole else e.op("Reshape", y, e.vector([-1, heads, values]))
    return [e.op("CastLike", y, h.required(0)), last]


def _operands(h: Rewriter) -> tuple[bool, list[ir.Value]]:
    """Query, key and value as `[B, S, N, H]` or as `[B S, N, H]`, and whether as the former."""
    e, query, key = h.e, h.required(0), h.operand(1)
    if key is not None:
        return rank_of(h, query) == 4, [query, key, h.required(2)]
    state, whole = h.required(6), rank_of(h, query) == 3
    heads, values, keys = (e.dim(state, axis) for axis in (1, 2, 3))
    last = e.size_mul(heads, values)
    first = e.size_div(e.size_sub(e.dim(query, -1), last), 2)
    parts = e.ops("Split", query, e.vector([first, first, last]), outputs=3, axis=-1)
    forms = (e.size_div(first, keys), keys), (e.size_div(first, keys), keys), (heads, values)
    tokens = [0, 0] if whole else [0]
    return whole, [e.op("Reshape", x, e.vector([*tokens, *form])) for x, form in zip(parts, forms, strict=True)]


def _spread(h: Rewriter, x: ir.Value, heads: Dim) -> ir.Value:
    """Queries or keys, normalized if `qk_l2_norm`, each head for all heads of values that share it."""
    e, own = h.e, h.e.dim(x, -2)
    if h.int("qk_l2_norm", 0):
        x = e.cast(x, ir.DataType.FLOAT)
        x = e.div(x, e.op("Sqrt", e.add(e.op("ReduceSum", e.square(x), e.ints([-1])), 1e-12)))
    if own == heads:
        return x
    which = e.op("Div", e.arange(heads), e.vector([e.size_div(heads, own)]))
    return e.gather(x, which, axis=rank_of(h, x) - 2)


def _scaled(h: Rewriter, q: ir.Value) -> ir.Value:
    """Queries times the scale: by default, which is written as 0, one over the root of their size."""
    e, size = h.e, h.e.dim(q, -1)
    q = e.cast(q, ir.DataType.FLOAT)
    scale = h.float("scale", 0.0) or (1 / math.sqrt(size) if isinstance(size, int) else 0.0)
    return e.mul(q, scale) if scale else e.div(q, e.op("Sqrt", e.cast(e.vector([size]), ir.DataType.FLOAT)))


def _beta(h: Rewriter) -> ir.Value:
    beta = h.e.cast(h.required(5), ir.DataType.FLOAT)
    return h.e.op("Sigmoid", beta) if h.string("beta_activation", "none") == "sigmoid" else beta


def _decay(h: Rewriter, heads: Dim, *, whole: bool) -> ir.Value:
    """The logarithm g `[..., N, 1 or K]` of the decay, by `gate_activation`."""
    e, kind = h.e, h.string("gate_activation", "none")
    decay = e.cast(h.required(4), ir.DataType.FLOAT)
    decay = decay if rank_of(h, decay) == 3 + whole else e.unsqueeze(decay, [-1])
    if kind == "none":
        return decay
    if kind not in ("softplus", "qwen", "sigmoid", "kda"):
        raise UnsupportedCase(f"its gate_activation is {kind!r}")
    rate = e.op("Exp", e.reshape(h.required(7), [heads, 1]))
    shifted = e.add(decay, e.reshape(h.required(8), [heads, -1]))
    if kind in ("softplus", "qwen"):
        return e.op("Neg", e.mul(rate, e.op("Softplus", shifted)))
    return e.mul(e.op("Sigmoid", e.mul(rate, shifted)), h.float("gate_lower_bound", -5.0))
