"""The attribute `post_transform` of classifiers and regressors of ai.onnx.ml."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")
"""Its values that have derivatives: all but PROBIT."""

_LEAST_SCORE = 1e-7
"""Largest magnitude of a score that SOFTMAX_ZERO takes for 0."""


def transformed(e: Emitter, scores: ir.Value, kind: str) -> ir.Value:
    """Several scores `[samples, scores]` after one of `TRANSFORMS`."""
    if kind == "LOGISTIC":
        return e.op("Sigmoid", scores)
    if kind == "SOFTMAX_ZERO":  # scores of 0 stay 0
        scores = e.where(e.compare("Greater", e.op("Abs", scores), _LEAST_SCORE), scores, -1e30)
    return scores if kind == "NONE" else e.op("Softmax", scores, axis=-1)
