"""Straight-through derivatives through integer operators, against the same network on real numbers in PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.quantized import model_of, quantizer

F = torch.nn.functional

XS, XZ = 0.05, 120
WS = np.asarray([0.01, 0.02, 0.015, 0.03], np.float32)
YS, YZ = 0.1, 100


def fake(x: torch.Tensor, scale: float, zero: int, low: int = 0, high: int = 255) -> torch.Tensor:
    """Quantized and dequantized numbers, straight through."""
    levels = torch.clamp(x / scale + zero, low, high)
    return (levels + (levels.round() - levels).detach() - zero) * scale


def weights(seed: int, *shape: int) -> np.ndarray:
    """Seven bits: on x86 without VNNI, ONNX Runtime adds pairs of products of uint8 and int8 in 16 bits, and clips them."""
    return np.random.default_rng(seed).integers(-63, 64, shape)


def data(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32) * 4


def differentiated(model: onnx.ModelProto, x: np.ndarray, want: torch.Tensor, at: torch.Tensor) -> None:
    """Compare value and input gradient of sum y cos(k) with PyTorch's; the value of the model may not change."""
    seed = np.cos(np.arange(want.numel(), dtype=np.float32)).reshape(want.shape)
    (want * torch.tensor(seed)).sum().backward()
    got = run(og.augment(model, wrt="inputs", of="y"), {"x": x, "y_grad": seed})
    np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])
    assert at.grad is not None
    assert float(at.grad.abs().max()) > 0
    np.testing.assert_allclose(got["y"], want.detach().numpy(), rtol=1e-4, atol=YS * 1.01)
    np.testing.assert_allclose(got["x_grad"], at.grad.numpy(), rtol=1e-5, atol=1e-5 * float(at.grad.abs().max()))


CONV = "QLinearConv <pads = [1,1,1,1], strides = [2,1]> (q, xs, xz, w, ws, wz, ys, yz, b)"


@pytest.mark.parametrize("per_channel", [False, True])
def test_quantized_convolution(per_channel: bool) -> None:
    w, b = weights(1, 4, 3, 3, 3), weights(2, 4) * 10
    ws = WS if per_channel else WS[:1].reshape(())
    stored = {
        **quantizer("x", XS, XZ),
        **quantizer("y", YS, YZ),
        "w": (TensorProto.INT8, w),
        "ws": (1, ws),
        "wz": (TensorProto.INT8, np.zeros(ws.shape, int)),
        "b": (TensorProto.INT32, b),
    }
    model = model_of(
        f"q = QuantizeLinear (x, xs, xz) r = {CONV} y = DequantizeLinear (r, ys, yz)", stored, (2, 3, 6, 5)
    )
    x = data(2, 3, 6, 5)
    xt = torch.tensor(x, requires_grad=True)
    real = torch.tensor(w * ws[:, None, None, None] if per_channel else w * ws, dtype=torch.float32)
    bias = torch.tensor(b * ws * XS, dtype=torch.float32)
    y = fake(F.conv2d(fake(xt, XS, XZ), real, bias, padding=1, stride=(2, 1)), YS, YZ)
    differentiated(model, x, y, xt)


@pytest.mark.parametrize("other_scale", [False, True])
def test_quantized_product_between_operators_that_move_levels(other_scale: bool) -> None:
    """MaxPool, Pad with a level, Concat, Transpose, Reshape and Relu of levels; the reader may have another scale."""
    text = (
        "q = QuantizeLinear (x, xs, xz) p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (q) "
        "t = Transpose <perm = [0, 2, 3, 1]> (p) k = Pad (t, pads, level) c = Concat <axis = -1> (k, more) "
        "f = Reshape (c, flat) r = QLinearMatMul (f, as, az, w, ws, wz, ys, yz) y = DequantizeLinear (r, ys, yz)"
    )
    w = weights(3, 5, 6)
    a_scale, a_zero = (0.04, 110) if other_scale else (XS, XZ)
    stored = {
        **quantizer("x", XS, XZ),
        **quantizer("a", a_scale, a_zero),
        **quantizer("y", YS, YZ),
        "w": (TensorProto.INT8, w),
        "ws": (1, np.asarray(0.02, np.float32)),
        "wz": (TensorProto.INT8, np.asarray(3)),
        "level": (TensorProto.UINT8, np.asarray(130)),
        "pads": (TensorProto.INT64, np.asarray([0, 0, 0, 1, 0, 0, 0, 0])),
        "more": (TensorProto.UINT8, np.full((2, 3, 2, 1), 140)),
        "flat": (TensorProto.INT64, np.asarray([-1, 5])),
    }
    model = model_of(text, stored, (2, 3, 6, 4))
    x = data(2, 3, 6, 4)
    xt = torch.tensor(x, requires_grad=True)
    pooled = F.max_pool2d(fake(xt, XS, XZ), 2).permute(0, 2, 3, 1)
    padded = F.pad(pooled, (1, 0), value=(130 - XZ) * XS)
    wide = torch.cat([padded, torch.full((2, 3, 2, 1), (140 - XZ) * XS)], -1).reshape(-1, 5)
    levels = (wide / XS + XZ - a_zero) * a_scale
    y = fake(levels @ torch.tensor((w - 3) * 0.02, dtype=torch.float32), YS, YZ)
    differentiated(model, x, y, xt)


@pytest.mark.parametrize("conv", [False, True])
def test_products_of_integers_after_dynamic_quantization(conv: bool) -> None:
    """The scale is a function of the extremes of x, and counts as a constant: a linear layer has a linear gradient."""
    layer = "ConvInteger <pads = [1, 1]> (q, w, z, wz)" if conv else "MatMulInteger (q, w, z, wz)"
    text = f"q, s, z = DynamicQuantizeLinear (x) p = {layer} f = Cast <to = 1> (p) m = Mul (s, ws) y = Mul (f, m)"
    w = weights(4, *((4, 3, 3) if conv else (5, 6)))
    stored = {
        "w": (TensorProto.UINT8, w + 128),
        "ws": (1, np.asarray(0.02, np.float32)),
        "wz": (TensorProto.UINT8, np.asarray(131)),
    }
    shape = (2, 3, 5)
    model = model_of(text, stored, shape)
    x = data(*shape)
    xt = torch.tensor(x, requires_grad=True)
    scale = float(max(x.max(), 0) - min(x.min(), 0)) / 255
    real = torch.tensor((w - 3) * 0.02, dtype=torch.float32)
    inputs = fake(xt, scale, round(-float(x.min()) / scale), -(10**6), 10**6)
    differentiated(model, x, F.conv1d(inputs, real, padding=1) if conv else inputs @ real, xt)


def test_columns_with_zero_points_of_their_own() -> None:
    text = "q, s, z = DynamicQuantizeLinear (x) p = MatMulInteger (q, w, z, wz) f = Cast <to = 1> (p) y = Mul (f, s)"
    w, wz = weights(4, 5, 3) + 128, np.asarray([128, 3, 250])
    model = model_of(text, {"w": (TensorProto.UINT8, w), "wz": (TensorProto.UINT8, wz)}, (2, 5))
    x = data(2, 5)
    got = run(og.augment(model, wrt="inputs", seed="ones"), {"x": x})["x_grad"]
    np.testing.assert_allclose(got, np.broadcast_to((w - wz).sum(1), (2, 5)), rtol=1e-5)


@pytest.mark.parametrize("operands", ["p, b", "b, p"])
def test_an_integer_bias_is_added(operands: str) -> None:
    """ONNX Runtime's dynamic quantization adds the bias of a convolution in int32."""
    text = f"""q, s, z = DynamicQuantizeLinear (x) p = MatMulInteger (q, w, z) t = Add ({operands})
        f = Cast <to = 1> (t) y = Mul (f, s)"""
    w, b = weights(4, 5, 3), np.asarray([40, -7, 1000])
    model = model_of(text, {"w": (TensorProto.INT8, w), "b": (TensorProto.INT32, b)}, (2, 5))
    x = data(2, 5)
    got = run(og.augment(model, wrt="inputs", seed="ones"), {"x": x})
    np.testing.assert_allclose(got["x_grad"], np.broadcast_to(w.sum(1), (2, 5)), rtol=1e-5)


@pytest.mark.parametrize("operator", ["Relu (q)", "Max (q, z)", "Clip (q, z, top)"])
def test_levels_that_are_compared(operator: str) -> None:
    """Relu of signed levels, and its forms with a zero point."""
    kind = TensorProto.INT8 if operator.startswith("Relu") else TensorProto.UINT8
    zero = 0 if kind == TensorProto.INT8 else 100
    text = f"q = QuantizeLinear (x, s, z) r = {operator} y = DequantizeLinear (r, s, z)"
    stored = {"s": (1, np.asarray(0.1, np.float32)), "z": (kind, np.asarray(zero)), "top": (kind, np.asarray(120))}
    model = model_of(text, stored, (4, 6))
    x = data(4, 6)
    top = 2.0 if operator.startswith("Clip") else np.inf
    got = run(og.augment(model, wrt="inputs", seed="ones"), {"x": x})["x_grad"]
    rounded = np.round(x / np.float32(0.1))
    np.testing.assert_array_equal(got, (rounded > 0) & (rounded < top * 10))


def test_values_between_quantizers_can_be_named() -> None:
    """A value that DequantizeLinear computes, as a member of wrt and of `of`, keeps its name."""
    text = "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = Mul (d, d)"
    model = model_of(text, quantizer("", 0.1, 100), (3, 4), "y", "d")
    x = data(3, 4) / 4
    got = run(og.augment(model, wrt=["d"], of=["y"], seed="ones"), {"x": x})
    np.testing.assert_allclose(got["d_grad"], 2 * got["d"], rtol=1e-6)
    got = run(og.vjp(model, wrt=["x"], of=["d"], seed="ones"), {"x": x})
    np.testing.assert_array_equal(got["x_grad"], 1)


def test_without_the_estimator_quantizers_are_steps() -> None:
    model = model_of("q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z)", quantizer("", 0.1, 100), (3, 4))
    with pytest.warns(UserWarning, match="use straight_through=True"):
        steps = og.augment(model, wrt="inputs", seed="ones", straight_through=False)
    np.testing.assert_array_equal(run(steps, {"x": data(3, 4)})["x_grad"], 0)


def test_quantizers_beside_the_derivative_are_left_alone() -> None:
    text = "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = Mul (d, k)"
    model = model_of(text, {**quantizer("", 0.1, 100), "k": (1, np.ones(4))}, (3, 4))
    operators = [node.op_type for node in og.vjp(model, wrt=["k"], seed="ones").graph.node]
    assert operators[:3] == ["QuantizeLinear", "DequantizeLinear", "Mul"]
    assert "Less" not in operators
