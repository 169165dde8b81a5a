"""Fused operators of `com.microsoft`, as ONNX Runtime writes them into a model that it optimized, taken apart again.

What comes out are the plain operators that were fused, so that their rules apply, and ONNX Runtime fuses them anew when it
loads the result. It can, since the slopes of Relu, LeakyRelu, Tanh, HardSigmoid and ReLU6 are read from the result: nothing
but the activation needs the value before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnx_convgrad.frontend.opset.rewriter import AttributeValue, Rewriter, Unsupported

__all__ = ["activated_conv", "activated_gemm", "activated_matmul", "bias_gelu", "quick_gelu", "skip_layer_norm"]

Step: TypeAlias = tuple[str, list[ir.Value | None], dict[str, AttributeValue]]
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
    """A chain of operators, each applied to the result of the one before and to operands; the node becomes the last."""
    value: list[ir.Value | None] = []
    for op_type, operands, attributes in steps[:-1]:
        value = [h.emit(op_type, [*value, *operands], attributes, dtype=h.dtype(h.input(0), h.node.outputs[0]))]
    op_type, operands, attributes = steps[-1]
    h.become(op_type, [*value, *operands], attributes)


def _activation(h: Rewriter, given: Mapping[str, float | None]) -> list[Step]:
    """The step of the attribute `activation`, if there is one; `given` holds its parameters."""
    name = h.get_string("activation", "")
    if not name:
        return []
    if name not in _ACTIVATIONS:
        raise Unsupported(f"its activation {name!r} is not one that ONNX Runtime fuses")
    numbers = {key: value for key, value in given.items() if value is not None}
    if name == "Clip":
        bounds = [h.scalar(numbers[key], h.required(0), key, h.node.outputs[0]) for key in ("min", "max")]
        return [("Clip", list(bounds), {})]
    return [(name, [], dict(numbers))]


def _plain(node: ir.Node) -> dict[str, AttributeValue]:
    """The attributes that are not the activation's."""
    return {name: value for name, value in node.attributes.items() if not name.startswith("activation")}


def activated_conv(node: ir.Node, h: Rewriter) -> None:
    """activation(Conv(X, W, B) + Z)"""
    names = _ACTIVATIONS.get(h.get_string("activation", ""), ())
    parameters = h.get_floats("activation_params") or ()
    if len(parameters) < len(names):
        raise Unsupported(f"its activation needs {len(names)} parameters, and there are {len(parameters)}")
    last = _activation(h, dict(zip(names, parameters, strict=False)))
    added: list[Step] = [] if h.input(3) is None else [("Add", [h.input(3)], {})]
    _end(h, [("Conv", [h.required(0), h.required(1), h.input(2)], _plain(node)), *added, *last])


def activated_gemm(node: ir.Node, h: Rewriter) -> None:
    """activation(alpha A B + beta C)"""
    last = _activation(h, _named_parameters(h))
    _end(h, [("Gemm", [h.required(0), h.required(1), h.input(2)], _plain(node)), *last])


def _named_parameters(h: Rewriter) -> dict[str, float | None]:
    names = _ACTIVATIONS.get(h.get_string("activation", ""), ())
    written = {name: f"activation_{name}" for name in names}
    return {name: h.get_float(key, 0.0) if key in h.node.attributes else None for name, key in written.items()}


def activated_matmul(node: ir.Node, h: Rewriter) -> None:
    """activation(alpha A' B'), A' and B' being transposed as the attributes say."""
    a = _transposed(h, h.required(0), "A")
    b = _transposed(h, h.required(1), "B")
    alpha = h.get_float("alpha", 1.0)
    scale: list[Step] = [] if alpha == 1 else [("Mul", [h.scalar(alpha, a, "alpha", node.outputs[0])], {})]
    _end(h, [("MatMul", [a, b], {}), *scale, *_activation(h, _named_parameters(h))])


def _transposed(h: Rewriter, value: ir.Value, operand: str) -> ir.Value:
    """`transBatch` moves the first axis to the last place but one; then `trans` swaps the last two."""
    batch, swap = h.get_int(f"transBatch{operand}", 0), h.get_int(f"trans{operand}", 0)
    if not batch and not swap:
        return value
    if value.shape is None:
        raise Unsupported(f"the rank of its transposed operand {value.name!r} is unknown: give the input shapes")
    rank = len(value.shape)
    if rank < 2:
        return value
    order = [*range(1, rank - 1), 0, rank - 1] if batch else list(range(rank))
    if swap:
        order[-2:] = order[:-3:-1]
    return h.emit("Transpose", [value], {"perm": order}, dtype=h.dtype(value))


def bias_gelu(node: ir.Node, h: Rewriter) -> None:
    """x P(x + bias), P the normal distribution function or, for FastGelu, its approximation by tanh."""
    attributes: dict[str, AttributeValue] = {"approximate": "tanh"} if node.op_type == "FastGelu" else {}
    bias = h.input(1)
    if bias is None:
        h.become("Gelu", [h.required(0)], attributes)
    else:
        _end(h, [("Add", [h.required(0), bias], {}), ("Gelu", [], attributes)])


def quick_gelu(node: ir.Node, h: Rewriter) -> None:
    """x sigmoid(alpha x)"""
    x, y = h.required(0), node.outputs[0]
    alpha, dtype = h.get_float("alpha", 1.702), h.dtype(x, y)
    scaled = x if alpha == 1 else h.emit("Mul", [x, h.scalar(alpha, x, "alpha", y)], dtype=dtype)
    h.become("Mul", [x, h.emit("Sigmoid", [scaled], dtype=dtype)])


def skip_layer_norm(node: ir.Node, h: Rewriter) -> None:
    """LayerNormalization(input + skip + bias), which may be a result of its own."""
    total, dtype = h.required(0), h.dtype(h.required(0), node.outputs[0])
    for term in (h.required(1), h.input(4)):
        if term is not None:
            total = h.emit("Add", [total, term], dtype=dtype)
    if len(node.outputs) > 3:
        h.redirect(node.outputs[3], total)
        node.resize_outputs(3)
    epsilon = h.get_float("epsilon", 1e-12)
    h.become("LayerNormalization", [total, h.required(2), h.input(3)], {"axis": -1, "epsilon": epsilon})
