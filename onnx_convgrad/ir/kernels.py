"""The kernels of ONNX Runtime's execution providers, as measured: what targets lack follows from these tables alone.

CUDA: for a model of one node per operator and type, onnxruntime-gpu 1.31.1 reported the provider of the node
(`get_provider_graph_assignment_info`). That is where a node is placed; its kernel was not run. `docs/OperatorKernels.md` in
the sources of ONNX Runtime lists the kernels of its development branch.

WebGPU: onnxruntime-webgpu 1.27.0 on a graphics processor in software (SwiftShader) refused models of one node with
`session.disable_cpu_ep_fallback`. It has no kernels for int64 and float64 at all, other than for indices, and few for bool.
"""

from __future__ import annotations

import onnx

# -- CPU ---------------------------------------------------------------------------------------------------------------

CPU_ALL_TYPES = frozenset(
    "Cast Concat Constant ConstantOfShape Flatten Gather Identity If Loop Optional OptionalGetElement OptionalHasElement"
    " Reshape Scan Shape Size SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength"
    " Squeeze Transpose Unsqueeze".split()
)
"""Operators with kernels for all element types, bfloat16 among them."""

CPU_WITHOUT_FLOAT64 = tuple(
    "Elu HardSigmoid HardSwish LeakyRelu Mish PRelu Selu Softplus Softsign ThresholdedRelu".split()
)
"""Functions without a float64 kernel."""

# -- CUDA --------------------------------------------------------------------------------------------------------------

CUDA_LAST_OPSET = 21
"""Newest opset for which the whole table holds; see quirks.CUDA_OPSET."""

_FLOATS = "float float16 double"
_NARROW = "float float16 bfloat16 double"
_NUMBERS = "float float16 bfloat16 double int64 int32 uint8 int8"
CUDA_ALL_TYPES = f"{_NUMBERS} bool"
"""Names of the element types in the table."""

_KERNELS = {
    CUDA_ALL_TYPES: "Cast Concat ConstantOfShape Expand Flatten Gather GatherElements Identity Reshape ScatterElements "
    "ScatterND Shape Size Slice Split Squeeze Transpose Trilu Unsqueeze",
    _NUMBERS: "Abs Add Div Mul Sign Sub",
    f"{_NARROW} int64 int32": "Max Min Mod Pow ReduceSum Tile",
    f"{_NARROW} int64 int32 int8": "Neg",
    f"{_NARROW} int64 int32 uint8 bool": "Where",
    f"{_NARROW} int64 bool": "GatherND",
    f"{_NARROW} int32": "ReduceMean",
    f"{_NARROW} bool": "Dropout",
    _NARROW: "Erf Exp Gelu Gemm IsInf IsNaN LayerNormalization MatMul Relu Sigmoid Softmax Sqrt Sum Tanh",
    _FLOATS: "ArgMax ArgMin AveragePool BatchNormalization Ceil Conv ConvTranspose Cos DeformConv DepthToSpace Einsum Elu "
    "Floor GlobalAveragePool GlobalMaxPool HardSigmoid HardSwish InstanceNormalization LRN LSTM LeakyRelu Log LogSoftmax "
    "PRelu RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike Reciprocal ReduceLogSum ReduceLogSumExp "
    "ReduceSumSquare Round Selu Sin Softplus Softsign SpaceToDepth ThresholdedRelu",
    f"{_FLOATS} int64 int32 bool": "Equal Greater GreaterOrEqual Less LessOrEqual",
    f"{_FLOATS} int64 int32 uint8 int8 bool": "Compress ReverseSequence",
    f"{_FLOATS} int64 int32 uint8 int8": "ReduceMax ReduceMin Shrink TopK",
    f"{_FLOATS} int64 int32": "CumSum",
    f"{_FLOATS} int64 uint8 int8": "Clip MaxPool",
    f"{_FLOATS} int64": "RoiAlign",
    f"{_FLOATS} int32 uint8": "Resize",
    f"{_FLOATS} int32": "ReduceL1 ReduceL2 ReduceProd",
    f"{_FLOATS} bool": "Pad",
    "float double int64 int32": "EyeLike Range",
    "float float16 int64 int32 uint8 bool": "NonZero",
    "float float16 int64": "OneHot",
    "float float16": "LpNormalization QuantizeLinear",
    "float": "GridSample",
    "uint8 int8": "DequantizeLinear",
    "bool": "And Not Or Xor",
}

CUDA_INLINED = frozenset(
    "Bernoulli CastLike GroupNormalization Mish NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss".split()
)
"""Operators without a kernel that ONNX Runtime expands to others, which it runs on the GPU."""

CUDA_TYPES = {op: frozenset(types.split()) for types, ops in _KERNELS.items() for op in ops.split()}
"""Operator of ai.onnx -> the element types for which CUDA has a kernel."""

CUDA_TYPED_BY_RESULT = frozenset(
    "Constant ConstantOfShape EyeLike RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range".split()
)
"""Operators whose types in the table are those of the result, not of an operand."""

_ANYWHERE = frozenset("Constant If Loop Scan".split())
"""Operators that ONNX Runtime itself carries out."""

CUDA_MISSING = frozenset(s.name for s in onnx.defs.get_all_schemas() if not s.domain) - {
    *CUDA_TYPES,
    *CUDA_INLINED,
    *_ANYWHERE,
}
"""Operators of ai.onnx that CUDA leaves to the CPU."""

# -- WebGPU ------------------------------------------------------------------------------------------------------------

WEBGPU_MISSING = frozenset(
    "AveragePool Bernoulli BitShift Col2Im Compress ConstantOfShape DeformConv Det Dropout EyeLike GridSample"
    " GroupNormalization Hardmax IsInf IsNaN LRN LogSoftmax LpNormalization LpPool Max MaxRoiPool MaxUnpool Mean Min Mod"
    " Multinomial NonMaxSuppression NonZero OneHot Or PRelu RandomNormal RandomNormalLike RandomUniform RandomUniformLike"
    " ReverseSequence RoiAlign Round Scan Selu Sign Size Softsign SpaceToDepth Sum Trilu Unique Xor".split()
)
"""Operators of ai.onnx without a kernel."""
