"""Write fused operators of `com.microsoft`, which ONNX Runtime's optimizer makes, with the plain operators.

The rules of the plain operators then apply, and ONNX Runtime fuses them again when it loads the result. It can: the slopes
of Relu, LeakyRelu, Tanh, HardSigmoid and ReLU6 are computed from the result, so nothing but the activation reads the value
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.converters_above_21 import root_mean_square
from onnx_convgrad.frontend.opset.converters_quantized import of_blocks, real, unpacked
from onnx_convgrad.frontend.opset.rewriter import Rewriter, is_used
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.notes import mark_fixed

_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Relu": (),
    "Tanh": (),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "HardSwish": (),
    "Selu": ("alpha", "gamma"),
    "Clip": ("min", "max"),
}
"""Activations that are fused, with their parameters in the order of `activation_params`."""


def _activated(h: Rewriter, x: ir.Value, *numbers: float) -> ir.Value:
    """The activation of a value that the attribute `activation` names, if there is one.

    Its parameters are in the attributes `activation_<name>`, or else the `numbers`.
    """
    op_type = h.string("activation", "")
    if not op_type:
        return x
    if op_type not in _ACTIVATIONS:
        raise UnsupportedCase(f"its activation {op_type!r} is not one that ONNX Runtime fuses")
    names = _ACTIVATIONS[op_type]
    found: dict[str, Any] = dict(zip(names, numbers, strict=False)) or {
        name: h.float(f"activation_{name}", 0.0) for name in names if f"activation_{name}" in h.node.attributes
    }
    return h.e.op("Clip", x, found["min"], found["max"]) if op_type == "Clip" else h.e.op(op_type, x, **found)


def _plain(h: Rewriter) -> dict[str, Any]:
    """The attributes that do not belong to the activation."""
    return {name: value for name, value in h.attributes().items() if not name.startswith("activation")}


def activated_conv(h: Rewriter) -> ir.Value:
    """activation(Conv(X, W, B) + Z)"""
    count, numbers = len(_ACTIVATIONS.get(h.string("activation", ""), ())), h.attributes().get("activation_params", ())
    if len(numbers) < count:
        raise UnsupportedCase(f"its activation needs {count} parameters, and there are {len(numbers)}")
    y, z = h.e.conv(h.required(0), h.required(1), h.operand(2), **_plain(h)), h.operand(3)
    return _activated(h, y if z is None else h.e.add(y, z), *numbers)


def activated_gemm(h: Rewriter) -> ir.Value:
    """activation(Gemm(A, B, C))"""
    return _activated(h, h.e.op("Gemm", h.required(0), h.required(1), h.operand(2), **_plain(h)))


def activated_matmul(h: Rewriter) -> ir.Value:
    """activation(alpha MatMul(A, B)), with A and B transposed as the attributes say"""
    a, b = _transposed(h, h.required(0), "A"), _transposed(h, h.required(1), "B")
    return _activated(h, h.e.mul(h.e.matmul(a, b), h.float("alpha", 1.0)))


def _transposed(h: Rewriter, value: ir.Value, operand: str) -> ir.Value:
    """`transBatch` moves the first axis to the second to last place; then `trans` swaps the last two."""
    batch, swap = h.int(f"transBatch{operand}", 0), h.int(f"trans{operand}", 0)
    if not batch and not swap:
        return value
    if value.shape is None:
        raise UnsupportedCase(f"the rank of its transposed operand {value.name!r} is unknown: give the input shapes")
    rank = len(value.shape)
    if rank < 2:
        return value
    order = [*range(1, rank - 1), 0, rank - 1] if batch else list(range(rank))
    if swap:
        order[-2:] = order[:-3:-1]
    return h.e.op("Transpose", value, perm=order)


def bias_gelu(h: Rewriter) -> ir.Value:
    """Gelu(x + bias), for FastGelu in its approximation by tanh"""
    x, bias = h.required(0), h.operand(1)
    kind = "tanh" if h.node.op_type == "FastGelu" else None
    return h.e.op("Gelu", x if bias is None else h.e.add(x, bias), approximate=kind)


def _skipped(h: Rewriter, bias: ir.Value | None) -> ir.Value:
    """input + skip + bias, which may be the fourth result, too."""
    total = h.e.add(h.required(0), h.required(1))
    return total if bias is None else h.e.add(total, bias)


def skip_layer_norm(h: Rewriter) -> list[ir.Value]:
    """LayerNormalization(input + skip + bias), and the sum"""
    total, epsilon = _skipped(h, h.operand(4)), h.float("epsilon", 1e-12)
    operands = (total, h.required(2), h.operand(3))
    normal = h.e.ops("LayerNormalization", *operands, outputs=min(len(h.node.outputs), 3), axis=-1, epsilon=epsilon)
    return [*normal, total]


def simplified_layer_norm(h: Rewriter) -> ir.Value:
    """RMSNormalization(X, scale)"""
    _refuse_statistics(h.node.outputs[1:])
    return root_mean_square(h, h.required(0), h.required(1))


def skip_simplified_layer_norm(h: Rewriter) -> list[ir.Value | None]:
    """RMSNormalization(input + skip + bias), and the sum"""
    _refuse_statistics(h.node.outputs[1:3])
    total = _skipped(h, h.operand(3))
    return [root_mean_square(h, total, h.required(2)), None, None, total]


def _refuse_statistics(values: Sequence[ir.Value]) -> None:
    if any(map(is_used, values)):
        raise UnsupportedCase("its statistics are read")


def embed_layer_norm(h: Rewriter) -> list[ir.Value | None]:
    """LayerNormalization(word[input_ids] + position[position_ids] + segment[segment_ids])"""
    return _embedded(h, [h.operand(place) for place in range(2, 7)], h.operand(8))


def quantized_embed_layer_norm(h: Rewriter) -> list[ir.Value | None]:
    """EmbedLayerNormalization of DequantizeLinear of the tables"""
    places = range(2, 7)
    return _embedded(h, [None if h.operand(at) is None else real(h, at, at + 6, at + 11) for at in places], None)


def _embedded(h: Rewriter, operands: Sequence[ir.Value | None], places: ir.Value | None) -> list[ir.Value | None]:
    """The normalized sum, the number of ones in each row of the mask, and the sum."""
    e, ids, segments, mask, (words, position, segment, gamma, beta) = (
        h.e,
        h.required(0),
        h.operand(1),
        h.operand(7),
        operands,
    )
    if words is None or position is None or (segments is not None and segment is None):
        raise UnsupportedCase("one of its tables is missing")
    rows = e.slice(position, [0], [e.dim(ids, 1)], [0]) if places is None else e.gather(position, places, axis=0)
    total = e.add(e.gather(words, ids, axis=0), rows)
    if segments is not None and segment is not None:
        total = e.add(total, e.gather(segment, segments, axis=0))
    y = e.op("LayerNormalization", total, gamma, beta, axis=-1, epsilon=h.float("epsilon", 1e-12))
    if mask is None:
        return [y, e.op("Expand", e.const(np.int32(0)), e.vector([e.dim(ids, 0)])), total]
    ones = e.cast(e.op("Equal", mask, e.const(np.int32(1))), ir.DataType.INT32)
    return [y, e.op("ReduceSum", ones, e.ints([1]), keepdims=0), total]


def blocks_matmul(h: Rewriter) -> ir.Value:
    """MatMul(A, DequantizeLinear(B)) + bias, with a scale per block of numbers

    B is stored as `[N, blocks, bytes]`, with 2, 4 or 8 bits per number, and becomes `[K, N]`.
    """
    packed, zeros = constant_of(h.operand(1)), constant_of(h.operand(3))
    inner, outer, bits, block = (
        h.int(name, default) for name, default in (("K", 0), ("N", 0), ("bits", 4), ("block_size", 0))
    )
    if (
        packed is None
        or packed.dtype != np.uint8
        or bits not in (2, 4, 8)
        or block < 1
        or inner % block
        or packed.size * 8 != inner * outer * bits
    ):
        raise UnsupportedCase("its weight is not stored in whole blocks of 2, 4 or 8 bits")
    if (zeros is None) != (h.operand(3) is None) or (zeros is not None and zeros.dtype != np.uint8):
        raise UnsupportedCase("its zero points are not stored integers")
    if h.operand(4) is not None:
        raise UnsupportedCase("its weight has an order of its own (g_idx)")
    zeros = None if zeros is None else unpacked(zeros.reshape(outer, -1), bits)[:, : inner // block]
    weight = of_blocks(h, packed.reshape(outer, -1), h.required(2), zeros, bits, block)
    y, bias = h.e.matmul(h.required(0), h.e.op("Transpose", weight, perm=[1, 0])), h.operand(5)
    return y if bias is None else h.e.add(y, bias)


_POSITIVE_FP4 = np.divide([0, 0.0625, 8, 12, 4, 6, 2, 3], 12)
_FP4 = np.concatenate([_POSITIVE_FP4, -_POSITIVE_FP4])
_NF4 = np.array([
    -1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1,
])  # fmt: skip
"""The numbers that 4 bits stand for in bitsandbytes, by `quant_type`."""


def codes_matmul(h: Rewriter) -> ir.Value:
    """MatMul(A, Transpose(absmax Gather(codes, B))), with a code of 4 bits per number and an absmax per block

    B is `[N, K]` in one row of blocks, with the first of two numbers in the upper half of a byte.
    """
    packed, e = constant_of(h.operand(1)), h.e
    inner, outer, block = (h.int(name, 0) for name in ("K", "N", "block_size"))
    size, kind = inner * outer, h.int("quant_type", 0)
    if packed is None or kind not in (0, 1) or block < 1 or packed.size != -(-size // 2):
        raise UnsupportedCase("its weight is not stored in 4 bits per number, as FP4 or NF4")
    if not h.int("transB", 1):
        raise UnsupportedCase("its attribute transB is 0, which ONNX Runtime's CPU kernel computes wrongly")
    codes = np.resize(unpacked(packed.reshape(-1), 4, upper_first=True)[:size], (-(-size // block), block))
    # DequantizeLinear keeps ONNX Runtime from computing the weight, and holding it as floats, when it loads the model.
    numbers = e.op("DequantizeLinear", e.const(codes, ir.DataType.UINT4), e.const(np.float32(1)))
    mark_fixed(h.required(2))  # a part of the weight, as the scales of quantizers are
    table = e.const(_NF4 if kind else _FP4, h.dtype(h.operand(2), h.operand(0)) or ir.DataType.FLOAT)
    scaled = e.mul(e.gather(table, e.cast(numbers, ir.DataType.INT32)), e.reshape(h.required(2), [-1, 1]))
    flat = scaled if codes.size == size else e.slice(e.reshape(scaled, [-1]), [0], [size], [0])
    return e.matmul(h.required(0), e.op("Transpose", e.reshape(flat, [outer, inner]), perm=[1, 0]))
