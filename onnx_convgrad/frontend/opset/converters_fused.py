"""Write fused operators of `com.microsoft`, which ONNX Runtime's optimizer makes, with the plain operators.

The rules of the plain operators then apply, and ONNX Runtime fuses them again when it loads the result. It can: the slopes
of Relu, LeakyRelu, Tanh, HardSigmoid and ReLU6 are computed from the result, so nothing but the activation reads the value
before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.converters_above_21 import root_mean_square
from onnx_convgrad.frontend.opset.rewriter import Rewriter

Step: TypeAlias = tuple[str, list[ir.Value | None], dict[str, Any]]
"""An operator, its operands after the first, and its attributes."""

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


def _end(h: Rewriter, steps: Sequence[Step]) -> None:
    """Emit a chain of operators, each applied to the previous result and to operands; the node becomes the last."""
    value: list[ir.Value | None] = []
    for op_type, operands, attributes in steps[:-1]:
        value = [h.e.op(op_type, *value, *operands, **attributes)]
    op_type, operands, attributes = steps[-1]
    h.become(op_type, *value, *operands, **attributes)


def _activation(h: Rewriter, numbers: Mapping[str, float]) -> list[Step]:
    """The step of the attribute `activation`, if there is one, with its parameters."""
    name = h.string("activation", "")
    if not name:
        return []
    if name not in _ACTIVATIONS:
        raise UnsupportedCase(f"its activation {name!r} is not one that ONNX Runtime fuses")
    if name == "Clip":
        bounds = [h.scalar(numbers[key], h.required(0), h.y) for key in ("min", "max")]
        return [("Clip", list(bounds), {})]
    return [(name, [], dict(numbers))]


def _plain(h: Rewriter) -> dict[str, Any]:
    """The attributes that do not belong to the activation."""
    return {name: value for name, value in h.node.attributes.items() if not name.startswith("activation")}


def activated_conv(h: Rewriter) -> None:
    """activation(Conv(X, W, B) + Z)"""
    names = _ACTIVATIONS.get(h.string("activation", ""), ())
    parameters = h.floats("activation_params") or ()
    if len(parameters) < len(names):
        raise UnsupportedCase(f"its activation needs {len(names)} parameters, and there are {len(parameters)}")
    last = _activation(h, dict(zip(names, parameters, strict=False)))
    added: list[Step] = [] if h.operand(3) is None else [("Add", [h.operand(3)], {})]
    _end(h, [("Conv", [h.required(0), h.required(1), h.operand(2)], _plain(h)), *added, *last])


def activated_gemm(h: Rewriter) -> None:
    """activation(alpha A B + beta C)"""
    last = _activation(h, _named_parameters(h))
    _end(h, [("Gemm", [h.required(0), h.required(1), h.operand(2)], _plain(h)), *last])


def _named_parameters(h: Rewriter) -> dict[str, float]:
    names = _ACTIVATIONS.get(h.string("activation", ""), ())
    written = {name: f"activation_{name}" for name in names}
    return {name: h.float(key, 0.0) for name, key in written.items() if key in h.node.attributes}


def activated_matmul(h: Rewriter) -> None:
    """activation(alpha A' B'), with A' and B' transposed as the attributes say."""
    a = _transposed(h, h.required(0), "A")
    b = _transposed(h, h.required(1), "B")
    alpha = h.float("alpha", 1.0)
    scale: list[Step] = [] if alpha == 1 else [("Mul", [h.scalar(alpha, a, h.y)], {})]
    _end(h, [("MatMul", [a, b], {}), *scale, *_activation(h, _named_parameters(h))])


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


def bias_gelu(h: Rewriter) -> None:
    """x P(x + bias), P the normal distribution function or, for FastGelu, its approximation by tanh."""
    attributes: dict[str, Any] = {"approximate": "tanh"} if h.node.op_type == "FastGelu" else {}
    bias = h.operand(1)
    if bias is None:
        h.become("Gelu", h.required(0), **attributes)
    else:
        _end(h, [("Add", [h.required(0), bias], {}), ("Gelu", [], attributes)])


def _skipped(h: Rewriter, bias: ir.Value | None) -> ir.Value:
    """input + skip + bias, which may be the fourth result, too."""
    total = h.required(0)
    for term in (h.required(1), bias):
        if term is not None:
            total = h.e.op("Add", total, term)
    if len(h.node.outputs) > 3:
        h.redirect(h.node.outputs[3], total)
    return total


def skip_layer_norm(h: Rewriter) -> None:
    """LayerNormalization(input + skip + bias); the sum may be a result, too."""
    total = _skipped(h, h.operand(4))
    if len(h.node.outputs) > 3:
        h.node.resize_outputs(3)
    epsilon = h.float("epsilon", 1e-12)
    h.become("LayerNormalization", total, h.required(2), h.operand(3), axis=-1, epsilon=epsilon)


def simplified_layer_norm(h: Rewriter) -> None:
    """RMSNormalization, which ONNX Runtime has under this name in ai.onnx, too."""
    _drop_statistics(h)
    root_mean_square(h, h.required(0), h.required(1))


def skip_simplified_layer_norm(h: Rewriter) -> None:
    """RMSNormalization(input + skip + bias); the sum may be a result, too."""
    total = _skipped(h, h.operand(3))
    _drop_statistics(h)
    root_mean_square(h, total, h.required(2))


def _drop_statistics(h: Rewriter) -> None:
    if any(value.uses() or value.is_graph_output() for value in h.node.outputs[1:]):
        raise UnsupportedCase("its statistics are read")
    h.node.resize_outputs(1)


def blocks_matmul(h: Rewriter) -> None:
    """A W + bias: W `[K, N]` is stored as `[N, blocks, bytes]`, with 4 or 8 bits per number and a scale per block."""
    packed, zeros = h.array(h.operand(1)), h.array(h.operand(3))
    inner, outer, bits, block = (
        h.int(name, default) for name, default in (("K", 0), ("N", 0), ("bits", 4), ("block_size", 0))
    )
    if packed is None or bits not in (4, 8) or block < 1 or inner % block or packed.size * 8 != inner * outer * bits:
        raise UnsupportedCase("its weight is not stored in whole blocks of 4 or 8 bits")
    if (zeros is None) != (h.operand(3) is None) or (zeros is not None and zeros.dtype != np.uint8):
        raise UnsupportedCase("its zero points are not stored integers")
    if h.operand(4) is not None:
        raise UnsupportedCase("its weight has an order of its own (g_idx)")
    dtype, count = ir.DataType.UINT4 if bits == 4 else ir.DataType.UINT8, inner // block
    zeros = np.full((outer, count), 2 ** (bits - 1)) if zeros is None else _unpacked(zeros, outer, bits)[:, :count]
    numbers = h.e.const(_unpacked(packed, outer, bits).astype(dtype.numpy()), dtype)
    scales = h.e.reshape(h.required(2), [outer, count])
    weight = h.e.op("DequantizeLinear", numbers, scales, h.e.const(zeros.astype(dtype.numpy()), dtype), axis=1,
                    block_size=block)  # fmt: skip
    added: list[Step] = [] if h.operand(5) is None else [("Add", [h.operand(5)], {})]
    _end(h, [("MatMul", [h.required(0), h.e.op("Transpose", weight, perm=[1, 0])], {}), *added])


def _unpacked(stored: np.ndarray, rows: int, bits: int) -> np.ndarray:
    """The numbers in bytes, the lower half of a byte first."""
    stored = stored.reshape(rows, -1)
    return stored if bits == 8 else np.stack([stored & 15, stored >> 4], axis=-1).reshape(rows, -1)
