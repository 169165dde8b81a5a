"""Operators with derivative zero.

The results of a `zero` operator are integers, booleans, strings, shapes or random, or are piecewise constant: the derivative
of a step is zero almost everywhere.
"""

from __future__ import annotations

from onnx_convgrad.autodiff.registry import zero

# Piecewise constant.
zero("Ceil", "Floor", "Round", "Sign")

# Boolean results.
zero("And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor")
zero("OptionalHasElement", "RegexFullMatch")

# Integers, indices and shapes.
zero("ArgMax", "ArgMin", "NonMaxSuppression", "NonZero", "SequenceLength", "Shape", "Size")
zero("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor")

# Quantized results: QuantizeLinear rounds the quotient by its scale to an integer. Derivatives that do not stop there pass
# through the operator StraightThrough of `rules.quantize`.
zero("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "QuantizeLinear")

# Constants, and functions of the shape alone.
zero("BlackmanWindow", "Constant", "ConstantOfShape", "EyeLike", "HammingWindow", "HannWindow", "MelWeightMatrix")

# Random numbers: piecewise constant functions of a probability, or functions of the shape alone.
zero("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")

# Strings and bytes.
zero("ImageDecoder", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer")

# Labels, categories and decision trees of ai.onnx.ml: piecewise constant.
zero(*(f"ai.onnx.ml::{op}" for op in ("Binarizer", "CategoryMapper", "LabelEncoder", "OneHotEncoder")))
zero(*(f"ai.onnx.ml::{op}" for op in ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")))
