"""Operators with derivative zero.

The results of a `zero` operator are integers, booleans, strings, shapes or random, or are piecewise constant: the derivative
of a step is zero almost everywhere.
"""

from __future__ import annotations

from onnx_convgrad.autodiff.factors import every_axis, first_operand, mix, none, notation, shape_alone
from onnx_convgrad.autodiff.registry import zero

# Piecewise constant.
zero("Ceil", "Floor", "Round", "Sign", factors=every_axis)

# Boolean results.
zero("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Or", "Xor", factors=every_axis)
zero("IsInf", "IsNaN", "Not", factors=every_axis)
zero("OptionalHasElement", factors=none("its operand is optional"))
zero("RegexFullMatch", factors=every_axis)

# Integers, indices and shapes.
zero("Shape", "Size", factors=shape_alone)
zero("NonMaxSuppression", "NonZero", factors=none("the size of its result depends on its operands"))
zero("SequenceLength", factors=none("its operand is a sequence"))
zero("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", factors=every_axis)

# Quantized results: QuantizeLinear, in `rules.quantize`, rounds the quotient by its scale to an integer. Derivatives that do
# not stop there pass through the operator StraightThrough.
_INTEGERS = none("it computes with integers, and the converter replaces it")
zero("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", factors=_INTEGERS)

# Constants, and functions of the shape alone.
_BY_SIZES = none("it makes its result from sizes")
zero("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", factors=_BY_SIZES)
zero("Constant", "ConstantOfShape", factors=_BY_SIZES)
zero("EyeLike", factors=shape_alone)

# Random numbers: piecewise constant functions of a probability, or functions of the shape alone.
zero("Bernoulli", "RandomNormalLike", "RandomUniformLike", factors=first_operand)
zero("Multinomial", factors=notation("n c -> n i", c=mix("draws from")))
zero("RandomNormal", "RandomUniform", factors=_BY_SIZES)

# Strings and bytes.
zero("ImageDecoder", "TfIdfVectorizer", "StringNormalizer", "StringSplit", factors=none("its operand is not a number"))
zero("StringConcat", factors=every_axis)

# Labels, categories and decision trees of ai.onnx.ml: piecewise constant.
zero(*(f"ai.onnx.ml::{op}" for op in ("Binarizer", "CategoryMapper", "LabelEncoder")), factors=every_axis)
zero("ai.onnx.ml::OneHotEncoder", factors=notation("*i -> *i d", d=mix("has a place for each category along")))
_TREES = ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")
_SCORES = notation("n f -> n k", f=mix("decides by"), k=mix("has scores along"))
zero(*(f"ai.onnx.ml::{op}" for op in _TREES), factors=_SCORES)
