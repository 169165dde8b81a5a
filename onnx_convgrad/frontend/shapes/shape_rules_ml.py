"""Shapes and types of results of ai.onnx.ml, for which ONNX has no inference: tables of samples by features."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import static_product


def _array_feature_extractor(context: ShapeInferenceContext, node: ir.Node) -> None:
    """The rule of ai.onnx.ml's ArrayFeatureExtractor, which makes a row of a vector."""
    x, indices = node.inputs
    if x is None or x.shape is None:
        return
    known = None if indices is None or indices.shape is None else static_product(indices.shape.dims)
    count = context.new_symbolic_dim() if known is None else known
    context.set_shape_and_dtype(node.outputs[0], ir.Shape([*(list(x.shape)[:-1] or [1]), count]), x.dtype)


def _like_operand(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Scaler and Normalizer return float32, Imputer the type of its operand."""
    x = node.inputs[0]
    if x is not None and x.shape is not None:
        dtype = x.dtype if node.op_type == "Imputer" else ir.DataType.FLOAT
        context.set_shape_and_dtype(node.outputs[0], ir.Shape(list(x.shape)), dtype)


def _columns(count: Callable[[Call], int]) -> Callable[[ShapeInferenceContext, ir.Node], None]:
    """The rule of an operator whose last result has `count` columns, and a row for each sample."""

    def infer(context: ShapeInferenceContext, node: ir.Node) -> None:
        x = node.inputs[0]
        if x is None or x.shape is None or not x.shape:
            return
        rows = x.shape[0] if len(x.shape) > 1 else 1
        context.set_shape_and_dtype(node.outputs[-1], ir.Shape([rows, count(Call(node))]), ir.DataType.FLOAT)

    return infer


def _classes(n: Call) -> int:
    """Number of scores of a classifier; one row of coefficients makes two."""
    return max(len(n.attributes().get("intercepts", ())), 2)


def _pairs(n: Call) -> int:
    """Number of scores of a classifier by support vectors: of two classes or with probabilities one each, else of pairs."""
    classes = len(n.ints("vectors_per_class") or ()) or _classes(n)
    return classes if classes == 2 or n.attributes().get("prob_a") else math.comb(classes, 2)


def _classifier(context: ShapeInferenceContext, node: ir.Node) -> None:
    """One label for each sample, besides the scores."""
    _columns(_classes if node.op_type == "LinearClassifier" else _pairs)(context, node)
    scores = node.outputs[-1].shape
    if scores is not None:
        dtype = ir.DataType.STRING if "classlabels_strings" in node.attributes else ir.DataType.INT64
        context.set_shape_and_dtype(node.outputs[0], ir.Shape([scores[0]]), dtype)


RULES = {
    "ArrayFeatureExtractor": _array_feature_extractor,
    "Scaler": _like_operand,
    "Normalizer": _like_operand,
    "Imputer": _like_operand,
    "FeatureVectorizer": _columns(lambda n: sum(n.ints("inputdimensions") or ())),
    "LinearRegressor": _columns(lambda n: n.int("targets", 1)),
    "LinearClassifier": _classifier,
    "SVMClassifier": _classifier,
    "SVMRegressor": _columns(lambda n: 1),  # noqa: ARG005 - one target
}
