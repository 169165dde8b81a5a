"""ONNX Runtime's quantized operators (com.microsoft), written with float operators between quantizers.

They compute the same up to the rounding of sums: a result may be the neighboring level.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.dims import static_dims
from onnx_convgrad.ir.nodes import is_op

_PLACES = {
    "Add": ((0, 3), 6),
    "AveragePool": ((0,), 3),
    "GlobalAveragePool": ((0,), 3),
    "LeakyRelu": ((0,), 3),
    "Mul": ((0, 3), 6),
    "Sigmoid": ((0,), 3),
}
"""Operator -> the places of its quantized operands, and of the scale of the result; behind each scale is a zero point."""

ELEMENTWISE = tuple(f"QLinear{name}" for name in _PLACES)


def between_quantizers(h: Rewriter) -> ir.Value:
    """QuantizeLinear of the operator without QLinear, whose operands pass DequantizeLinear"""
    op_type = h.node.op_type.removeprefix("QLinear")
    last = bool(h.int("channels_last", 0))
    h.drop("channels_last")
    operands, result = _PLACES[op_type]
    values = [_real(h, place) for place in operands]
    first, behind = _orders(h, values[0]) if last else (None, None)
    values = values if first is None else [h.e.transpose(value, first) for value in values]
    y = h.e.op(op_type, *values, **h.attributes())
    return _quantized(h, y if behind is None else h.e.transpose(y, behind), result)


def channels_last(h: Rewriter) -> ir.Value:
    """The operator of ai.onnx without Nhwc, between two Transposes if the channels are last"""
    op_type, x, others = h.node.op_type.removeprefix("Nhwc"), h.required(0), h.node.inputs[1:]
    last = h.int("channels_last", int(op_type != h.node.op_type))
    h.drop("channels_last")
    if not last:
        return h.e.op(op_type, x, *others, **h.attributes())
    first, behind = _orders(h, x)
    return h.e.transpose(h.e.op(op_type, h.e.transpose(x, first), *others, **h.attributes()), behind)


def _orders(h: Rewriter, x: ir.Value) -> tuple[list[int], list[int]]:
    """The orders of axes that move the channels from the last place to the second, and back."""
    rank = h.e.rank(x, "its replacement by plain operators")
    return [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]


def softmax(h: Rewriter) -> ir.Value:
    """QuantizeLinear(Softmax(DequantizeLinear(X)))

    Along one axis or, if its attribute `opset` is below 13, along all from this axis on.
    """
    x, axis = _real(h, 0), h.int("axis", -1)
    y = h.e.op("Softmax", x, axis=axis) if h.int("opset", 13) >= 13 else h.flattened("Softmax", x, axis)
    return _quantized(h, y, 3)


def where(h: Rewriter) -> ir.Value:
    """QuantizeLinear(Where(condition, DequantizeLinear(X), DequantizeLinear(Y)))

    The condition is the first operand, then come X, Y and the result with a scale and a zero point each.
    """
    return _quantized(h, h.e.op("Where", h.required(0), _real(h, 1), _real(h, 4)), 7)


def concat(h: Rewriter) -> ir.Value:
    """QuantizeLinear(Concat of DequantizeLinear of each operand)

    The scale and the zero point of the result are the first operands, then comes each operand with its own.
    """
    parts = [_real(h, place) for place in range(2, len(h.node.inputs), 3)]
    return _quantized(h, h.e.op("Concat", *parts, axis=h.int("axis", 0)), 0)


def gemm(h: Rewriter) -> ir.Value:
    """Gemm of DequantizeLinear of A, B and C, and QuantizeLinear if there is a scale of the result

    The scale of C is alpha a_scale b_scale.
    """
    alpha, swapped = h.float("alpha", 1.0), h.int("transB", 0)
    a, b, bias = _real(h, 0), _real(h, 3, axis=0 if swapped else 1), h.operand(6)
    if bias is not None:
        scale = h.e.mul(h.e.mul(h.required(1), h.required(4)), alpha)
        bias = h.e.op("DequantizeLinear", bias, scale, axis=-1)
    y = h.e.op("Gemm", a, b, bias, alpha=alpha, transA=h.int("transA", 0), transB=swapped)
    return y if h.operand(7) is None else _quantized(h, y, 7)


def dynamic_lstm(h: Rewriter) -> None:
    """LSTM with DequantizeLinear of the weights, whose state is not quantized

    The weights are [directions, size, 4 hidden] before they are transposed.

    X is quantized in the range of its numbers. The state is not: the kernel quantizes it in each turn, together for the
    samples that one thread computes. So results depend on the number of threads there, by about a hundredth, and these lie
    between.
    """
    x = h.e.op("DequantizeLinear", *h.e.ops("DynamicQuantizeLinear", h.required(0), outputs=3))
    w, r = (_transposed(h, h.required(place), scale) for place, scale in ((1, 8), (2, 10)))
    h.node.domain, h.node.op_type = "", "LSTM"
    h.set_inputs(x, w, r, *(h.operand(place) for place in range(3, 8)))


def _transposed(h: Rewriter, levels: ir.Value, place: int) -> ir.Value:
    """The real numbers of a weight with a scale, and maybe a zero point, per direction or per column."""
    scale, zero = h.required(place), h.operand(place + 1)
    rank = len(scale.shape) if scale.shape is not None else 1
    axes, dtype = [1, 2][: 3 - rank], scale.dtype or ir.DataType.FLOAT
    numbers = h.e.cast(levels, dtype)
    if zero is not None:
        numbers = h.e.sub(numbers, h.e.unsqueeze(h.e.cast(zero, dtype), axes))
    return h.e.transpose(h.e.mul(numbers, h.e.unsqueeze(scale, axes)), [0, 2, 1])


def integer_matmul(h: Rewriter) -> ir.Value:
    """MatMul(DequantizeLinear(A), DequantizeLinear(B)) + bias"""
    return _plus(h, h.e.matmul(real(h, 0, 2, 4), real(h, 1, 3, 5, axis=-1)), 6)


def dynamic_matmul(h: Rewriter) -> ir.Value:
    """MatMul(DequantizeLinear(DynamicQuantizeLinear(A)), DequantizeLinear(B)) + bias"""
    a = h.e.op("DequantizeLinear", *h.e.ops("DynamicQuantizeLinear", h.required(0), outputs=3))
    return _plus(h, h.e.matmul(a, real(h, 1, 2, 3, axis=-1)), 4)


def _plus(h: Rewriter, y: ir.Value, place: int) -> ir.Value:
    bias = h.operand(place)
    return y if bias is None else h.e.add(y, bias)


def blocks_gather(h: Rewriter) -> ir.Value:
    """Gather(DequantizeLinear(data), indices), with a scale per block of numbers"""
    e, data, scales, zero = h.e, h.required(0), h.required(2), h.operand(3)
    if data.dtype == ir.DataType.UINT8:
        data, zero = _numbers_of_bytes(h, data, zero)
    elif data.dtype not in (ir.DataType.UINT4, ir.DataType.INT4):
        raise UnsupportedCase("its data are not integers")
    axis = h.int("quantize_axis", 1) % e.rank(data, "its replacement by plain operators")
    table = e.op("DequantizeLinear", data, scales, zero, axis=axis, block_size=h.int("block_size", 128))
    return e.gather(table, h.required(1), axis=h.int("gather_axis", 0))


def _numbers_of_bytes(h: Rewriter, data: ir.Value, zero: ir.Value | None) -> tuple[ir.Value, ir.Value]:
    """The numbers of 4 or 8 bits, which are 4-bit integers or bytes then, and their zero points."""
    bits, sizes, stored, zeros = h.int("bits", 4), static_dims(h.required(2)), _stored(data), constant_of(zero)
    if bits not in (4, 8) or sizes is None or None in sizes or stored is None or (zero is not None and zeros is None):
        raise UnsupportedCase("its data and scales are not stored, for numbers of 4 or 8 bits")
    if bits == 4:
        zeros = None if zeros is None else unpacked(zeros, 4)[..., : sizes[-1]]
    zeros = np.full([size or 0 for size in sizes], 2 ** (bits - 1)) if zeros is None else zeros
    numbers = in_bytes(h, stored, bits)
    return numbers, h.e.const(zeros, numbers.dtype)


def _stored(value: ir.Value | None) -> np.ndarray | None:
    """A constant, also behind a Reshape: a table that is the last weight, too, is stored in the shape of the latter."""
    node = None if value is None else value.producer()
    if not is_op(node, "Reshape"):
        return constant_of(value)
    stored, sizes = constant_of(node.inputs[0]), constant_of(node.inputs[1])
    if stored is None or sizes is None or stored.size != sizes.prod(dtype=object):
        return None
    return stored.reshape(sizes)


def in_bytes(h: Rewriter, stored: np.ndarray, bits: int) -> ir.Value:
    """The numbers of 2, 4 or 8 bits in bytes along the last axis. The bytes are not copied, except those of 2 bits."""
    shape = *stored.shape[:-1], stored.shape[-1] * 8 // bits
    if bits == 2:
        return h.e.const(unpacked(stored, 2), ir.DataType.UINT4)
    if bits == 8:
        return h.e.initializer(ir.Tensor(stored.reshape(shape), ir.DataType.UINT8))
    return h.e.initializer(ir.PackedTensor(stored.reshape(-1), ir.DataType.UINT4, shape=ir.Shape(shape)))


def unpacked(stored: np.ndarray, bits: int, *, upper_first: bool = False) -> np.ndarray:
    """The numbers of 2, 4 or 8 bits in bytes along the last axis; `upper_first` is their order in a byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:: -1 if upper_first else 1]
    numbers: np.ndarray = stored[..., None] >> shifts & 2**bits - 1
    return numbers.reshape(*stored.shape[:-1], -1)


def of_blocks(
    h: Rewriter, stored: np.ndarray, scales: ir.Value, zeros: np.ndarray | None, bits: int, block: int
) -> ir.Value:
    """DequantizeLinear of numbers `in_bytes`, with a scale and a zero point per block along the last axis."""
    numbers = in_bytes(h, stored, bits)
    shape = *stored.shape[:-1], stored.shape[-1] * 8 // bits // block
    zeros = np.full(shape, 2 ** (bits - 1)) if zeros is None else zeros
    operands = numbers, h.e.reshape(scales, shape), h.e.const(zeros, numbers.dtype)
    return h.e.op("DequantizeLinear", *operands, axis=stored.ndim - 1, block_size=block)


def real(h: Rewriter, place: int, scale: int, zero: int, axis: int | None = None) -> ir.Value:
    """The real numbers of the operand at `place`, by the places of its scale and its zero point."""
    return h.e.op("DequantizeLinear", h.required(place), h.required(scale), h.operand(zero), axis=axis)


def _real(h: Rewriter, place: int, axis: int | None = None) -> ir.Value:
    """The real numbers of an operand with the scale and the zero point behind it."""
    return real(h, place, place + 1, place + 2, axis)


def _quantized(h: Rewriter, y: ir.Value, place: int) -> ir.Value:
    """Quantize `y`, with the scale at `place` and the zero point behind it."""
    return h.e.op("QuantizeLinear", y, h.required(place), h.operand(place + 1))
