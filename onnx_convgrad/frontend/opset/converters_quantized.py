"""ONNX Runtime's quantized operators (com.microsoft), written with float operators between quantizers.

They compute the same up to the rounding of sums: a result may be the neighboring level.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.rewriter import Rewriter


def plain(h: Rewriter) -> None:
    """QuantizeLinear and DequantizeLinear are those of opset 21, which has all their types."""
    h.node.domain = ""


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
    """QLinearAdd, QLinearMul, QLinearSigmoid, QLinearLeakyRelu and pools: the float operator, quantized."""
    op_type = h.node.op_type.removeprefix("QLinear")
    if h.int("channels_last", 0):
        raise UnsupportedCase("its channels are last")
    h.drop("channels_last")
    operands, result = _PLACES[op_type]
    return _quantized(h, h.e.op(op_type, *(_real(h, place) for place in operands), **h.attributes()), result)


def softmax(h: Rewriter) -> ir.Value:
    """QLinearSoftmax: along one axis or, if its attribute `opset` is below 13, along all from this axis on."""
    x, axis = _real(h, 0), h.int("axis", -1)
    y = h.e.op("Softmax", x, axis=axis) if h.int("opset", 13) >= 13 else h.flattened("Softmax", x, axis)
    return _quantized(h, y, 3)


def where(h: Rewriter) -> ir.Value:
    """QLinearWhere: the condition, then X, Y and the result with a scale and a zero point each."""
    return _quantized(h, h.e.op("Where", h.required(0), _real(h, 1), _real(h, 4)), 7)


def concat(h: Rewriter) -> ir.Value:
    """QLinearConcat: scale and zero point of the result, then each operand with its own."""
    parts = [_real(h, place) for place in range(2, len(h.node.inputs), 3)]
    return _quantized(h, h.e.op("Concat", *parts, axis=h.int("axis", 0)), 0)


def gemm(h: Rewriter) -> ir.Value:
    """QGemm: y = alpha A' B' + alpha a_scale b_scale C, quantized if there is a scale of the result."""
    alpha, swapped = h.float("alpha", 1.0), h.int("transB", 0)
    a, b, bias = _real(h, 0), _real(h, 3, axis=0 if swapped else 1), h.operand(6)
    if bias is not None:
        scale = h.e.mul(h.e.mul(h.required(1), h.required(4)), alpha)
        bias = h.e.op("DequantizeLinear", bias, scale, axis=-1)
    y = h.e.op("Gemm", a, b, bias, alpha=alpha, transA=h.int("transA", 0), transB=swapped)
    return y if h.operand(7) is None else _quantized(h, y, 7)


def dynamic_lstm(h: Rewriter) -> None:
    """DynamicQuantizeLSTM: an LSTM with dequantized weights, [directions, size, 4 hidden] before they are transposed.

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


def _real(h: Rewriter, place: int, axis: int | None = None) -> ir.Value:
    """The real numbers of the operand at `place`, with the scale and the zero point behind it."""
    return h.e.op("DequantizeLinear", h.required(place), h.required(place + 1), h.operand(place + 2), axis=axis)


def _quantized(h: Rewriter, y: ir.Value, place: int) -> ir.Value:
    """Quantize `y`, with the scale at `place` and the zero point behind it."""
    zero = h.operand(place + 1)
    h.y.type = ir.TensorType(ir.DataType.UINT8 if zero is None or zero.dtype is None else zero.dtype)
    return h.e.op("QuantizeLinear", y, h.required(place), zero)
