"""ONNX Runtime's quantized operators: about the same levels as its kernels compute, and gradients of their real meaning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.optimizer import optimized

U8 = TensorProto.UINT8

# Nodes between the quantized input q (scale s, zero point z) and the levels r (scale t, zero point o).
NODES = {
    "QLinearAdd": "r = com.microsoft.QLinearAdd (q, s, z, p, ps, pz, t, o)",
    "QLinearMul": "r = com.microsoft.QLinearMul (q, s, z, p, ps, pz, t, o)",
    "QLinearSigmoid": "r = com.microsoft.QLinearSigmoid (q, s, z, t, o)",
    "QLinearLeakyRelu": "r = com.microsoft.QLinearLeakyRelu <alpha = 0.2> (q, s, z, t, o)",
    "QLinearGlobalAveragePool": "r = com.microsoft.QLinearGlobalAveragePool (q, s, z, t, o)",
    "QLinearAveragePool": "r = com.microsoft.QLinearAveragePool <kernel_shape = [2, 2]> (q, s, z, t, o)",
    "QLinearConcat": "r = com.microsoft.QLinearConcat <axis = 1> (t, o, q, s, z, p, ps, pz)",
    "QLinearWhere": "r = com.microsoft.QLinearWhere (m, q, s, z, p, ps, pz, t, o)",
    "QGemm": "f = Reshape (q, flat) r = com.microsoft.QGemm <transB = 1, alpha = 0.5> (f, s, z, w, ws, wz, c, t, o)",
}


def model_of(name: str) -> onnx.ModelProto:
    """x, quantized, through the operator, and dequantized to y."""
    generator = np.random.default_rng(0)
    text = f"q = QuantizeLinear (x, s, z) {NODES[name]} y = DequantizeLinear (r, t, o)"
    graph = onnx.parser.parse_graph(f"g (float[2,4,6,6] x) => (float[A,B,C,D] y) {{ {text} }}")
    del graph.output[0].type.tensor_type.shape.dim[:]
    graph.output[0].type.tensor_type.ClearField("shape")
    for i, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{i}"
    scale = 0.01 if name == "QLinearSigmoid" else 0.06
    numbers = {
        "s": (1, np.asarray(0.03)), "z": (U8, np.asarray(120)), "t": (1, np.asarray(scale)), "o": (U8, np.asarray(100)),
        "ps": (1, np.asarray(0.02)), "pz": (U8, np.asarray(128)), "p": (U8, generator.integers(100, 150, (2, 4, 6, 6))),
        "w": (U8, generator.integers(120, 136, (3, 144))), "ws": (1, np.asarray(0.01)), "wz": (U8, np.asarray(128)),
        "c": (TensorProto.INT32, generator.integers(-500, 500, 3)), "flat": (TensorProto.INT64, np.asarray([2, -1])),
        "m": (TensorProto.BOOL, generator.integers(0, 2, (2, 4, 6, 6))),
    }  # fmt: skip
    used = {v for node in graph.node for v in node.input}
    graph.initializer.extend(
        helper.make_tensor(n, kind, a.shape, a.ravel().tolist()) for n, (kind, a) in numbers.items() if n in used
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize(("opset", "axis"), [(13, -1), (13, 1), (11, 1), (11, 2), (11, -1)])
def test_softmax_of_levels_has_the_axes_of_its_opset(opset: int, axis: int) -> None:
    node = f"r = com.microsoft.QLinearSoftmax <axis = {axis}, opset = {opset}> (q, s, z, t, o)"
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 13, "com.microsoft": 1]>
        g (float[2,3,4] x) => (float[2,3,4] y) <float s = {{0.02}}, uint8 z = {{128}}, float t = {{0.004}}, uint8 o = {{0}}>
        {{ q = QuantizeLinear (x, s, z) {node} y = DequantizeLinear (r, t, o) }}""")
    generator = np.random.default_rng(0)
    x, g = (generator.uniform(-1, 1, (2, 3, 4)).astype(np.float32) for _ in range(2))
    found = run(og.augment(model, wrt="inputs"), {"x": x, "y_grad": g})
    assert np.abs(found["y"] - run(model, {"x": x})["y"]).max() <= 0.0041
    numbers = torch.tensor(x, requires_grad=True)
    rows = numbers if opset >= 13 else numbers.reshape(*x.shape[: axis % 3], -1)
    (torch.softmax(rows, axis if opset >= 13 else -1).reshape(2, 3, 4) * torch.tensor(g)).sum().backward()
    np.testing.assert_allclose(found["x_grad"], numbers.grad, atol=0.01)


@pytest.mark.parametrize("name", NODES)
def test_levels_and_gradients(name: str) -> None:
    """Values within one level; gradients along a direction by differences that are large against the levels."""
    model = model_of(name)
    generator = np.random.default_rng(1)
    x = generator.uniform(-1, 1, (2, 4, 6, 6)).astype(np.float32)
    augmented = og.augment(model, wrt="inputs", cotangents="ones")
    assert not [node for node in augmented.graph.node if node.domain]
    got, want = run(augmented, {"x": x}), run(model, {"x": x})["y"]
    step = 0.01 if name == "QLinearSigmoid" else 0.06
    assert np.abs(got["y"] - want).max() <= step * 1.01
    ends = [
        float(run(model, {"x": x + shift})["y"].sum(dtype=np.float64)) for shift in (np.float32(0.3), np.float32(-0.3))
    ]
    slope = (ends[0] - ends[1]) / 0.6
    total = float(got["x_grad"].sum(dtype=np.float64))
    assert abs(total - slope) < 0.12 * max(abs(slope), float(np.abs(got["x_grad"]).sum()) / 4)


@pytest.mark.parametrize("shape", ["[1,4,8,8]", "[N,4,H,W]"])
@pytest.mark.parametrize("form", QuantFormat)
def test_a_file_with_its_channels_last_has_the_gradients_of_the_original(
    form: QuantFormat, shape: str, tmp_path: Path
) -> None:
    """At level "all", ONNX Runtime moves the channels of quantized convolutions and pools to the end."""
    draw = np.random.default_rng(0)
    sizes = {"w": (8, 4, 3, 3), "b": (8,), "v": (8, 8, 3, 3), "u": (8, 8, 3, 3)}
    stored = {name: (draw.standard_normal(size) / 4).astype(np.float32) for name, size in sizes.items()}
    text = f"""(float{shape} x) => (y) {{ c = Conv <pads = [1,1,1,1]> (x, w, b) r = Relu (c)
        p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r) d = Conv <pads = [1,1,1,1]> (p, v)
        s = AveragePool <kernel_shape = [2,2], strides = [2,2]> (d) y = Conv <pads = [1,1,1,1]> (s, u) }}"""
    onnx.save(graph_of(text, **stored), tmp_path / "plain.onnx")
    batches = [{"x": draw.standard_normal((1, 4, 8, 8)).astype(np.float32)} for _ in range(4)]
    quantize_static(tmp_path / "plain.onnx", tmp_path / "levels.onnx", _Reader(batches), quant_format=form)
    plain = onnx.load(tmp_path / "levels.onnx")
    moved = optimized(plain, tmp_path)
    assert {"NhwcMaxPool", "QLinearConv", "QLinearAveragePool"} <= {n.op_type for n in moved.graph.node if n.domain}
    feed = {"x": batches[0]["x"], "y_grad": draw.standard_normal((1, 8, 2, 2)).astype(np.float32)}
    want, got = (run(og.augment(model, wrt="inputs"), feed) for model in (plain, moved))
    (last,) = [node for node in moved.graph.node if node.output[0] == "y"]
    (step,) = [onnx.numpy_helper.to_array(t) for t in moved.graph.initializer if t.name == last.input[1]]
    assert np.abs(got["y"] - run(moved, {"x": feed["x"]})["y"]).max() < 1.01 * step  # the neighboring level
    error = np.linalg.norm(got["x_grad"] - want["x_grad"]) / np.linalg.norm(want["x_grad"])
    assert error < 0.02


class _Reader(CalibrationDataReader):  # type: ignore[misc] # it has no type hints
    """The batches for calibration, one by one."""

    def __init__(self, batches: list[dict[str, np.ndarray]]) -> None:
        self._batches = iter(batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("directions", [1, 2])
def test_dynamically_quantized_lstm(directions: int, *, per_channel: bool, tmp_path: Path) -> None:
    """As `onnxruntime.quantization.quantize_dynamic` writes it: near the kernel's values, gradients of PyTorch's LSTM."""
    torch.manual_seed(0)
    net = torch.nn.LSTM(6, 8, bidirectional=directions == 2)
    x = np.random.default_rng(0).normal(size=(12, 3, 6)).astype(np.float32)
    ways = [False, True][:directions]
    stacked = {kind: np.stack([_onnx_order(net, kind, back) for back in ways]) for kind in ("weight_ih", "weight_hh")}
    biases = [np.concatenate([_onnx_order(net, kind, back) for kind in ("bias_ih", "bias_hh")]) for back in ways]
    direction = "bidirectional" if directions == 2 else "forward"
    layer = f'y = LSTM <hidden_size = 8, direction = "{direction}"> (x, w, r, b)'
    text = f"(float[12,3,6] x) => (float[12,D,3,8] y) {{ {layer} }}"
    plain = graph_of(text, opset=17, w=stacked["weight_ih"], r=stacked["weight_hh"], b=np.stack(biases))
    onnx.save(plain, tmp_path / "plain.onnx")
    options = {"per_channel": per_channel, "reduce_range": True}  # without VNNI, sums of 8 bits are clipped
    quantize_dynamic(tmp_path / "plain.onnx", tmp_path / "quantized.onnx", **options)
    model = onnx.load(tmp_path / "quantized.onnx")
    assert "DynamicQuantizeLSTM" in {node.op_type for node in model.graph.node}
    seed = np.random.default_rng(1).normal(size=(12, directions, 3, 8)).astype(np.float32)
    augmented = og.augment(model, wrt="inputs")
    assert not [node for node in augmented.graph.node if node.domain]
    got, want = run(augmented, {"x": x, "y_grad": seed}), run(model, {"x": x})["y"]
    assert np.abs(got["y"] - want).max() < 0.02
    xt = torch.tensor(x, requires_grad=True)
    y = net(xt)[0].reshape(12, 3, directions, 8).transpose(1, 2)
    assert np.abs(got["y"] - y.detach().numpy()).max() < 0.02
    y.backward(torch.tensor(seed))
    assert xt.grad is not None
    error = np.linalg.norm(got["x_grad"] - xt.grad.numpy()) / np.linalg.norm(xt.grad.numpy())
    assert 0 < error < 0.02  # the weights are rounded


def test_a_trained_dynamically_quantized_lstm_is_exported(tmp_path: Path) -> None:
    """The kernel's results depend on the number of threads, so they are compared as those of quantized graphs."""
    generator, hidden, size = np.random.default_rng(0), 64, 32

    def levels(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        w = generator.standard_normal(shape).astype(np.float32) / 4
        scale = np.abs(w).max() / 127
        return np.round(w / scale).astype(np.int8), np.array([scale], np.float32)

    (w, ws), (r, rs), zero = levels(1, size, 4 * hidden), levels(1, hidden, 4 * hidden), np.zeros(1, np.int8)
    text = f"""(float[T, B, {size}] x) => (float[B, 3] y) <int64[1] first = {{0}}> {{
        s, hn, cn = com.microsoft.DynamicQuantizeLSTM <hidden_size = {hidden}>
            (x, w, r, , , , , , w_scale, w_zero_point, r_scale, r_zero_point)
        h = Squeeze (hn, first) y = MatMul (h, "fc.weight") }}"""
    head = (generator.standard_normal((hidden, 3)) / 5).astype(np.float32)
    stored = {
        "w": w,
        "r": r,
        "w_scale": ws,
        "r_scale": rs,
        "w_zero_point": zero,
        "r_zero_point": zero,
        "fc.weight": head,
    }
    model = graph_of(text, domains=', "com.microsoft": 1', **stored)
    x = (generator.standard_normal((12, 2, size)) * 0.3).astype(np.float32)
    x[0, 0, 0] = 8  # one loud sample: the range of the dynamic quantization
    trainer = og.Trainer(og.build_training(model, loss="mse", optimizer=og.optim.AdamW(1e-3)))
    trainer.step({"x": x, "target": np.zeros((2, 3), np.float32)})
    trainer.export(tmp_path / "trained.onnx")
    kernel = [run(str(tmp_path / "trained.onnx"), {"x": x}, options={"threads": n})["y"] for n in (1, 2)]
    own = trainer.predict([{"x": x}])["y"]
    for values in kernel:
        assert np.linalg.norm(own - values) < 0.02 * np.linalg.norm(values)


def _onnx_order(net: torch.nn.LSTM, kind: str, back: bool) -> np.ndarray:
    """A parameter with the gates i, o, f, c, which are i, f, c, o in PyTorch."""
    i, f, c, o = getattr(net, f"{kind}_l0{'_reverse' if back else ''}").detach().numpy().reshape(4, 8, -1)
    return np.concatenate([i, o, f, c]).squeeze()
