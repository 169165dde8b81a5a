"""Converters of layers over sequences: attention, recurrent layers, and the Scan of opset 8 over a batch."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.loop_bodies import Layout, Slices, emit_loop, emit_once, placeholder

PREVIEW_DOMAIN = "ai.onnx.preview"


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


def flex_attention(h: Rewriter) -> ir.Value:
    """Y = prob_mod(softmax(score_mod(scale Q K'))) V, where groups of heads of Q share the heads of K and V.

    The graphs in the attributes `score_mod` and `prob_mod` change scores and probabilities.
    """
    e, (q, k, v) = h.e, (h.required(index) for index in range(3))
    dtype = h.dtype(q, k, v, h.y)
    if dtype is None:
        raise UnsupportedCase("its element type is not known")
    default = ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    precision = h.element_type("softmax_precision", int(default))
    keys, values = (_repeated(h, q, operand) for operand in (k, v))
    products = e.matmul(_scaled(h, q), e.op("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = _modified(h, "score_mod", e.cast(products, precision))
    shares = _modified(h, "prob_mod", e.op("Softmax", scores, axis=-1))
    return e.matmul(e.cast(shares, dtype), values)


def _scaled(h: Rewriter, q: ir.Value) -> ir.Value:
    """Q times the scale, by default one over the root of the size of a head."""
    e, size = h.e, None if q.shape is None else known(q.shape[-1])
    if size or "scale" in h.node.attributes:
        return e.mul(q, h.float("scale", 1 / math.sqrt(size or 1)))
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


_SWAPPED = (1, 0, 2)
_RESULTS = ((2, 0, 1, 3), _SWAPPED, _SWAPPED)
"""The order of the axes of Y, Y_h and Y_c with the batch first, among those with the sequence first."""


def batch_first(h: Rewriter) -> None:
    """LSTM, GRU and RNN with `layout=1`: transpose X, the initial states and the results."""
    if not h.int("layout", 0):
        return
    h.drop("layout")
    inputs = list(h.node.inputs)
    for index in (0, 5, 6):  # X, initial_h, initial_c
        value = h.operand(index)
        if value is not None:
            inputs[index] = h.e.op("Transpose", value, perm=_SWAPPED)
    h.set_inputs(*inputs)
    for result, perm in zip(h.node.outputs, _RESULTS, strict=False):
        if result.name:
            h.append(result, "Transpose", perm=perm)
            if result.shape is not None:
                result.shape = ir.Shape([result.shape[perm.index(axis)] for axis in range(len(perm))])


def scan_over_batch(h: Rewriter) -> list[ir.Value]:
    """The Scan of opset 8, which runs over the sequences of a batch, as a Scan over the batch of Scans over one sequence.

    With sequence lengths, each sample scans its first rows, and the joined results are padded with zeros. The states and
    sequences have a leading batch axis, which the body does not see.
    """
    e, lengths, operands = h.e, h.operand(0), [h.required(index) for index in range(1, len(h.node.inputs))]
    body, count = h.node.attributes["body"].as_graph(), h.int("num_scan_inputs", 0)
    states, start = len(operands) - count, len(e.emitted)
    if not 0 < count <= len(operands):
        raise UnsupportedCase(f"it has {count} sequences among {len(operands)} operands")
    of_sample = {
        placeholder(e, v, None if v.shape is None else ir.Shape(v.shape[1:])): Slices(v)
        for v in (*operands, *([] if lengths is None else [lengths]))
    }
    samples = list(of_sample)
    limit = None if lengths is None else e.op("Reshape", samples[-1], e.ints([1]))
    rows = samples[states : len(operands)]
    if limit is not None:
        rows = [e.op("Slice", v, e.ints([0]), limit, e.ints([0])) for v in rows]
    directions = h.ints("directions") or (0,) * count
    results = list(
        e.ops(
            "Scan", *samples[:states], *rows, outputs=len(h.node.outputs), body=body, num_scan_inputs=count,
            scan_input_directions=directions,
        )
    )  # fmt: skip
    for place, (result, inner) in enumerate(zip(results, body.outputs, strict=False)):
        e.typed(result, inner)
        if place >= states:
            result.shape = None if inner.shape is None else ir.Shape([None, *inner.shape])
            if limit is not None:
                missing = e.op("Sub", e.op("Shape", samples[states], start=0, end=1), limit)
                results[place] = _padded(e, result, missing)
    return emit_loop(e, start, [], of_sample, [(result, Layout()) for result in results])[1]


def _padded(e: Emitter, value: ir.Value, missing: ir.Value) -> ir.Value:
    """Append `missing` rows of zeros along the first axis."""
    if value.shape is None:
        raise UnsupportedCase("the rank of a result of its body is not known, to which zeros are added")
    return e.typed(e.pad(value, [0], [missing], [0]), value)
