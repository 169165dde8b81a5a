"""`quantize`: every method lowers the error of rounding to the nearest, and the result runs with integer kernels."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.frontend.files import read
from onnx_convgrad.quantization.blocks import layers_of
from onnx_convgrad.quantization.measure import QuantizationReport, values_on
from onnx_convgrad.quantization.quantize import METHODS, QuantizationSettings, difference, output_slopes
from onnx_convgrad.quantization.quantize import run as quantized_with_report
from onnx_convgrad.runtime import run
from onnx_convgrad.surgery.quantization import prepare
from tests.support.one_input import graph_of
from tests.support.quantized import X, depthwise, folded, fused_operators


@cache
def result(method: str, weights: str = "int4") -> tuple[bytes, QuantizationReport]:
    settings = QuantizationSettings(
        method=method, weights=weights, iterations=60, lr=5e-3 if method == "qat" else 3e-2, batch_size=16
    )
    model, report = quantized_with_report(depthwise(), {"x": X}, settings)
    return ir.to_proto(model).SerializeToString(), report


def error(model: onnx.ModelProto) -> float:
    want, got = (run(m, {"x": X}, optimize=False)["y"].astype(np.float64) for m in (depthwise(), model))
    return float(np.square(got - want).mean())


@pytest.mark.parametrize("method", [m for m in METHODS if m != "nearest"])
def test_the_error_of_the_outputs_is_lower_than_that_of_rounding_to_the_nearest(method: str) -> None:
    text, report = result(method)
    assert error(onnx.load_from_string(text)) < 0.7 * error(onnx.load_from_string(result("nearest")[0]))
    before, after = report.outputs["y"]
    np.testing.assert_allclose(
        after.mean_square, error(onnx.load_from_string(text)), rtol=0.2
    )  # int32 biases come last
    assert before.signal_to_noise < after.signal_to_noise


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_stored_as_integers(method: str) -> None:
    model = onnx.load_from_string(result(method)[0])
    onnx.checker.check_model(model, full_check=True)
    stored = {t.name: t.data_type for t in model.graph.initializer}
    for name in ("c1", "c2", "c3", "fc"):
        assert stored[f"{name}.weight_quantized"] == onnx.TensorProto.INT4
        assert stored[f"{name}.bias_quantized"] == onnx.TensorProto.INT32
        assert f"{name}.weight" not in stored
    assert [v.name for v in model.graph.input] == ["x"]
    assert [v.name for v in model.graph.output] == ["y"]
    assert not [p.key for p in model.metadata_props if p.key.startswith("onnx_convgrad")]


def test_eight_bits_run_with_integer_kernels(tmp_path: Path) -> None:
    fused = fused_operators(onnx.load_from_string(result("bias", "int8")[0]), tmp_path)
    assert (fused["QLinearConv"], fused["QGemm"], fused["Conv"], fused["Gemm"]) == (3, 1, 0, 0)


def test_the_report_lists_every_layer() -> None:
    report = result("adaround")[1]
    assert [row.weight for row in report.layers] == ["c1.weight", "c2.weight", "c3.weight", "fc.weight"]
    assert [row.shape for row in report.layers][1] == (8, 1, 3, 3)
    assert all(0 < row.changed < 0.5 for row in report.layers)
    assert report.samples == len(X)
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["operator"] == "Conv"
    assert not any(row.changed for row in result("nearest")[1].layers)


def test_the_public_function_gives_the_same() -> None:
    model = og.transforms.quantize(depthwise(), {"x": X}, method="nearest", weights="int4")
    assert error(model) == error(onnx.load_from_string(result("nearest")[0]))


def test_bias_correction_makes_the_means_of_channels_equal() -> None:
    """After the correction each channel of the last layer has the mean of the float model's, up to its quantizer."""
    got = run(onnx.load_from_string(result("bias")[0]), {"x": X}, optimize=False)["y"].mean(0)
    want = run(depthwise(), {"x": X})["y"].mean(0)
    (scale,) = (onnx.numpy_helper.to_array(t) for t in onnx.load_from_string(result("bias")[0]).graph.initializer
                if t.name == "y_scale")  # fmt: skip
    assert np.abs(got - want).max() < float(scale)


def test_slopes_of_the_outputs_are_those_of_the_divergence() -> None:
    """The gradient of KL(softmax(float) | softmax(quantized)) by the input of the last layer, against PyTorch."""
    model = read(og.transforms.insert_quantizers(depthwise(), {"x": X}))
    prepare(model, "qat")
    real, batches = read(folded()), [{"x": X[:20]}, {"x": X[20:]}]
    last = layers_of(model.graph)[-1]
    slopes = output_slopes(model, real, [last.source], batches)[last.source.name or ""]
    got, want = (torch.tensor(values_on(m, ["y"], batches)["y"]) for m in (model, real))
    logits = got.requires_grad_()
    target = torch.softmax(want, 1)
    torch.nn.functional.kl_div(torch.log_softmax(logits, 1), target, reduction="sum").backward()
    assert logits.grad is not None
    np.testing.assert_allclose(
        difference(got.detach().numpy(), want.numpy()), logits.grad.numpy(), rtol=1e-4, atol=1e-6
    )
    weight = last.quantizer.inputs[0]
    assert weight is not None
    assert weight.const_value is not None
    scale = last.quantizer.inputs[1]
    assert scale is not None
    assert scale.const_value is not None
    steps = scale.const_value.numpy()[:, None]
    rounded = np.clip(np.rint(weight.const_value.numpy() / steps), -128, 127) * steps
    outputs = logits.detach().numpy()
    inside = ((outputs > outputs.min()) & (outputs < outputs.max())).all(
        1
    )  # not clipped by the quantizer of the output
    assert inside.sum() > 20
    errors = np.abs(slopes - logits.grad.numpy() @ rounded).max(1)[inside]
    assert np.quantile(errors, 0.9) < 1e-6  # a value in the middle between two levels may be rounded either way


def test_other_outputs_use_the_squared_difference() -> None:
    mine, real = np.full((3, 1), 2.0), np.full((3, 1), 0.5)
    np.testing.assert_array_equal(difference(mine, real), mine - real)
    shares = np.full((2, 2), 0.5)
    np.testing.assert_array_equal(difference(shares + 0.25, shares), np.full((2, 2), 0.25))


@pytest.mark.parametrize("method", ["adaround", "bias", "qat"])
def test_a_network_of_matrix_products(method: str) -> None:
    generator = np.random.default_rng(0)
    numbers = {name: generator.normal(size=shape).astype(np.float32) for name, shape in (("a", (6, 8)), ("b", (8, 3)))}
    model = graph_of(
        "(float[N,6] x) => (float[N,3] y) { h = MatMul (x, a) r = LeakyRelu (h) y = MatMul (r, b) }", opset=21
    )
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in numbers.items())
    x = generator.normal(size=(64, 6)).astype(np.float32)
    results = [
        og.transforms.quantize(
            model, {"x": x}, method=m, weights="int4", iterations=100, lr=3e-2 if m == "adaround" else 1e-2
        )
        for m in ("nearest", method)
    ]
    want = run(model, {"x": x})["y"]
    errors = [float(np.square(run(m, {"x": x}, optimize=False)["y"] - want).mean()) for m in results]
    assert errors[1] < errors[0] if method != "bias" else errors[1] == errors[0]


@pytest.mark.parametrize("method", ["adaround", "brecq"])
def test_layers_may_share_a_weight(method: str) -> None:
    """Its rounding is learned once."""
    generator = np.random.default_rng(0)
    text = "(float[N,4] x) => (float[N,4] y) { a = MatMul (x, w) b = Relu (a) c = MatMul (b, w) y = Add (c, x) }"
    model = graph_of(text, opset=21)
    model.graph.initializer.append(onnx.numpy_helper.from_array(generator.normal(size=(4, 4)).astype(np.float32), "w"))
    x = generator.normal(size=(64, 4)).astype(np.float32)
    got = run(og.transforms.quantize(model, {"x": x}, method=method, iterations=20), {"x": x})["y"]
    want = run(model, {"x": x})["y"]
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "best"}, "method"),
        ({"samples": 0}, "samples"),
        ({"iterations": 0}, "iterations"),
        ({"lr": -1.0}, "lr"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=reason):
        og.transforms.quantize(depthwise(), {"x": X}, **options)


def test_several_outputs_are_not_trained() -> None:
    model = graph_of(
        "(float[N,2] x) => (float[N,2] y, float[N,2] z) <float[2,2] w = {1,2,3,4}> { y = MatMul (x, w) z = Exp (y) }"
    )
    with pytest.raises(og.errors.ArgumentError, match="one floating output"):
        og.transforms.quantize(model, {"x": np.ones((4, 2), np.float32)}, method="qat")


def scaled() -> onnx.ModelProto:
    """A layer whose result is multiplied by an input, as models take a sample rate or a temperature."""
    weight = np.random.default_rng(0).normal(size=(4, 6)).astype("f")
    text = "(float[N,6] x, float factor) => (float[N,4] y) { a = Gemm <transB = 1> (x, w) y = Mul (a, factor) }"
    return graph_of(text, w=weight)


def test_an_input_is_bound_to_a_constant() -> None:
    x = np.random.default_rng(1).normal(size=(16, 6)).astype("f")
    model = og.transforms.quantize(og.load(scaled(), input_values={"factor": 3}), {"x": x}, method="nearest")
    assert [value.name for value in model.graph.input] == ["x"]
    want = run(scaled(), {"x": x, "factor": np.array(3, "f")})["y"]
    np.testing.assert_allclose(run(model, {"x": x}, optimize=False)["y"], want, atol=0.03 * np.abs(want).max())
    inserted = og.transforms.insert_quantizers(og.load(scaled(), input_values={"factor": 3}), {"x": x})
    np.testing.assert_allclose(run(inserted, {"x": x}, optimize=False)["y"], want, atol=0.03 * np.abs(want).max())


def test_an_unknown_input_cannot_be_bound() -> None:
    with pytest.raises(og.errors.ArgumentError, match="Did you mean 'factor'"):
        og.transforms.quantize(og.load(scaled(), input_values={"facto": 3}), {"x": np.ones((4, 6), "f")})


@pytest.mark.parametrize(
    "options", [{"method": "adaround"}, {"method": "bias"}, {"method": "brecq"}, {"method": "nearest", "bits": 6}]
)
def test_a_model_may_give_a_number_beside_rows(options: dict[str, Any]) -> None:
    model = onnx.ModelProto.FromString(depthwise().SerializeToString())
    model.graph.node.append(onnx.helper.make_node("ReduceMean", ["y"], ["mean"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("mean", onnx.TensorProto.FLOAT, []))
    quantized = og.transforms.quantize(model, {"x": X}, **options, **({} if "bits" in options else {"iterations": 4}))
    want, got = (run(m, {"x": X}, optimize=False)["mean"] for m in (model, quantized))
    assert got == pytest.approx(want, abs=0.1)
