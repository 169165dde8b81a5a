"""Attention with rows that are masked everywhere, and FlexAttention of ai.onnx.preview.

The graphs in the attributes of the latter may change scores and probabilities.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import known
from onnx_convgrad.ir.loop_bodies import emit_once

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
    """Y = prob_mod(softmax(score_mod(scale Q K'))) V, where groups of heads of Q share the heads of K and V."""
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
