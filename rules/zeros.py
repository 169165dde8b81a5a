"""Operators without a derivative to pass on.

`zero`: the results are integers, booleans, strings or shapes, are random draws, or are constant between jumps. A step
is flat almost everywhere, so zero is its derivative and no convention.
"""

from __future__ import annotations

from onnx_convgrad.autodiff.registry import not_differentiable, zero

# Piecewise constant.
zero("Ceil", "Floor", "Round", "Sign")

# Boolean results.
zero("And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor")
zero("OptionalHasElement", "RegexFullMatch")

# Integers, indices and shapes.
zero("ArgMax", "ArgMin", "NonMaxSuppression", "NonZero", "SequenceLength", "Shape", "Size")
zero("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor")

# Quantized results. The scales that QuantizeLinear divides by act only through an integer.
zero("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "QuantizeLinear")

# Constants, and tensors of which only the shape is read.
zero("BlackmanWindow", "Constant", "ConstantOfShape", "EyeLike", "HammingWindow", "HannWindow", "MelWeightMatrix")

# Random draws: they depend on the shape of the operand, or on a probability that only moves the odds of a jump.
zero("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")

# Strings and bytes.
zero("ImageDecoder", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer")

not_differentiable("Unique", reason="the number of its results depends on which values are equal.")
