"""The operators of ONNX Runtime (com.microsoft) that are written with operators of ai.onnx when a model is read."""

from __future__ import annotations

from onnx_convgrad.frontend.opset import converters_above_21 as above
from onnx_convgrad.frontend.opset import converters_attention as attention
from onnx_convgrad.frontend.opset import converters_decoder as decoder
from onnx_convgrad.frontend.opset import converters_delta as delta
from onnx_convgrad.frontend.opset import converters_experts as experts
from onnx_convgrad.frontend.opset import converters_fused as fused
from onnx_convgrad.frontend.opset import converters_own as own
from onnx_convgrad.frontend.opset import converters_quantized as quantized
from onnx_convgrad.frontend.opset.rewriter import Converter

CONTRIB: dict[str, Converter] = {
    "FusedConv": fused.activated_conv,
    "FusedGemm": fused.activated_gemm,
    **dict.fromkeys(("FusedMatMul", "FusedMatMulActivation", "TransposeMatMul"), fused.activated_matmul),
    **dict.fromkeys(("Gelu", "BiasGelu", "FastGelu"), fused.bias_gelu),
    "QuickGelu": above.swish,
    "SkipLayerNormalization": fused.skip_layer_norm,
    "SimplifiedLayerNormalization": fused.simplified_layer_norm,
    "SkipSimplifiedLayerNormalization": fused.skip_simplified_layer_norm,
    "EmbedLayerNormalization": fused.embed_layer_norm,
    "QEmbedLayerNormalization": fused.quantized_embed_layer_norm,
    "Attention": attention.packed_attention,
    "QAttention": attention.quantized_attention,
    "MultiHeadAttention": attention.multi_head_attention,
    "GroupQueryAttention": decoder.group_query_attention,
    "RotaryEmbedding": decoder.rotary_embedding,
    "MRotaryEmbedding": decoder.sectioned_rotary_embedding,
    "MatMulNBits": fused.blocks_matmul,
    "MatMulBnb4": fused.codes_matmul,
    "MatMulIntegerToFloat": quantized.integer_matmul,
    "DynamicQuantizeMatMul": quantized.dynamic_matmul,
    "DynamicQuantizeLSTM": quantized.dynamic_lstm,
    "GatherBlockQuantized": quantized.blocks_gather,
    **dict.fromkeys(quantized.ELEMENTWISE, quantized.between_quantizers),
    **dict.fromkeys(("NhwcMaxPool", "QLinearConv"), quantized.channels_last),
    "QLinearConcat": quantized.concat,
    "QLinearSoftmax": quantized.softmax,
    "QLinearWhere": quantized.where,
    "QGemm": quantized.gemm,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "GatherND", "Pad", "Trilu"), own.plain),
    **dict.fromkeys(("CausalConvWithState", "LinearAttention"), own.newer),
    "BranchwiseRMSNorm": own.branchwise_rms_norm,
    "CDist": own.distances,
    "ConvTransposeWithDynamicPads": own.conv_transpose,
    "CropAndResize": own.crop_and_resize,
    "EngramGate": own.engram_gate,
    "ExpandDims": own.expand_dims,
    "GatedAdd": own.gated_add,
    "GatedDeltaNet": delta.gated_delta_net,
    "GatedRMSNorm": own.gated_rms_norm,
    "GridSample": own.grid_sample,
    "HyperConnectionPreMix": own.pre_mix,
    "HyperConnectionPostMix": own.post_mix,
    "Inverse": own.inverse,
    "MoE": experts.experts,
    "MoEGroupRouter": experts.group_router,
    "QMoE": experts.quantized_experts,
    "LinearAttentionGate": own.attention_gate,
    "Range": own.range_,
    "ScaledSiLU": own.scaled_silu,
    "Unique": own.unique,
    "UnfoldTensor": own.unfold,
}
"""Operator of com.microsoft -> its converter."""
