"""Faults of other packages that this package works around: versions, symptom, workaround, upstream issue.

Code that works around a fault names it in a comment (`see quirks.PAD_AXES`). `tests/backends/test_quirks.py` reproduces
each one that can be shown with the installed packages, and fails when a fault is gone: then delete the workaround and the
entry. Symptoms are of the CPU provider unless the name says otherwise; versions are those that were tried, from 1.20 on.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["QUIRKS", "Quirk"]


@dataclass(frozen=True, slots=True)
class Quirk:
    """A fault and where it is worked around.

    Attributes:
        name: The name of the constant in this module.
        package: The package at fault, as it is called on PyPI or npm.
        versions: Affected versions as a PEP 440 specifier; empty for all that were tried.
        symptom: The wrong behavior, in a sentence.
        workaround: The module that works around it.
        issue: The upstream report, if there is one.
    """

    name: str
    package: str
    versions: str
    symptom: str
    workaround: str
    issue: str | None = None


_ORT = "https://github.com/microsoft/onnxruntime"

# -- ONNX Runtime: wrong results ---------------------------------------------------------------------------------------

BATCH_NORMALIZATION_IN_PLACE = Quirk(
    "BATCH_NORMALIZATION_IN_PLACE",
    "onnxruntime",
    "",
    "Training-mode BatchNormalization writes running statistics over its operands: stored values are lost, and equal mean "
    "and variance, merged into one value, get the results of each other.",
    "onnx_convgrad.backends.cpu.batch_statistics",
)
COL2IM_AXES = Quirk(
    "COL2IM_AXES",
    "onnxruntime",
    "<1.28",
    "Col2Im adds wrongly unless it is over two axes.",
    "onnx_convgrad.lowering.conv.input_grad",
    f"{_ORT}/issues/18156",
)
EMPTY_SCAN = Quirk(
    "EMPTY_SCAN",
    "onnxruntime",
    "",
    "A Scan over no slices fails when it runs.",
    "onnx_convgrad.autodiff.turns",
)
EXPAND_TO_NOTHING = Quirk(
    "EXPAND_TO_NOTHING",
    "onnxruntime",
    ">=1.32",
    "An Expand of sizes 1 to sizes 0 is removed as if it changed nothing.",
    "onnx_convgrad.backends.runtime_faults",
)
INT8_LEVELS = Quirk(
    "INT8_LEVELS",
    "onnxruntime",
    "",
    "On x86, a DequantizeLinear of int8 with a zero point before a Reshape, Transpose or the like is refused from opset 21 "
    "on, unless the int8 levels are constant: the quantizer that is inserted behind it keeps the type int8 when the zero "
    "point becomes uint8.",
    "onnx_convgrad.backends.runtime_faults",
)
NEGATIVE_STEP_TO_MAX = Quirk(
    "NEGATIVE_STEP_TO_MAX",
    "onnxruntime",
    "",
    "A Slice with a negative step and the end 2^31 - 1 keeps everything up to the first element, where ONNX infers none.",
    "onnx_convgrad.rules.slicing",
)
POOL_BEYOND_PADDING = Quirk(
    "POOL_BEYOND_PADDING",
    "onnxruntime",
    "<1.30",
    "AveragePool that counts padding and rounds the number of windows up also counts rows beyond the padding.",
    "onnx_convgrad.backends.cpu.fast_pools",
    f"{_ORT}/issues/16203",
)
POOL_PADDING_AXES = Quirk(
    "POOL_PADDING_AXES",
    "onnxruntime",
    ">=1.21,<1.25",
    "AveragePool that counts padding takes the end padding of one axis for another's.",
    "onnx_convgrad.rules.pool",
    f"{_ORT}/issues/26708",
)
PAD_TRIMS_ALL = Quirk(
    "PAD_TRIMS_ALL",
    "onnxruntime",
    "<1.24",
    "A Pad whose negative amounts trim a whole axis before it is padded leaves unset memory in the result.",
    "onnx_convgrad.lowering.conv.patches",
)
QUANTIZED_BETA = Quirk(
    "QUANTIZED_BETA",
    "onnxruntime",
    "",
    "The quantizer sets beta of a Gemm to 1 and leaves the bias as it is.",
    "onnx_convgrad.quantization.insert",
)
QUANTIZED_OUTPUT = Quirk(
    "QUANTIZED_OUTPUT",
    "onnxruntime",
    "",
    "The quantizer calibrates an output that only a Relu or Clip reads by the range of that node's result, and so clips it.",
    "onnx_convgrad.quantization.insert",
)
RESIZE_ROUNDING = Quirk(
    "RESIZE_ROUNDING",
    "onnxruntime",
    "",
    "Resize by scales computes sizes in float32, ONNX infers them in float64: 12 * 0.58333333 is 7 and 6.",
    "onnx_convgrad.backends.runtime_faults",
    "https://github.com/onnx/onnx/issues/4919",
)
SCATTER_ND_ADD = Quirk(
    "SCATTER_ND_ADD",
    "onnxruntime",
    "",
    "ScatterND with reduction=add runs on several threads, which lose sums where indices repeat.",
    "onnx_convgrad.rules.movement",
    f"{_ORT}/issues/18048",
)
SIGMOID_TAIL = Quirk(
    "SIGMOID_TAIL",
    "onnxruntime",
    "",
    "float32 Sigmoid is off by 0.6 % at -12 and 0 below -18.",
    "onnx_convgrad.rules.activations",
    f"{_ORT}/issues/22557",
)
SQUEEZE_NO_AXES = Quirk(
    "SQUEEZE_NO_AXES",
    "onnxruntime",
    "",
    "Squeeze with an empty list of axes removes every axis of size one.",
    "onnx_convgrad.rules.shape",
)
VECTOR_TIMES_TRANSPOSE = Quirk(
    "VECTOR_TIMES_TRANSPOSE",
    "onnxruntime",
    "",
    "MatMul of a Transpose and a vector is fused, and the fused kernel ignores the transposition.",
    "onnx_convgrad.backends.runtime_faults",
)

# -- ONNX Runtime: crashes and hangs -----------------------------------------------------------------------------------

CONV_NO_CHANNELS = Quirk(
    "CONV_NO_CHANNELS",
    "onnxruntime",
    "<1.32",
    "A Conv with zero input channels never returns.",
    "onnx_convgrad.lowering.conv.interleaved",
)
FLOAT16_FUSED_MATMUL = Quirk(
    "FLOAT16_FUSED_MATMUL",
    "onnxruntime",
    ">=1.32",
    "Loading a float16 MatMul of a constant and a Transpose that moves the first axis back kills the process.",
    "onnx_convgrad.backends.runtime_faults",
)
EINSUM_OF_NOTHING = Quirk(
    "EINSUM_OF_NOTHING",
    "onnxruntime",
    "",
    "An Einsum that transposes a second operand without elements divides by zero, which ends the process.",
    "onnx_convgrad.rules.einsum",
)
SCAN_OF_EMPTY_SLICES = Quirk(
    "SCAN_OF_EMPTY_SLICES",
    "onnxruntime",
    "",
    "A Scan of slices without elements along another axis than the first divides by zero, which ends the process.",
    "onnx_convgrad.ir.loop_bodies",
)

# -- ONNX Runtime: valid models that it refuses ------------------------------------------------------------------------

CONSTANT_RANGE_VECTOR = Quirk(
    "CONSTANT_RANGE_VECTOR",
    "onnxruntime",
    "",
    "Range takes operands of shape [1] unless they are constants.",
    "onnx_convgrad.frontend.shapes.fold_sizes",
)
CONV_EMPTY_AXIS = Quirk(
    "CONV_EMPTY_AXIS",
    "onnxruntime",
    "",
    "A Conv refuses a spatial axis of size 0.",
    "onnx_convgrad.lowering.conv.layout",
)
EINSUM_ELLIPSIS_RANKS = Quirk(
    "EINSUM_ELLIPSIS_RANKS",
    "onnxruntime",
    "",
    "Einsum refuses operands in which the ellipsis covers different numbers of axes.",
    "onnx_convgrad.rules.linalg",
)
EMPTY_BATCH = Quirk(
    "EMPTY_BATCH",
    "onnxruntime",
    "<1.30",
    "On an empty batch Reshape and Einsum fail or kill the process, and MatMul over an empty inner axis is left unset.",
    "onnx_convgrad.ir.samples",
)
FLOAT16_SCATTER_ADD = Quirk(
    "FLOAT16_SCATTER_ADD",
    "onnxruntime",
    "",
    "ScatterElements with reduction=add has no float16 kernel.",
    "onnx_convgrad.rules.movement",
)
FLOAT16_UNROUNDED = Quirk(
    "FLOAT16_UNROUNDED",
    "onnxruntime",
    "",
    "A float16 value from an operator without a float16 kernel is not rounded for others of that kind; it then differs from "
    "its maximum by ScatterElements, which is rounded.",
    "onnx_convgrad.rules.index",
)
FLOAT64_ACTIVATIONS = Quirk(
    "FLOAT64_ACTIVATIONS",
    "onnxruntime",
    "",
    "Elu, LeakyRelu, Softplus and other functions without a float64 kernel run up to opset 20, and are refused at 21.",
    "onnx_convgrad.backends.runtime_faults",
)
FLOAT64_CONV = Quirk(
    "FLOAT64_CONV",
    "onnxruntime",
    "",
    "Conv, ConvTranspose and AveragePool have no float64 kernels.",
    "onnx_convgrad.ir.targets",
    f"{_ORT}/issues/7546",
)
FLOAT64_FUSED_MATMUL = Quirk(
    "FLOAT64_FUSED_MATMUL",
    "onnxruntime",
    "<1.25",
    "A float64 MatMul of a Transpose is fused into an operator without a float64 kernel.",
    "onnx_convgrad.backends.runtime_faults",
    f"{_ORT}/issues/28136",
)
FLOAT64_RECURRENT = Quirk(
    "FLOAT64_RECURRENT",
    "onnxruntime",
    "",
    "float64 GRU and LSTM are loaded but fail at run time.",
    "onnx_convgrad.checking.case",
)
GEMM_SHAPE_NAMES = Quirk(
    "GEMM_SHAPE_NAMES",
    "onnxruntime",
    "",
    "The optimizer adds an initializer `gemm_input_shape`, and fails if the model has one, as files that it wrote do.",
    "onnx_convgrad.frontend.canonicalize",
)
OUTPUT_PADDING = Quirk(
    "OUTPUT_PADDING",
    "onnxruntime",
    "",
    "ConvTranspose refuses output_padding of a whole stride, also where the dilation is larger.",
    "onnx_convgrad.pipeline.layer",
)
PAD_AXES = Quirk(
    "PAD_AXES",
    "onnxruntime",
    "",
    "The transpose optimizer moves a Transpose through a Pad with `axes` as if the amounts were for all axes.",
    "onnx_convgrad.ir.emit",
)
PAD_OF_WEIGHT = Quirk(
    "PAD_OF_WEIGHT",
    "onnxruntime",
    ">=1.32",
    "A Pad before a Conv is fused into the Conv's padding even if it pads the weight; one with `axes` is not.",
    "onnx_convgrad.backends.runtime_faults",
)
SAME_DILATION = Quirk(
    "SAME_DILATION",
    "onnxruntime",
    "",
    "A Conv with auto_pad=SAME_* and dilation is refused.",
    "onnx_convgrad.frontend.plain_windows",
)

# -- ONNX Runtime: other providers and languages -----------------------------------------------------------------------

CUDA_ASYMMETRIC_PADS = Quirk(
    "CUDA_ASYMMETRIC_PADS",
    "onnxruntime-gpu",
    "",
    "On CUDA a ConvTranspose with different padding at the two ends runs on the CPU, and a Conv may fail.",
    "onnx_convgrad.backends.unsupported_forms",
)
CUDA_BATCH_STATISTICS = Quirk(
    "CUDA_BATCH_STATISTICS",
    "onnxruntime-gpu",
    "",
    "On CUDA BatchNormalization refuses training mode from opset 14 on.",
    "onnx_convgrad.backends.unsupported_forms",
    f"{_ORT}/issues/16867",
)
WEBGPU_GROUPED_CONV = Quirk(
    "WEBGPU_GROUPED_CONV",
    "onnxruntime-webgpu",
    "",
    "On WebGPU a grouped Conv is wrong if a group has more than four features and not a multiple of four.",
    "onnx_convgrad.backends.unsupported_forms",
)
WEBGPU_CONV_OF_THREES = Quirk(
    "WEBGPU_CONV_OF_THREES",
    "onnxruntime-webgpu",
    "",
    "On WebGPU a Conv over two axes is wrong if its channels, more than three, are a multiple of three and not of four, and"
    " its features a multiple of four.",
    "onnx_convgrad.backends.unsupported_forms",
)
CUDA_MAX_POOL_INDICES = Quirk(
    "CUDA_MAX_POOL_INDICES",
    "onnxruntime-gpu",
    "",
    "On CUDA the indices of MaxPool are wrong with dilation and padding at the beginning.",
    "onnx_convgrad.backends.cuda.cuda_kernels",
)
CUDA_SCATTERED_SUMS = Quirk(
    "CUDA_SCATTERED_SUMS",
    "onnxruntime-gpu",
    "",
    "On CUDA a sum over axes on both sides of others takes six times as long as one over the last axes (885 and 156 "
    "microseconds for 103 MB on an H100).",
    "onnx_convgrad.backends.cuda.staged_sums",
)
CUDA_HALF_BIAS = Quirk(
    "CUDA_HALF_BIAS",
    "onnxruntime-gpu",
    "",
    "On CUDA the bias of a Conv in float16 takes more than twice as long as an Add of it (198 and 89 microseconds for "
    "103 MB on an H100).",
    "onnx_convgrad.backends.unsupported_forms",
)
CUDA_SAMPLES = Quirk(
    "CUDA_SAMPLES",
    "onnxruntime-gpu",
    "",
    "On CUDA a MatMul of one matrix with each sample takes three copies of addresses from the host, and four times as long "
    "as a Conv with a kernel of one tap if a sample has 49 points (147 and 36 microseconds for 64 x 2048 x 49 on an H100).",
    "onnx_convgrad.lowering.conv.requirements",
)
CUDA_PAD = Quirk(
    "CUDA_PAD",
    "onnxruntime-gpu",
    "",
    "On CUDA a Pad of anything but rows and columns of images takes 0.13 nanoseconds per element, fifty passes (H100).",
    "onnx_convgrad.lowering.cost.movement",
)
CUDA_ONE_HOT_CONV = Quirk(
    "CUDA_ONE_HOT_CONV",
    "onnxruntime-gpu",
    "",
    "On CUDA a grouped Conv with several features per group of one channel starts one kernel per group.",
    "onnx_convgrad.lowering.conv.patches",
)
CUDA_LARGE_WINDOWS = Quirk(
    "CUDA_LARGE_WINDOWS",
    "onnxruntime-gpu",
    "",
    "On CUDA a float16 Conv with a kernel of 7x7 points over 64 channels, as a weight gradient has it, finds no engine in "
    "cuDNN and fails.",
    "onnx_convgrad.lowering.conv.weight_grad",
)
CUDA_NHWC = Quirk(
    "CUDA_NHWC",
    "onnxruntime-gpu",
    "",
    "On CUDA with prefer_nhwc a ConvTranspose whose kernel is not constant runs on the CPU.",
    "onnx_convgrad.runtime.session_options",
)
CUDA_OPSET = Quirk(
    "CUDA_OPSET",
    "onnxruntime-gpu",
    "",
    "On CUDA operators of opset 22 (MaxPool, ConvTranspose) silently run on the CPU.",
    "onnx_convgrad.ir.writer",
)
JS_INPUT_DEFAULTS = Quirk(
    "JS_INPUT_DEFAULTS",
    "onnxruntime-node",
    "",
    "Values fed to inputs with a default are ignored; onnxruntime-web refuses them.",
    "onnx_convgrad.programs.storage",
)

# -- other packages ----------------------------------------------------------------------------------------------------

BROADCAST_SYMBOLS = Quirk(
    "BROADCAST_SYMBOLS",
    "onnx-shape-inference",
    "",
    "Broadcasting of two different symbols is inferred as the first one, though it may be 1.",
    "onnx_convgrad.frontend.shapes.shape_rules_broadcast",
)
CLONE_UNSORTED = Quirk(
    "CLONE_UNSORTED",
    "onnx-ir",
    "",
    "A model whose nodes are not sorted cannot be cloned.",
    "onnx_convgrad.frontend.files",
)
DELETED_OUTPUTS = Quirk(
    "DELETED_OUTPUTS",
    "onnx-ir",
    "",
    "After `del graph.outputs[:]` or `del graph.inputs[0]` the values still count as outputs or inputs.",
    "onnx_convgrad.ir.replace",
)
DIMENSION_NAMES = Quirk(
    "DIMENSION_NAMES",
    "onnx-shape-inference",
    "",
    "A dimension whose name is not an expression, such as `?`, raises an error.",
    "onnx_convgrad.frontend.canonicalize",
)
MERGED_INITIALIZERS = Quirk(
    "MERGED_INITIALIZERS",
    "torch",
    "",
    "The TorchScript exporter stores equal parameters once, so that they would be trained as one.",
    "onnx_convgrad.frontend.exporters.separate_merged",
)
READERS_IN_BODIES = Quirk(
    "READERS_IN_BODIES",
    "onnx-ir",
    "",
    "A node that is removed still counts as a reader of what its bodies capture, so that its producers are kept.",
    "onnx_convgrad.ir.passes",
)
RESULT_NAMES = Quirk(
    "RESULT_NAMES",
    "onnx-ir",
    "",
    "Results are named val_0, val_1 ... even if a value of a nested graph has that name, or an initializer that was added.",
    "onnx_convgrad.ir.writer",
)
REFERENCE_LRN = Quirk(
    "REFERENCE_LRN",
    "onnx",
    "",
    "The reference evaluator's LRN sums over the first few channels only.",
    "onnx_convgrad.checking.float64_kernels",
)
STFT_SIDES = Quirk(
    "STFT_SIDES",
    "onnx",
    "",
    "Shape inference takes the attribute `onesided` of STFT for 0 where it is absent; its default is 1.",
    "onnx_convgrad.ir.writer",
)

OPENVINO_DEFAULTS = Quirk(
    "OPENVINO_DEFAULTS",
    "onnxruntime-openvino",
    "",
    "Inputs with default values are taken for constants, and so get what OPENVINO_PACKED_WEIGHTS does to constants.",
    "onnx_convgrad.training.sessions",
)
OPENVINO_PACKED_WEIGHTS = Quirk(
    "OPENVINO_PACKED_WEIGHTS",
    "onnxruntime-openvino",
    "",
    "A constant weight with two equal sizes that one node multiplies by, and another by its transpose, is laid out for the "
    "first; the second multiplies by the wrong matrix (OpenVINO 2026.4.1 too).",
    "onnx_convgrad.backends.weight_copies",
)
OPENVINO_ZERO_SHIFT = Quirk(
    "OPENVINO_ZERO_SHIFT",
    "onnxruntime-openvino",
    "",
    "The attributes of HardSigmoid and Selu have their defaults where they are 0.",
    "onnx_convgrad.ir.slopes",
)

QUIRKS = {quirk.name: quirk for quirk in list(globals().values()) if isinstance(quirk, Quirk)}
"""Name -> quirk."""
