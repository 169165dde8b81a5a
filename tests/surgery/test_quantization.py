"""Quantization-aware training: steps equal PyTorch's, and the exported file holds integers that ONNX Runtime fuses."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime.quantization
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional

import onnx_convgrad as og
from onnx_convgrad.ir.notes import QUANTIZATION
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.quantized import LABELS, X, depthwise, folded, fused_operators

SGD = og.optim.SGD(1.0)


@cache
def quantized() -> onnx.ModelProto:
    return og.transforms.insert_quantizers(depthwise(), {"x": X})


def stored(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def fake(x: torch.Tensor, scale: torch.Tensor, zero: int = 0, *, axis: int | None = None) -> torch.Tensor:
    """Quantized and dequantized int8, straight through, as in the appendix of Esser et al. 2020."""
    step = scale if axis is None else scale.reshape(-1, *[1] * (x.ndim - 1))
    levels = torch.clamp(
        x / step + zero, -128.001, 127.001
    )  # the largest weight, which determines the scale, is inside
    return (levels + (levels.round() - levels).detach() - zero) * step


def gradscale(scale: torch.Tensor, count: int) -> torch.Tensor:
    """`gradscale` of the appendix: the value stays, the gradient is divided by the root of count times 127."""
    factor = 1 / np.sqrt(count * 127)
    return (scale - scale * factor).detach() + scale * factor


class Reference:
    """The quantized network in PyTorch, with the stored values as parameters."""

    def __init__(self, model: onnx.ModelProto, *, learned: bool) -> None:
        arrays = stored(model)
        self.learned = learned
        self.zeros = {
            n.removesuffix("_zero_point"): int(a) for n, a in arrays.items() if n.endswith("zero_point") and not a.ndim
        }
        self.values = {}
        for name in ("c1", "c2", "c3", "fc"):
            levels, scale = arrays[f"{name}.bias_quantized"], arrays[f"{name}.bias_quantized_scale"]
            self.values[f"{name}.weight"] = torch.tensor(arrays[f"{name}.weight"])
            self.values[f"{name}.bias"] = torch.tensor((levels * scale).astype(np.float32))
        self.values |= {n: torch.tensor(a) for n, a in arrays.items() if n.endswith("_scale") and "quantized" not in n}
        for name, value in self.values.items():
            value.requires_grad_(learned or not name.endswith("_scale"))

    def scale(self, name: str, count: int) -> torch.Tensor:
        value = self.values[f"{name}_scale"]
        return gradscale(value, count) if self.learned else value

    def weight(self, name: str) -> torch.Tensor:
        w = self.values[f"{name}.weight"]
        return fake(w, self.scale(f"{name}.weight", w[0].numel()), axis=0)

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return fake(x, self.scale(name, x[0].numel()), self.zeros[name])

    def __call__(self, x: torch.Tensor, names: list[str]) -> torch.Tensor:
        v = self.values
        first, second, third, fourth, fifth, last = names
        h = self.activation(x, first)
        h = self.activation(torch.relu(functional.conv2d(h, self.weight("c1"), v["c1.bias"], padding=1)), second)
        h = functional.conv2d(h, self.weight("c2"), v["c2.bias"], padding=1, groups=8)
        h = self.activation(torch.clamp(h, 0, 6), third)
        h = self.activation(torch.relu(functional.conv2d(h, self.weight("c3"), v["c3.bias"])), fourth)
        h = self.activation(h.mean((2, 3)), fifth)
        return self.activation(functional.linear(h, self.weight("fc"), v["fc.bias"]), last)


@pytest.mark.parametrize("mode", ["qat", "lsq"])
def test_steps_equal_those_of_pytorch(mode: str) -> None:
    """All gradients of a network; few values are so near the middle between two levels that both round differently."""
    model = quantized()
    program = og.build_training(model, loss="cross_entropy", optimizer=SGD, quantization=mode)
    got = run(program.gradients, {"x": X[:4], "target": LABELS[:4]})
    reference = Reference(model, learned=mode == "lsq")
    activations = [
        n.input[0] for n in model.graph.node if n.op_type == "QuantizeLinear" and ".weight" not in n.input[0]
    ]
    names = [
        next(n.input[1] for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == a)
        for a in activations
    ]
    y = reference(torch.tensor(X[:4]), [name.removesuffix("_scale") for name in names])
    loss = torch.nn.functional.cross_entropy(y, torch.tensor(LABELS[:4]))
    loss.backward()
    np.testing.assert_allclose(got["loss"], float(loss.detach()), rtol=1e-5)
    trained = {p.name: p.gradient for p in program.manifest.parameters}
    assert trained.keys() == {name for name, value in reference.values.items() if value.requires_grad}
    for name, gradient in trained.items():
        want = reference.values[name].grad
        assert want is not None
        error = np.linalg.norm(got[gradient] - want.numpy()) / np.linalg.norm(want.numpy())
        assert error < 5e-3, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("mode", ["qat", "lsq"])
def test_training_lowers_the_loss_and_exports_integers(mode: str, tmp_path: Path) -> None:
    program = og.build_training(quantized(), loss="cross_entropy", optimizer=og.optim.Adam(1e-2), quantization=mode)
    trainer = og.Trainer(program)
    losses = [float(trainer.step({"x": X, "target": LABELS})["loss"]) for _ in range(40)]
    assert losses[-1] < 0.95 * losses[0]
    path = tmp_path / "trained.onnx"
    trainer.export(path)
    exported = onnx.load(path)
    onnx.checker.check_model(exported, full_check=True)
    arrays = stored(exported)
    for name in ("c1", "c2", "c3", "fc"):
        assert arrays[f"{name}.weight_quantized"].dtype == np.int8
        assert arrays[f"{name}.bias_quantized"].dtype == np.int32
        assert f"{name}.weight" not in arrays
    assert QUANTIZATION not in {p.key for p in exported.metadata_props}
    fused = fused_operators(path, tmp_path)
    assert (fused["QLinearConv"], fused["QGemm"], fused["Conv"], fused["Gemm"]) == (3, 1, 0, 0)
    assert min(float(a.min()) for n, a in arrays.items() if n.endswith("_scale")) > 0
    again = og.Trainer(og.TrainingProgram.load(_saved(program, tmp_path / "program")))
    again.export(tmp_path / "untrained.onnx")
    assert stored(onnx.load(tmp_path / "untrained.onnx"))["c1.weight_quantized"].dtype == np.int8


def _saved(program: og.TrainingProgram, folder: Path) -> Path:
    program.save(folder)
    return folder


class _Reader(onnxruntime.quantization.CalibrationDataReader):
    def __init__(self) -> None:
        self.left = [{"x": X}]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.left.pop() if self.left else None


@cache
def third_party(form: str, folder: Path) -> onnx.ModelProto:
    """The network as ONNX Runtime's quantizer stores it: integers in QDQ form, or QLinearConv."""
    path = folder / f"{form}.onnx"
    onnxruntime.quantization.quantize_static(
        folded(), str(path), _Reader(), quant_format=onnxruntime.quantization.QuantFormat[form], per_channel=True,
        op_types_to_quantize=["Conv", "Relu", "Clip"],
    )  # fmt: skip
    return onnx.load(path)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_files_with_integer_weights_train(form: str, tmp_path: Path) -> None:
    """Master weights start as the stored ones: untrained, the export holds the same integers."""
    model = third_party(form, tmp_path)
    program = og.build_training(model, loss="cross_entropy", optimizer=SGD, quantization="qat")
    trainer = og.Trainer(program)
    trainer.export(tmp_path / "start.onnx")
    before, after = stored(model), stored(onnx.load(tmp_path / "start.onnx"))
    for name in ("c1.weight", "c2.weight", "c3.weight", "c2.bias", "c3.bias"):
        np.testing.assert_array_equal(after[f"{name}_quantized"], before[f"{name}_quantized"])
    trainer.step({"x": X, "target": LABELS})
    trainer.export(tmp_path / "trained.onnx")
    fused = fused_operators(tmp_path / "trained.onnx", tmp_path)
    assert fused["QLinearConv"] == 3
    assert not fused["Conv"]
    trained = stored(onnx.load(tmp_path / "trained.onnx"))
    assert (trained["c2.weight_quantized"] != before["c2.weight_quantized"]).any()
    assert Counter(n.op_type for n in onnx.load(tmp_path / "trained.onnx").graph.node)["QuantizeLinear"] > 0


_WEIGHTS = {
    "blocks of int4": ("int8[2,6] q = {1,2,3,-4,5,6,7,-8,0,1,2,3}, float[2,2] s = {0.1,0.2,0.3,0.4}",
                       "DequantizeLinear <axis = 1, block_size = 3> (q, s)"),
    "columns of uint8": ("uint8[2,6] q = {1,2,3,4,5,6,7,8,0,1,9,3}, float[6] s = {1,2,3,4,1,2}, uint8[6] z = {1,2,3,4,5,6}",
                         "DequantizeLinear <axis = 1> (q, s, z)"),
}  # fmt: skip


@pytest.mark.parametrize("name", _WEIGHTS)
def test_other_types_and_granularities(name: str, tmp_path: Path) -> None:
    weight, layer = _WEIGHTS[name]
    text = (
        f"<{weight}, float t = {{0.05}}, int8 o = {{3}}> {{ a = QuantizeLinear (x, t, o) d = DequantizeLinear (a, t, o)"
    )
    text += f" w = {layer} y = MatMul (d, w) }}"
    model = graph_of(f"(float[N,2] x) => (float[N,6] y) {text}", opset=21)
    if "int4" in name:
        (q,) = (t for t in model.graph.initializer if t.name == "q")
        q.CopyFrom(helper.make_tensor("q", TensorProto.INT4, [2, 6], numpy_helper.to_array(q).ravel().tolist()))
    program = og.build_training(model, loss="mse", optimizer=SGD, quantization="qat")
    x = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    trainer = og.Trainer(program)
    trainer.export(tmp_path / "start.onnx")
    np.testing.assert_allclose(
        run(onnx.load(tmp_path / "start.onnx"), {"x": x})["y"], run(model, {"x": x})["y"], rtol=1e-5
    )
    before = trainer.parameters()
    trainer.step({"x": x, "target": np.zeros((4, 6), np.float32)})
    assert any((value != before[name]).any() for name, value in trainer.parameters().items())
    kinds = {t.data_type for t in onnx.load(tmp_path / "start.onnx").graph.initializer}
    assert (TensorProto.INT4 if "int4" in name else TensorProto.UINT8) in kinds


def test_a_float_model_is_refused() -> None:
    with pytest.raises(
        og.errors.ModelError, match=r"no quantizers.*\. Insert them with onnx_convgrad\.transforms\.insert_quantizers"
    ):
        og.build_training(depthwise(), loss="cross_entropy", optimizer=SGD, quantization="qat")


def test_a_model_that_is_quantized_as_it_runs_is_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N,2] x) => (float[N,2] y)
        <int8[2,2] w = {1,2,3,4}, float[1] ws = {0.1}> {
            q, s, z = DynamicQuantizeLinear (x)  p = MatMulInteger (q, w, z)  f = Cast <to = 1> (p)  t = Mul (s, ws)
            y = Mul (f, t) }"""
    )
    with pytest.raises(og.errors.ModelError, match=r"as it runs \(ConvInteger, MatMulInteger\).*without quantization"):
        og.build_training(model, loss="mse", optimizer=SGD, quantization="qat")


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(og.errors.ArgumentError, match="quantization"):
        og.build_training(quantized(), loss="cross_entropy", optimizer=SGD, quantization="int2")


_SCAN = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N,2] h0, float[N,T,2] x) => (float[N,2] y)
    <int8[2,2] w_quantized = {1,2,30,4}, int32[2] b = {10,20}, float ws = {0.02}, float bs = {0.0004}, float s = {0.05}> {
        y = Scan <num_scan_inputs = 1, scan_input_axes = [1], body = f (float[N,2] h, float[N,2] u) => (float[N,2] h1)
            <int8[2,2] v_quantized = {1,20,3,40}, float vs = {0.02}, int8 z = {3}, float hs = {0.02}> {
                wd = DequantizeLinear (w_quantized, ws)
                bd = DequantizeLinear (b, bs)
                hq = QuantizeLinear (h, hs, z)
                hd = DequantizeLinear (hq, hs, z)
                m = Gemm (hd, wd, bd)
                a = Add (m, u)
                q = QuantizeLinear (a, s, z)
                vd = DequantizeLinear (v_quantized, vs)
                d = DequantizeLinear (q, s, z)
                k = MatMul (d, vd)
                h1 = Sin (k)
        }> (h0, x)
    }"""


@pytest.mark.parametrize("mode", ["qat", "lsq"])
def test_quantizers_in_the_body_of_a_loop_train(mode: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(_SCAN)
    rng = np.random.default_rng(0)
    feeds = {"h0": np.ones((3, 2), np.float32), "x": rng.normal(size=(3, 20, 2)).astype(np.float32)}
    trainer = og.Trainer(og.build_training(model, loss="mse", optimizer=og.optim.SGD(0.1), quantization=mode))
    assert {"w", "v", "bd"} <= trainer.parameters().keys()
    trainer.export(tmp_path / "start.onnx")
    start = run(onnx.load(tmp_path / "start.onnx"), feeds)["y"]
    np.testing.assert_allclose(start, run(model, feeds)["y"], rtol=1e-6)
    batch = feeds | {"target": np.zeros((3, 2), np.float32)}
    losses = [float(trainer.step(batch)["loss"]) for _ in range(30)]
    assert losses[-1] < 0.95 * losses[0]
    trainer.export(tmp_path / "trained.onnx")
    exported = onnx.load(tmp_path / "trained.onnx")
    kinds = {name: array.dtype for name, array in stored(exported).items()}
    assert (kinds["w_quantized"], kinds["v_quantized"], kinds["bd_quantized"]) == (np.int8, np.int8, np.int32)
    assert float(np.square(run(exported, feeds)["y"]).mean()) == pytest.approx(
        float(trainer.evaluate_batch(batch)["loss"])
    )


CONVOLVED = """(float[N,2,6,6] x) => (float[N,4,4,4] y) {
    q = QuantizeLinear (x, xs, xz)
    d = DequantizeLinear (q, xs, xz)
    r = DequantizeLinear <axis = 0> (w, ws)
    c = Conv (d, r, b)
"""
"""The beginning of models with a quantized convolution."""


def dead_channels(scale: np.ndarray) -> onnx.ModelProto:
    """A convolution of which some channels have the scale zero, or one that makes their bias exceed int32."""
    weight = np.random.default_rng(0).integers(-100, 100, (4, 2, 3, 3)).astype(np.int8)
    text = f"{CONVOLVED} h = QuantizeLinear (c, ys, yz) y = DequantizeLinear (h, ys, yz) }}"
    numbers = {
        "w": weight, "ws": scale, "b": np.asarray([0.5, -3, 0.1, 2], "f"), "xs": np.float32(0.05), "xz": np.int8(3),
        "ys": np.float32(0.05), "yz": np.int8(-2),
    }  # fmt: skip
    return graph_of(text, opset=21, **numbers)


@pytest.mark.parametrize("mode", ["qat", "lsq", "int8"])
@pytest.mark.parametrize(
    "scale", [np.asarray([0, 1e-14, 0.02, 3e-9], "f"), np.asarray(1e-12, "f"), np.asarray(0, "f")],
    ids=["channels", "tiny", "zero"],
)  # fmt: skip
def test_dead_channels_are_exported_as_they_were_trained(mode: str, scale: np.ndarray, tmp_path: Path) -> None:
    """Equal up to one level in few places, where the int32 bias is rounded; also with ONNX Runtime's integer kernels."""
    rng = np.random.default_rng(1)
    x, target = (rng.normal(size=shape).astype("f") for shape in ((8, 2, 6, 6), (8, 4, 4, 4)))
    program = og.build_training(dead_channels(scale), loss="mse", optimizer=og.optim.SGD(0.01), quantization=mode)
    trainer = og.Trainer(program)
    trainer.step({"x": x, "target": target})
    want = trainer.evaluate_batch({"x": x, "target": target})["y"]
    assert want.std((0, 2, 3)).max() > 0 or scale.ndim == 0
    path = tmp_path / "trained.onnx"
    trainer.export(path)
    exported = onnx.load(path)
    assert stored(exported)["b_quantized"].dtype == np.int32
    for optimize in (False, True):
        got = run(exported, {"x": x}, optimize=optimize)["y"]
        assert np.abs(got - want).max() < 0.06
        assert np.mean(got != want) < 0.01
    assert fused_operators(path, tmp_path)["QLinearConv"] == 1


def test_a_dead_weight_of_two_layers_gets_a_scale_in_each(tmp_path: Path) -> None:
    model = dead_channels(np.asarray([0, 1e-14, 0.02, 3e-9], "f"))
    text = f"{CONVOLVED} k = Conv (d, r, b2) y = Add (c, k) }}"
    model = graph_of(text, opset=21, b2=np.asarray([0, 0.2, 0, -1], "f"), **stored(model))
    trainer = og.Trainer(og.build_training(model, loss="mse", optimizer=SGD, quantization="qat"))
    trainer.export(tmp_path / "model.onnx")
    x = np.random.default_rng(1).normal(size=(8, 2, 6, 6)).astype("f")
    got, want = (run(m, {"x": x}, optimize=False)["y"] for m in (onnx.load(tmp_path / "model.onnx"), model))
    np.testing.assert_allclose(got, want, atol=2e-3)  # the bias of the live channel is in steps of 1e-3
