"""Converters of attention: masks of Attention, FlexAttention, and the attention of ONNX Runtime (com.microsoft).

Letters in formulas are sizes: batch B, heads N, positions of queries S and of keys T, numbers in a head H.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.converters_quantized import real
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Dim, known
from onnx_convgrad.ir.loop_bodies import emit_once

PREVIEW_DOMAIN = "ai.onnx.preview"

Change = Callable[[ir.Value], ir.Value]


def masked_rows(h: Rewriter) -> None:
    """Mask by minus infinity in place of the lowest finite number.

    ONNX Runtime gives zeros for a row that is masked by either, the body that the standard gives Attention only for minus
    infinity. In other rows the share of both is 0.
    """
    mask = h.operand(3)
    if mask is None or mask.dtype is None or not mask.dtype.is_floating_point():
        return
    lowest, known_mask = float(mask.dtype.min), constant_of(mask)
    if known_mask is not None and not (known_mask == lowest).any():
        return
    hidden = h.e.op("Equal", mask, h.e.const(lowest, mask.dtype))
    h.node.replace_input_with(3, h.e.op("Where", hidden, h.e.const(-np.inf, mask.dtype), mask))


# -- one attention -----------------------------------------------------------------------------------------------------


def attended(
    h: Rewriter, q: ir.Value, k: ir.Value, v: ir.Value, change: Change, share: Change | None = None
) -> ir.Value:
    """share(softmax(change(scale Q K'))) V: Q `[B, N, S, H]`; K and V may have fewer heads, which groups of heads share."""
    e, dtype = h.e, h.dtype(q, k, v, h.y)
    if dtype is None:
        raise UnsupportedCase("its element type is not known")
    scores = change(e.matmul(_scaled(h, q), e.op("Transpose", _repeated(h, q, k), perm=[0, 1, 3, 2])))
    shares = e.op("Softmax", scores, axis=-1)
    return e.matmul(e.cast(share(shares) if share else shares, dtype), _repeated(h, q, v))


def _scaled(h: Rewriter, q: ir.Value) -> ir.Value:
    """Q times the scale; by default, which ONNX Runtime writes as 0, one over the root of the size of a head."""
    e, size = h.e, None if q.shape is None else known(q.shape[-1])
    scale = h.float("scale", 0.0) or (1 / math.sqrt(size) if size else 0.0)
    if scale:
        return e.mul(q, scale)
    root = e.op("Sqrt", e.cast(e.op("Shape", q, start=3, end=4), ir.DataType.FLOAT))
    return e.div(q, e.op("CastLike", root, q))


def _repeated(h: Rewriter, q: ir.Value, kv: ir.Value) -> ir.Value:
    """K or V with each head repeated for the heads of Q that share it."""
    e, every, (batch, own) = h.e, h.e.dim(q, 1), (h.e.dim(kv, axis) for axis in (0, 1))
    if every == own:
        return kv
    rest = e.op("Shape", kv, start=2)
    wide = e.op("Concat", e.vector([batch, own, e.size_div(every, own)]), rest, axis=0)
    expanded = e.op("Expand", e.unsqueeze(kv, [2]), wide)
    return e.op("Reshape", expanded, e.op("Concat", e.vector([batch, every]), rest, axis=0), allowzero=1)


def in_heads(h: Rewriter, x: ir.Value, count: Dim) -> ir.Value:
    """`[B, S, N H]` as `[B, N, S, H]`."""
    sizes = h.e.vector([0, 0, count, h.e.size_div(h.e.dim(x, -1), count)])  # 0: as it is
    return h.e.op("Transpose", h.e.op("Reshape", x, sizes), perm=[0, 2, 1, 3])


def joined(h: Rewriter, x: ir.Value) -> ir.Value:
    """`[B, N, S, H]` as `[B, S, N H]`."""
    e, width = h.e, h.e.size_mul(h.e.dim(x, 1), h.e.dim(x, 3))
    return e.op("Reshape", e.op("Transpose", x, perm=[0, 2, 1, 3]), e.vector([0, 0, width]))


def _appended(h: Rewriter, past: ir.Value | None, new: ir.Value) -> ir.Value:
    return new if past is None else h.e.concat([past, new], 2)


def rank_of(h: Rewriter, value: ir.Value) -> int:
    """The number of axes of an operand, which a replacement needs."""
    return h.e.rank(value, "its replacement by plain operators")


def refuse_operands(h: Rewriter, **places: int) -> None:
    """Refuse operands that have no plain form; an underscore in a name is a space."""
    for name, place in places.items():
        if h.operand(place) is not None:
            raise UnsupportedCase(f"its operand {name} (input {place}) has no equivalent")


# -- FlexAttention -----------------------------------------------------------------------------------------------------


def flex_attention(h: Rewriter) -> ir.Value:
    """prob_mod(softmax(score_mod(scale Q K'))) V, where groups of heads of Q share the heads of K and V.

    The graphs in the attributes `score_mod` and `prob_mod` change scores and probabilities.
    """
    q, k, v = (h.required(index) for index in range(3))
    default = ir.DataType.DOUBLE if h.dtype(q, k, v, h.y) == ir.DataType.DOUBLE else ir.DataType.FLOAT
    precision = h.element_type("softmax_precision", int(default))
    return attended(
        h,
        *(q, k, v),
        lambda products: _modified(h, "score_mod", h.e.cast(products, precision)),
        lambda shares: _modified(h, "prob_mod", shares),
    )


def _modified(h: Rewriter, name: str, value: ir.Value) -> ir.Value:
    """The result of the graph in an attribute, or the value itself if there is none."""
    attribute = h.node.attributes.get(name)
    if attribute is None:
        return value
    body = attribute.as_graph()
    if len(body.inputs) != 1 or len(body.outputs) != 1:
        raise UnsupportedCase(
            f"its {name} has {len(body.inputs)} inputs and {len(body.outputs)} results, not one of each"
        )
    return emit_once(h.e, body, [value])[0]


# -- Attention, QAttention, MultiHeadAttention -------------------------------------------------------------------------


def packed_attention(h: Rewriter) -> list[ir.Value]:
    """softmax(scale Q K' + mask) V with Q, K, V = Split(MatMul(input, weights) + bias)"""
    refuse_operands(h, past_sequence_length=6)
    product, bias = h.e.matmul(h.required(0), h.required(1)), h.operand(2)
    projected = product if bias is None else h.e.add(product, bias)
    return _self_attention(h, projected, h.operand(3), h.operand(4), h.operand(5))


def quantized_attention(h: Rewriter) -> list[ir.Value]:
    """Attention of DequantizeLinear of input and weights"""
    product = h.e.matmul(real(h, 0, 3, 6), real(h, 1, 4, 7, axis=1))
    return _self_attention(h, h.e.add(product, h.required(2)), h.operand(5), h.operand(8), None)


def _self_attention(
    h: Rewriter, projected: ir.Value, mask: ir.Value | None, past: ir.Value | None, bias: ir.Value | None
) -> list[ir.Value]:
    """Attention of Q, K and V side by side; the past and the present are `[2, B, N, T, H]`, keys first."""
    for name in ("do_rotary", "past_present_share_buffer"):
        if h.int(name, 0):
            raise UnsupportedCase(f"its attribute {name} is {h.int(name, 0)}, which ONNX Runtime's CPU kernel lacks")
    e, sizes, heads = h.e, h.ints("qkv_hidden_sizes"), h.int("num_heads", 0)
    parts = (
        e.ops("Split", projected, e.ints(sizes), outputs=3, axis=-1)
        if sizes
        else e.ops("Split", projected, outputs=3, axis=-1, num_outputs=3)
    )
    q, k, v = (in_heads(h, part, heads) for part in parts)
    if past is not None:
        k, v = (_appended(h, e.gather(past, e.const(np.int64(at)), axis=0), new) for at, new in enumerate((k, v)))
    y, _ = _masked_attention(h, q, k, v, mask, bias, has_past=past is not None)
    return [y, e.concat([e.unsqueeze(k, [0]), e.unsqueeze(v, [0])], 0)]


def multi_head_attention(h: Rewriter) -> list[ir.Value | None]:
    """softmax(scale Q K' + mask) V of the heads of query, key and value"""
    refuse_operands(h, past_sequence_length=8, cache_indirection=9)
    q, k, v = _biased(h, _operands_in_heads(h))
    past = h.operand(6), h.operand(7)
    k, v = _appended(h, past[0], k), _appended(h, past[1], v)
    y, scores = _masked_attention(h, q, k, v, h.operand(4), h.operand(5), has_past=past[0] is not None)
    return [y, k, v, scores]


def _operands_in_heads(h: Rewriter) -> list[ir.Value]:
    """Q, K and V as `[B, N, S, H]`, given so, as `[B, S, N H]`, or packed as `[B, S, N, 3 or 2, H]`."""
    heads = h.int("num_heads", 0)
    found: list[ir.Value] = []
    for value in filter(None, (h.operand(place) for place in range(3))):
        if rank_of(h, value) == 5:
            count = 3 - len(found)
            parts = h.e.ops("Split", value, outputs=count, axis=3, num_outputs=count)
            found += [h.e.op("Transpose", h.e.squeeze(part, [3]), perm=[0, 2, 1, 3]) for part in parts]
        else:
            found.append(value if rank_of(h, value) == 4 else in_heads(h, value, heads))
    if len(found) != 3:
        raise UnsupportedCase("its operands are not a query, a key and a value")
    return found


def _biased(h: Rewriter, operands: list[ir.Value]) -> list[ir.Value]:
    """Q, K and V plus their parts of the bias; keys and values of an earlier call have theirs already."""
    e, bias = h.e, h.operand(3)
    if bias is None:
        return operands
    at: Dim = 0
    found = []
    for place, value in enumerate(operands):
        given = h.operand(place)
        if place and given is not None and rank_of(h, given) == 4:
            found.append(value)
            continue
        heads, size = e.dim(value, 1), e.dim(value, 3)
        end = e.size_add(at, e.size_mul(heads, size))
        found.append(e.add(value, e.reshape(e.slice(bias, [at], [end], [0]), [1, heads, 1, size])))
        at = end
    return found


def _masked_attention(
    h: Rewriter, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value | None, bias: ir.Value | None, *, has_past: bool
) -> tuple[ir.Value, ir.Value]:
    """The result `[B, S, N H]` and the scores, with keys hidden by `mask` and, if `unidirectional`, behind the query."""
    e, seen = h.e, []

    def change(scores: ir.Value) -> ir.Value:
        for term in (bias, None if mask is None else _penalty(h, mask, q, k)):
            scores = scores if term is None else e.add(scores, term)
        if h.int("unidirectional", 0):
            first = e.size_sub(e.dim(k, 2), e.dim(q, 2)) if has_past else 0
            scores = hide(h, scores, e.op("Greater", e.arange(e.dim(k, 2)), _positions(h, q, first)))
        seen.append(scores)
        return scores

    y = attended(h, q, k, v, change)
    return joined(h, y), seen[0]


def _positions(h: Rewriter, q: ir.Value, first: Dim) -> ir.Value:
    """The places `[S, 1]` of queries among the keys, of which the first is at `first`."""
    rows = h.e.reshape(h.e.arange(h.e.dim(q, 2)), [-1, 1])
    return rows if first == 0 else h.e.op("Add", rows, h.e.vector([first]))


def hide(h: Rewriter, scores: ir.Value, hidden: ir.Value) -> ir.Value:
    """Give the scores that a condition hides no share: the lowest number takes their place."""
    hidden.dtype = ir.DataType.BOOL
    return h.e.where(hidden, float((scores.dtype or ir.DataType.FLOAT).min), scores)


def _penalty(h: Rewriter, mask: ir.Value, q: ir.Value, k: ir.Value) -> ir.Value:
    """The number `mask_filter_value` for keys that a mask hides, and 0 for others.

    A mask of rank 2 `[B, T]` or 3 `[B, S, T]` is above 0 for visible keys. One of rank 1 holds the end of each sequence,
    and may hold the starts behind the ends.
    """
    e, rank = h.e, rank_of(h, mask)
    if rank > 3 or _holds_offsets(mask, q):
        raise UnsupportedCase("its mask has a form that ONNX Runtime's CPU kernel lacks")
    if rank == 1:
        places, batch = e.arange(e.dim(k, 2)), e.dim(q, 0)
        ends, starts = e.slice(mask, [0], [batch], [0]), e.slice(mask, [batch], [e.size_mul(batch, 2)], [0])
        hidden = e.op("GreaterOrEqual", places, _column(h, ends))
        if e.dim(mask, 0) != batch:
            none = e.op("Expand", e.const(np.int32(0)), e.vector([batch]))
            starts = e.slice(e.concat([starts, none], 0), [0], [batch], [0])
            hidden = e.op("Or", hidden, e.op("Less", places, _column(h, starts)))
    else:
        hidden = e.unsqueeze(e.op("LessOrEqual", mask, e.const(np.int32(0))), [1, 2] if rank == 2 else [1])
    hidden.dtype = ir.DataType.BOOL
    return e.where(hidden, h.float("mask_filter_value", -10000.0), e.scalar(0, q))


def _holds_offsets(mask: ir.Value, q: ir.Value) -> bool:
    """Whether a mask of rank 1 has 3 B + 2 numbers: lengths and offsets of sequences without padding."""
    if mask.shape is None or q.shape is None or len(mask.shape) != 1:
        return False
    count, batch = known(mask.shape[0]), known(q.shape[0])
    return batch is not None and count == 3 * batch + 2


def _column(h: Rewriter, numbers: ir.Value) -> ir.Value:
    """One number for each sample as `[B, 1, 1, 1]`."""
    return h.e.reshape(h.e.cast(numbers, ir.DataType.INT64), [-1, 1, 1, 1])
