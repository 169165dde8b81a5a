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
    got = run(og.augment(model, wrt="inputs", cotangents="ones"), {"x": x})["x_grad"]
    np.testing.assert_allclose(got, np.broadcast_to((w - wz).sum(1), (2, 5)), rtol=1e-5)


@pytest.mark.parametrize("operands", ["p, b", "b, p"])
def test_an_integer_bias_is_added(operands: str) -> None:
    """ONNX Runtime's dynamic quantization adds the bias of a convolution in int32."""
    text = f"""q, s, z = DynamicQuantizeLinear (x) p = MatMulInteger (q, w, z) t = Add ({operands})
        f = Cast <to = 1> (t) y = Mul (f, s)"""
    w, b = weights(4, 5, 3), np.asarray([40, -7, 1000])
    model = model_of(text, {"w": (TensorProto.INT8, w), "b": (TensorProto.INT32, b)}, (2, 5))
    x = data(2, 5)
    got = run(og.augment(model, wrt="inputs", cotangents="ones"), {"x": x})
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
    got = run(og.augment(model, wrt="inputs", cotangents="ones"), {"x": x})["x_grad"]
    rounded = np.round(x / np.float32(0.1))
    np.testing.assert_array_equal(got, (rounded > 0) & (rounded < top * 10))


def test_values_between_quantizers_can_be_named() -> None:
    """A value that DequantizeLinear computes, as a member of wrt and of `of`, keeps its name."""
    text = "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = Mul (d, d)"
    model = model_of(text, quantizer("", 0.1, 100), (3, 4), "y", "d")
    x = data(3, 4) / 4
    got = run(og.augment(model, wrt=["d"], of=["y"], cotangents="ones"), {"x": x})
    np.testing.assert_allclose(got["d_grad"], 2 * got["d"], rtol=1e-6)
    got = run(og.vjp(model, wrt=["x"], of=["d"], cotangents="ones"), {"x": x})
    np.testing.assert_array_equal(got["x_grad"], 1)


def test_without_the_estimator_quantizers_are_steps() -> None:
    model = model_of("q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z)", quantizer("", 0.1, 100), (3, 4))
    with pytest.warns(UserWarning, match="use straight_through=True"):
        steps = og.augment(model, wrt="inputs", cotangents="ones", straight_through=False)
    np.testing.assert_array_equal(run(steps, {"x": data(3, 4)})["x_grad"], 0)


def test_quantizers_beside_the_derivative_are_left_alone() -> None:
    text = "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = Mul (d, k)"
    model = model_of(text, {**quantizer("", 0.1, 100), "k": (1, np.ones(4))}, (3, 4))
    operators = [node.op_type for node in og.vjp(model, wrt=["k"], cotangents="ones").graph.node]
    assert operators[:3] == ["QuantizeLinear", "DequantizeLinear", "Mul"]
    assert "Less" not in operators


# -- bodies ------------------------------------------------------------------------------------------------------------


_STORED = (
    "<float[2,2] w = {1, -0.5, 0.25, 0.75}, float s = {0.0625}, int8 z = {3}, int64 few = {3}, float least = {-9}>"
)
_LAYER = """wd = DequantizeLinear (wq, s, z)
            m = MatMul (h, wd)
            a = Add (m, u)
            q = QuantizeLinear (a, s, z)
            d = DequantizeLinear (q, s, z)
            h1 = Sin (d)"""
_SCAN = f"""y = Scan <num_scan_inputs = 1, scan_input_axes = [1],
            body = b (float[N,2] h, float[N,2] u) => (float[N,2] h1) {{ {_LAYER} }}> (h0, x)"""
_LOOP = f"""t = Shape <start = 1, end = 2> (x)
            count = Squeeze (t)
            y = Loop <body = b (int64 i, bool go, float[N,2] h) => (bool go1, float[N,2] h1) {{
                go1 = Identity (go)
                u = Gather <axis = 1> (x, i)
                {_LAYER} }}> (count, , h0)"""


def _recurrent(loop: str, turns: int | str) -> onnx.ModelProto:
    """A quantized weight that the body reads, and a quantizer in the body."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,2] h0, float[N,{turns},2] x) => (float[N,2] y) {_STORED} {{ wq = QuantizeLinear (w, s, z) {loop} }}"""
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("turns", ["T", 4], ids=["unknown", "unrolled"])
@pytest.mark.parametrize("loop", [_SCAN, _LOOP], ids=["Scan", "Loop"])
def test_quantizers_in_loops(loop: str, turns: int | str) -> None:
    """Gradients of state, sequence, weight and scale against the same turns in PyTorch; values keep their bits."""
    model = _recurrent(loop, turns)
    feeds = {"h0": data(3, 2) / 4, "x": data(3, 4, 2) / 4}
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in feeds.items()}
    leaves["w"] = torch.tensor([[1, -0.5], [0.25, 0.75]], requires_grad=True)
    leaves["s"] = torch.tensor(0.0625, requires_grad=True)
    names = list(leaves)

    def layer(v: torch.Tensor) -> torch.Tensor:
        return fake(v, leaves["s"], 3, -128, 127)  # type: ignore[arg-type]

    h = leaves["h0"]
    for turn in range(4):
        h = torch.sin(layer(h @ layer(leaves["w"]) + leaves["x"][:, turn]))
    seed = data(3, 2)
    (h * torch.tensor(seed)).sum().backward()
    got = run(og.augment(model, wrt=names, of="y"), feeds | {"y_grad": seed})
    np.testing.assert_array_equal(got["y"], run(model, feeds)["y"])
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert float(leaf.grad.abs().max()) > 0
        np.testing.assert_allclose(got[f"{name}_grad"], leaf.grad.numpy(), rtol=2e-5, atol=1e-5)
    tangents = {f"{name}_tangent": np.cos(np.arange(a.size, dtype="f")).reshape(a.shape) for name, a in feeds.items()}
    pushed = run(og.jvp(model, wrt=list(feeds), of="y"), feeds | tangents)["y_tangent"]
    pulled = sum(float(np.vdot(tangents[f"{name}_tangent"], got[f"{name}_grad"])) for name in feeds)
    assert float(np.vdot(pushed, seed)) == pytest.approx(pulled, rel=1e-4)


@pytest.mark.parametrize("taken", [True, False])
def test_quantizers_in_branches(taken: bool) -> None:
    """One branch quantizes, also by a dynamic range, and reads levels of the outer graph; the other does not."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[N,2] x, bool p) => (float[N,2] y) {_STORED} {{
        q = QuantizeLinear (x, s, z)
        y = If (p) <then_branch = t () => (float[N,2] a) {{
                d = DequantizeLinear (q, s, z)
                e, es, ez = DynamicQuantizeLinear (x)
                f = DequantizeLinear (e, es, ez)
                a = Mul (d, f) }},
            else_branch = f () => (float[N,2] b) {{ b = Sin (x) }}> }}"""
    model, x = onnx.parser.parse_model(text), data(4, 2)
    xt = torch.tensor(x, requires_grad=True)
    feeds = {"x": x, "p": np.array(taken)}
    want = run(model, feeds)["y"]
    y = torch.sin(xt)
    if taken:
        real = fake(xt, 0.0625, 3, -128, 127)
        dynamic = torch.tensor(want) / real.detach() - xt.detach() + xt
        y = real * dynamic
    y.sum().backward()
    got = run(og.augment(model, wrt="inputs", of="y", cotangents="ones"), feeds)
    np.testing.assert_array_equal(got["y"], want)
    assert xt.grad is not None
    np.testing.assert_allclose(got["x_grad"], xt.grad.numpy(), rtol=1e-4, atol=1e-4)


def test_quantizers_in_functions() -> None:
    """Functions are inlined: the gradient is that of their nodes."""
    text = """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (float[4] x) => (float[4] y) <float s = {0.5}, int8 z = {0}> { y = own.square (x, s, z) }
        <opset_import: ["" : 21], domain: "own"> square (x, s, z) => (y) {
            q = QuantizeLinear (x, s, z)
            d = DequantizeLinear (q, s, z)
            y = Mul (d, d)
        }"""
    x = np.asarray([0.3, 1.2, -2.0, 90.0], np.float32)
    got = run(og.augment(onnx.parser.parse_model(text), wrt="inputs", cotangents="ones"), {"x": x})["x_grad"]
    np.testing.assert_array_equal(got, [1, 2, -4, 0])
