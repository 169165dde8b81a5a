"""Converters of the attention of decoders in ONNX Runtime (com.microsoft): rotary positions, and heads behind a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.converters_attention import attended, hide, in_heads, joined, rank_of, refuse_operands
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Dim

# -- rotary embedding --------------------------------------------------------------------------------------------------


def rotary_embedding(h: Rewriter) -> ir.Value:
    """(a cos - b sin, b cos + a sin) of the halves a, b of the first numbers of each head, or of pairs of numbers"""
    x, places, cos, sin = (h.required(index) for index in range(4))
    _refuse_packed(h)
    e, split = h.e, rank_of(h, x) == 4
    heads = x if split else in_heads(h, x, _head_count(h, x, cos))
    if rank_of(h, places) == 1:  # the place of the first token
        places = e.unsqueeze(e.op("Add", places, e.arange(e.dim(heads, 2))), [0])
    turned = _rotated(h, heads, _looked_up(h, cos, places), _looked_up(h, sin, places), h.int("interleaved", 0))
    return turned if split else joined(h, turned)


def sectioned_rotary_embedding(h: Rewriter) -> ir.Value:
    """RotaryEmbedding where each angle follows one of three places of a token: in time, height or width"""
    x, places, cos, sin = (h.required(index) for index in range(4))
    _refuse_packed(h)
    sections, e, split = h.ints("mrope_section") or (), h.e, rank_of(h, x) == 4
    stream = np.repeat(np.arange(3), sections)
    if h.int("mrope_layout", 0):
        stream = np.zeros_like(stream)
        for at in (1, 2):
            stream[at : 3 * sections[at] : 3] = at
    which = e.const(np.eye(3, dtype=np.float32)[:, None, None, stream.reshape(-1)])  # [3, 1, 1, half]
    heads = x if split else in_heads(h, x, _head_count(h, x, cos))

    def looked_up(cache: ir.Value) -> ir.Value:
        """Of the rows `[3, B, S, half]` at each kind of place the parts that follow it, as `[B, 1, S, half]`."""
        parts = e.mul(e.gather(cache, places, axis=0), e.op("CastLike", which, cache))
        return e.unsqueeze(e.op("ReduceSum", parts, e.ints([0]), keepdims=0), [1])

    turned = _rotated(h, heads, looked_up(cos), looked_up(sin), h.int("interleaved", 0))
    return turned if split else joined(h, turned)


def _refuse_packed(h: Rewriter) -> None:
    if h.int("is_packed_batching", 0):
        raise UnsupportedCase("its sequences are packed without padding (is_packed_batching)")


def _head_count(h: Rewriter, x: ir.Value, cos: ir.Value) -> Dim:
    """The attribute `num_heads`, or as many heads of twice the width of the cache as there are."""
    return h.int("num_heads", 0) or h.e.size_div(h.e.dim(x, 2), h.e.size_mul(h.e.dim(cos, 1), 2))


def _looked_up(h: Rewriter, cache: ir.Value, places: ir.Value) -> ir.Value:
    """The rows of a cache at places `[B, S]`, for all heads: `[B, 1, S, half]`."""
    return h.e.unsqueeze(h.e.gather(cache, places, axis=0), [1])


def _rotated(h: Rewriter, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: int) -> ir.Value:
    """Turn `[B, N, S, H]` by angles, whose cosines and sines are half as many as the numbers that turn."""
    e = h.e
    half = e.dim(cos, 3)
    turning = e.size_mul(half, 2)
    size = e.dim(x, 3)
    first = e.slice(x, [0], [turning], [3]) if size != turning else x
    axis, sizes = (4, [half, 2]) if interleaved else (3, [2, half])
    pairs = e.op("Reshape", first, e.vector([0, 0, 0, *sizes]))
    a, b = (e.squeeze(part, [axis]) for part in e.ops("Split", pairs, outputs=2, axis=axis, num_outputs=2))
    turned = (e.sub(e.mul(a, cos), e.mul(b, sin)), e.add(e.mul(b, cos), e.mul(a, sin)))
    y = e.op("Reshape", e.concat([e.unsqueeze(part, [axis]) for part in turned], axis), e.vector([0, 0, 0, turning]))
    return y if size == turning else e.concat([y, e.slice(x, [turning], [np.iinfo(np.int64).max], [3])], 3)


# -- GroupQueryAttention -----------------------------------------------------------------------------------------------


def group_query_attention(h: Rewriter) -> list[ir.Value | None]:
    """softmax(scale Q K' + bias) V of rotated heads behind those of the cache, under a causal or local mask"""
    refuse_operands(h, k_scale=12, v_scale=13, q_norm_weight=14, k_norm_weight=15, query_seqlens=16)
    if h.int("sliding_window_cache", 0):
        raise UnsupportedCase("its cache slides (sliding_window_cache); GenAI's builder takes windowed_kv_cache=false")
    e, past, (q, k, v) = h.e, (h.operand(3), h.operand(4)), _grouped_heads(h)
    if past[0] is not None and e.dim(past[0], 2) == 0:
        past = (None, None)  # a first call: all keys are new
    rows = e.dim(q, 2)
    total = _total(h) if past[0] is not None else rows
    first = _first_places(h, rows, total) if past[0] is not None else None
    if h.int("do_rotary", 0):
        places = _rotary_places(h, rows, total, first)
        cos, sin = (_looked_up(h, h.required(index), places) for index in (7, 8))
        q, k = (_rotated(h, x, cos, sin, h.int("rotary_interleaved", 0)) for x in (q, k))
    k, v = (_cached(h, *pair, total, first) for pair in zip(past, (k, v), strict=True))
    return [joined(h, _causal(h, q, k, v, total, first)), k, v, None]


def _grouped_heads(h: Rewriter) -> Sequence[ir.Value]:
    """Query, key and value as `[B, N, S, H]`, also if they are packed side by side."""
    counts = [h.int("num_heads", 0), *[h.int("kv_num_heads", 0)] * 2]
    query, key = h.required(0), h.operand(1)
    if key is None:
        size = h.e.size_div(h.e.dim(query, -1), sum(counts))
        sizes = h.e.vector([h.e.size_mul(count, size) for count in counts])
        parts: Sequence[ir.Value] = h.e.ops("Split", query, sizes, outputs=3, axis=-1)
    else:
        parts = query, key, h.required(2)
    return [in_heads(h, x, count) for x, count in zip(parts, counts, strict=True)]


def _total(h: Rewriter) -> Dim:
    """The number of keys, of the longest sequence if they differ."""
    number = constant_of(h.required(6))
    return (
        h.e.cast(h.e.reshape(h.required(6), [1]), ir.DataType.INT64) if number is None else int(number.reshape(-1)[0])
    )


def _first_places(h: Rewriter, rows: Dim, total: Dim) -> ir.Value:
    """The place `[B]` of the first new key of each sequence: 0 if all keys are new."""
    e, number = h.e, h.e.vector
    last = e.cast(e.reshape(h.required(5), [-1]), ir.DataType.INT64)
    behind = e.op("Sub", e.op("Add", last, e.ints([1])), number([rows]))
    return e.op("Where", e.op("Equal", number([total]), number([rows])), e.ints([0]), behind)


def _rotary_places(h: Rewriter, rows: Dim, total: Dim, first: ir.Value | None) -> ir.Value:
    """The places `[B, S]` of new tokens: those given, or consecutive ones.

    Of places given for a first call, the kernel reads one number, which counts for the first token of every sequence.
    """
    e, given = h.e, h.operand(9)
    if given is None:
        start = e.ints([0]) if first is None else e.unsqueeze(first, [1])
    else:
        start = e.slice(e.reshape(given, [-1]), [0], [1], [0])
    places = e.op("Add", e.unsqueeze(e.arange(rows), [0]), start)
    if given is None or first is None:
        return places
    return e.op("Where", e.op("Equal", e.vector([total]), e.vector([rows])), places, given)


def _cached(h: Rewriter, past: ir.Value | None, new: ir.Value, total: Dim, first: ir.Value | None) -> ir.Value:
    """Keys or values of earlier calls, then the new ones from `first` on, then zeros."""
    if past is None or first is None:
        return new
    e, room = h.e, h.e.dim(past, 2)
    size = e.size_max(room, total)
    places = e.op("Add", e.arange(e.dim(new, 2)), e.unsqueeze(first, [1]))
    kept = e.op("Less", e.arange(size), e.unsqueeze(first, [1]))
    kept.dtype = ir.DataType.BOOL
    cache = e.pad(past, [0], [e.size_sub(size, room)], [2])
    earlier = e.where(e.unsqueeze(kept, [1, 3]), cache, 0)
    at = e.op("Expand", e.unsqueeze(places, [1, 3]), e.op("Shape", new))
    return e.op("ScatterElements", earlier, at, new, axis=2)


def _causal(h: Rewriter, q: ir.Value, k: ir.Value, v: ir.Value, total: Dim, first: ir.Value | None) -> ir.Value:
    """Attention where a query sees the keys up to its own place, or the last of them (`local_window_size`).

    With `causal=0`, and from behind the end of its sequence, it sees all keys of the sequence.
    """
    e, cap, window = h.e, h.float("softcap", 0.0), h.int("local_window_size", -1)
    sink, bias = h.operand(11), h.operand(10)
    smooth = sink is not None or h.int("smooth_softmax", 0) == 1
    if first is not None:
        k, v = (e.slice(x, [0], [total], [2]) for x in (k, v))
    own = e.reshape(e.arange(e.dim(q, 2)), [-1, 1])
    own = own if first is None else e.op("Add", own, e.reshape(first, [-1, 1, 1, 1]))
    ends = e.cast(e.reshape(h.required(5), [-1, 1, 1, 1]), ir.DataType.INT64)
    keys, last = e.arange(total), e.op("Min", own, ends) if h.int("causal", 1) else ends

    def change(scores: ir.Value) -> ir.Value:
        scores = e.cast(scores, ir.DataType.FLOAT)
        scores = e.mul(e.op("Tanh", e.div(scores, cap)), cap) if cap > 0 else scores
        scores = scores if bias is None else e.add(scores, e.cast(bias, ir.DataType.FLOAT))
        scores = hide(h, scores, e.op("Greater", keys, last))
        if window > 0:
            scores = hide(h, scores, e.op("LessOrEqual", keys, e.op("Sub", own, e.ints([window]))))
        return e.concat([scores, _sink_column(h, sink, scores)], 3) if smooth else scores

    return attended(h, q, k, v, change, (lambda shares: e.slice(shares, [0], [-1], [3])) if smooth else None)


def _sink_column(h: Rewriter, sink: ir.Value | None, scores: ir.Value) -> ir.Value:
    """A score that takes its share of each query and belongs to no key: a number of each head, by default 0."""
    number = h.e.const(np.zeros(1, np.float32)) if sink is None else h.e.cast(sink, ir.DataType.FLOAT)
    sizes = h.e.concat([h.e.op("Shape", scores, start=0, end=3), h.e.ints([1])], 0)
    return h.e.op("Expand", h.e.reshape(number, [1, -1, 1, 1]), sizes)
