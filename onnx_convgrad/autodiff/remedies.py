"""Remedies for operators of ONNX Runtime that cannot be differentiated."""

from __future__ import annotations

import onnx
import onnx_ir as ir

_BEFORE = (
    "If ONNX Runtime's optimizer made it, use the model from before that optimization, or one optimized with"
    " graph_optimization_level=ORT_ENABLE_BASIC at most."
)
_UNPACKED = (
    "It computes on sequences without padding: use the model from before that optimization, which"
    " onnxruntime.transformers.convert_to_packing_mode made."
)
_GENERATION = (
    "It is made for generating text: export the PyTorch model again without a search and without a cache of keys and"
    " values, as in torch.onnx.export of a forward pass with use_cache=False."
)
_WEIGHTS = (
    "Its weights are stored in a form that ai.onnx cannot read: use the model from before they were quantized or packed,"
    " or quantize it again to MatMulNBits (onnxruntime.quantization.matmul_nbits_quantizer)."
)
_QUANTIZED = (
    "It computes with integers: use the model from before it was quantized, or quantize it again by"
    " onnxruntime.quantization, whose operators have derivatives."
)
_DISCRETE = "It has no derivative: small changes of its operands do not change its results."
_AUTHORS = "No optimizer makes it: export the model again with operators of ai.onnx in its place."
_COMPILED = "It holds what was compiled for one device: use the model from before that."
_OPERATORS = {
    _UNPACKED: "PackedAttention PackedMultiHeadAttention RemovePadding RestorePadding",
    _GENERATION: (
        "BeamSearch ConvStateReplay DecoderAttention DecoderMaskedMultiHeadAttention DecoderMaskedSelfAttention"
        " DynamicSparseAttention GatedDeltaNetStateReplay GreedySearch Mamba2Verify NGramRepeatBlock"
        " PackedSparseAttentionIndexer PackedSparseAttentionIndexerMerge PagedAttention Sampling SparseAttention"
        " SparseAttentionIndexer SparsePagedAttention SpeculativePrefixCommit VarlenCausalConvWithState WhisperBeamSearch"
    ),
    _WEIGHTS: (
        "DequantizeBFP DequantizeWithOrder GatherBlockQuantized GatherPacked GemmFloat8 MatMulBlockQuantizedFp4Weight"
        " MatMulBlockQuantizedFp8Weight MatMulBnb4 MatMulFpQ4 MatMulNBits MatMulNBitsMlp MatMulNBitsQLoRA MatMulNBitsQkv"
        " MatMulPacked MoEPacked QMoE QuantizeBFP QuantizeWithOrder"
    ),
    _QUANTIZED: (
        "MatMulInteger16 MulInteger QLinearReduceMean QOrderedAttention QOrderedGelu QOrderedLayerNormalization"
        " QOrderedLongformerAttention ReduceSumInteger"
    ),
    _DISCRETE: (
        "BifurcationDetector DynamicTimeWarping IsAllFinite MurmurHash3 NGramHashMapping Tokenizer VarlenNGramHashMapping"
    ),
    _AUTHORS: (
        "AttnLSTM CDist CausalConvWithState ComplexMul ComplexMulConj ConvTransposeWithDynamicPads CropAndResize GatedAdd"
        " GatedDeltaNet Irfft LinearAttention MaxpoolWithMask MoE MoEGroupRouter Rfft SampleOp SparseToDenseMatMul"
        " TorchEmbedding WordConvEmbedding"
    ),
    _COMPILED: "EPContext Snpe",
}
"""Remedy -> operators. Some are converted (`frontend.opset.contrib`): it is for their forms that cannot be."""
_REMEDIES = {operator: text for text, operators in _OPERATORS.items() for operator in operators.split()}

_OPTIONS = {
    "BiasAdd": "enable_bias_add",
    "BiasSplitGelu": "enable_bias_splitgelu",
    "GemmFastGelu": "enable_gemm_fast_gelu",
    "GroupNorm": "enable_group_norm",
    "NhwcConv": "enable_nhwc_conv",
    "QOrderedMatMul": "enable_qordered_matmul",
    "SkipGroupNorm": "enable_skip_group_norm",
}
"""Operator without a CPU kernel -> the option of `onnxruntime.transformers` that makes it."""


def remedy(node: ir.Node) -> str:
    """The remedy for an operator of ONNX Runtime's own, in its domain or in ai.onnx; empty for others."""
    if node.domain != "com.microsoft" and (node.domain or onnx.defs.has(node.op_type)):
        return ""
    option = _OPTIONS.get(node.op_type)
    if option is not None:
        return (
            "ONNX Runtime has no CPU kernel for it: use the model from before that optimization, or optimize it again with"
            f" FusionOptions.{option} = False (onnxruntime.transformers)."
        )
    return _REMEDIES.get(node.op_type, _BEFORE)
