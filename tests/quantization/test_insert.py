"""Quantizers that ONNX Runtime calibrates: values, fused kernels, options and refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.quantized import X, depthwise, fused_operators
from tests.support.streams import LSTM, STATES


def test_a_quantized_network_computes_about_the_same() -> None:
    model = og.transforms.insert_quantizers(depthwise(), {"x": X})
    want, got = (run(m, {"x": X}, optimize=False)["y"] for m in (depthwise(), model))
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()
    operators = {node.op_type for node in model.graph.node}
    assert {"QuantizeLinear", "DequantizeLinear", "Conv", "Gemm"} <= operators
    assert "BatchNormalization" not in operators


def test_every_layer_becomes_an_integer_kernel(tmp_path: Path) -> None:
    fused = fused_operators(og.transforms.insert_quantizers(depthwise(), {"x": X}), tmp_path)
    assert fused["QLinearConv"] == 3
    assert fused["QGemm"] == 1
    assert not fused["Conv"]
    assert not fused["Gemm"]


@pytest.mark.parametrize(
    ("outputs", "body"),
    [
        ("float[N,3] y", "y = Gemm <alpha = 0.5, beta = 4.0> (x, w, b)"),
        ("float[N,3] h, float[N,3] y", "h = MatMul (x, w) y = Relu (h)"),
    ],
    ids=["beta", "an output before a Relu"],
)
def test_what_the_quantizer_of_onnx_runtime_changes(outputs: str, body: str) -> None:
    """See quirks.QUANTIZED_BETA and QUANTIZED_OUTPUT."""
    model = graph_of(f"(float[N,3] x) => ({outputs}) <float[3] b = {{1, -2, 3}}> {{ {body} }}", opset=21)
    generator = np.random.default_rng(0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(generator.normal(size=(3, 3)).astype(np.float32), "w"))
    x = generator.normal(size=(64, 3)).astype(np.float32)
    want, got = run(model, {"x": x}), run(og.transforms.insert_quantizers(model, {"x": x}), {"x": x})
    for name in want:
        assert np.abs(got[name] - want[name]).max() < 0.05 * np.abs(want[name]).max()


def _types(model: onnx.ModelProto, suffix: str) -> set[int]:
    return {t.data_type for t in model.graph.initializer if t.name.endswith(suffix)}


@pytest.mark.parametrize(("weights", "kind"), [("int8", onnx.TensorProto.INT8), ("int4", onnx.TensorProto.INT4)])
@pytest.mark.parametrize(("activations", "level"), [("int8", onnx.TensorProto.INT8), ("uint8", onnx.TensorProto.UINT8)])
def test_types_of_levels(weights: str, kind: int, activations: str, level: int) -> None:
    model = og.transforms.insert_quantizers(depthwise(), {"x": X}, weights=weights, activations=activations)
    assert _types(model, "c3.weight_zero_point") == {kind}
    assert _types(model, "x_zero_point") == {level}
    scale = next(t for t in model.graph.initializer if t.name == "c3.weight_scale")
    assert list(scale.dims) == [16]


def test_adapters_are_merged_before() -> None:
    """The metadata would list adapters that are not there."""
    adapted = og.transforms.add_adapters(depthwise(), rank=1)
    for change in (og.transforms.insert_quantizers, partial(og.transforms.quantize, method="nearest")):
        model, want = (change(m, {"x": X}) for m in (adapted, depthwise()))
        assert [node.op_type for node in model.graph.node] == [node.op_type for node in want.graph.node]
        np.testing.assert_array_equal(run(model, {"x": X})["y"], run(want, {"x": X})["y"])
        og.build_training(model, loss="cross_entropy", optimizer="adam", quantization="qat")


def test_weights_of_four_bits_are_recomputed() -> None:
    """ONNX Runtime has no Reshape of their type."""
    batch: dict[str, Any] = {"image": np.random.default_rng(0).random((8, 1, 8, 8), np.float32), "target": np.arange(8)}
    model = og.transforms.insert_quantizers("examples/models/digits_cnn.onnx", batch, weights="int4")
    options: dict[str, Any] = {"loss": "cross_entropy", "optimizer": og.optim.SGD(0.1), "quantization": "qat"}
    plain, small = (og.Trainer(og.build_training(model, memory=memory, **options)) for memory in (None, "min"))
    for _ in range(2):
        want, got = (trainer.step(batch)["logits"] for trainer in (plain, small))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_one_scale_for_a_whole_weight_and_excluded_nodes() -> None:
    names = [
        node.name
        for node in og.transforms.insert_quantizers(depthwise(), {"x": X}).graph.node
        if node.op_type == "Conv"
    ]
    model = og.transforms.insert_quantizers(
        depthwise(), {"x": X}, per_channel=False, exclude=names[:1], calibration="percentile"
    )
    scales = {t.name: list(t.dims) for t in model.graph.initializer if t.name.endswith(".weight_scale")}
    assert scales == {"c2.weight_scale": [], "c3.weight_scale": [], "fc.weight_scale": []}


def test_a_model_with_quantizers_is_refused() -> None:
    model = og.transforms.insert_quantizers(depthwise(), {"x": X})
    with pytest.raises(og.errors.ModelError, match=r"has quantizers already\. Train it with build_training"):
        og.transforms.insert_quantizers(model, {"x": X})


def test_a_model_without_layers_is_refused() -> None:
    model = graph_of("(float[N,3] x) => (float[N,3] y) { y = Erf (x) }")
    with pytest.raises(og.errors.ModelError, match="No layer of the model was quantized"):
        og.transforms.insert_quantizers(model, {"x": np.ones((4, 3), np.float32)})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights": "int3"}, "weights"),
        ({"activations": "float"}, "activations"),
        ({"calibration": "best"}, "calibration"),
        ({"exclude": ["nothing"]}, "node in exclude"),
        ({"exclude": "nothing"}, "Unknown node in exclude 'nothing'"),
        ({"exclude": 5}, "exclude takes a name or several, not 5"),
        ({"samples": 0}, "samples"),
        ({"per_channel": "yes"}, "per_channel"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=reason):
        og.transforms.insert_quantizers(depthwise(), {"x": X}, **options)


def test_empty_data_are_refused() -> None:
    with pytest.raises(og.errors.ArgumentError):
        og.transforms.insert_quantizers(depthwise(), {"x": X[:0]})


def test_states_are_carried_while_a_model_is_calibrated() -> None:
    rng = np.random.default_rng(0)
    cell = graph_of(
        "(float[N,3] x, float[N,4] h) => (float[N,1] y, float[N,4] hn) "
        "{ a = MatMul (x, w) b = MatMul (h, u) hn = Add (a, b) y = MatMul (hn, v) }",
        w=np.abs(rng.standard_normal((3, 4))).astype("f"),
        u=np.eye(4, dtype="f"),
        v=np.ones((4, 1), "f"),
    )
    data = og.data.Sequences({"x": [np.ones((n, 3), "f") for n in (9, 7)]}, 1)
    model = og.load(cell, states={"h": "hn"})
    quantized = og.transforms.insert_quantizers(model, data, batch_size=2)
    found, wanted = (og.predict(m, data, batch_size=2).outputs["y"] for m in (quantized, model))
    assert og.load(quantized).states == {"h": "hn"}
    np.testing.assert_allclose(found, wanted, atol=0.02 * wanted.max())  # states grow ninefold: zeros would clip them
    assert og.transforms.quantize(model, data, batch_size=2, method="nearest").graph.node
    with pytest.raises(ArgumentError, match="'h' has its streams along axis 1"):
        og.transforms.quantize(og.load(LSTM, states=STATES), {"x": np.ones((4, 6, 3), "f")})
