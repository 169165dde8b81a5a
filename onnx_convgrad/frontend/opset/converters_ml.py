"""Write linear models of ai.onnx.ml with Gemm, so that their coefficients and intercepts are parameters.

Rows are samples and columns are features; a vector is one sample. The kernels take any type of number and return float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.rewriter import Rewriter, is_used
from onnx_convgrad.ir.post_transform import TRANSFORMS, transformed


def linear_regressor(h: Rewriter) -> ir.Value | None:
    """Gemm(X, coefficients, intercepts), and a Sigmoid or Softmax of it

    The kernel transforms several targets, but not one.
    """
    count, kind = h.int("targets", 1), h.string("post_transform", "NONE")
    if kind not in TRANSFORMS:
        return None
    scores = _affine(h, count)
    return transformed(h.e, scores, kind) if count > 1 else scores


def linear_classifier(h: Rewriter) -> Sequence[ir.Value | None] | None:
    """Gemm(X, coefficients, intercepts), a Sigmoid or Softmax of it, and the label of the largest score

    One score r makes two: 1 - r and r, or the sigmoids of -r and r; a positive one has the second label.
    """
    e, count, kind = h.e, max(_numbers(h, "intercepts").size, 1), h.string("post_transform", "NONE")
    if kind not in TRANSFORMS:
        return None
    scores = _affine(h, count)
    label = _labels(h, scores, count) if is_used(h.node.outputs[0]) else None
    if count > 1:
        return [label, transformed(h.e, scores, kind)]
    if kind == "LOGISTIC":
        return [label, e.op("Sigmoid", e.concat([e.neg(scores), scores], -1))]
    return [label, e.concat([e.sub(1, scores), scores], -1)]


def _affine(h: Rewriter, count: int) -> ir.Value:
    """Scores x w' + b of `count` targets: [samples, count]."""
    e, weights, bias = h.e, _numbers(h, "coefficients"), _numbers(h, "intercepts")
    if count < 1 or not weights.size or weights.size % count:
        raise UnsupportedCase(f"it has {weights.size} coefficients for {count} targets")
    weights = weights.reshape(count, -1)
    x = e.cast(h.required(0), ir.DataType.FLOAT)
    if x.shape is None or len(x.shape) != 2:  # a vector is one sample
        x = e.reshape(x, [-1, weights.shape[1]])
    return e.op(
        "Gemm", x, h.stored("coefficients", weights), h.stored("intercepts", bias) if bias.size else None, transB=1
    )


def _numbers(h: Rewriter, name: str) -> np.ndarray:
    return np.asarray(h.attributes().get(name, ()), np.float32)


def _labels(h: Rewriter, scores: ir.Value, count: int) -> ir.Value:
    """The label of each sample: the class of its largest score, or of the sign of its only one."""
    e = h.e
    kind = "classlabels_strings" if "classlabels_strings" in h.node.attributes else "classlabels_ints"
    classes = list(h.attributes().get(kind, ()))
    if len(classes) != max(count, 2):
        raise UnsupportedCase(f"it has {len(classes)} labels for {max(count, 2)} classes")
    if count > 1:
        place = e.op("ArgMax", scores, axis=1, keepdims=0)
    else:
        place = e.cast(e.squeeze(e.compare("Greater", scores, 0), [1]), ir.DataType.INT64)
    return e.op(
        "Gather", h.stored(kind, classes) if kind.endswith("strings") else e.const(np.array(classes, np.int64)), place
    )
