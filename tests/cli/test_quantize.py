"""The command `quantize`, and quantization-aware training by the command `train`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.training.run_folder import TRAINED
from tests.support.command_line import invoke
from tests.support.one_input import graph_of
from tests.support.quantized import LABELS, X, depthwise


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(depthwise(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=X, target=LABELS)
    return tmp_path


def kinds(path: Path) -> dict[str, int]:
    return {t.name: t.data_type for t in onnx.load(path).graph.initializer}


def test_a_table_of_layers_a_plot_and_scores(folder: Path) -> None:
    data = folder / "data.npz"
    options = ["--method", "adaround", "--iterations", "5", "--weights", "int4", "--plot", folder / "layers.png"]
    result = invoke("quantize", folder / "model.onnx", "--data", data, "--test", data, *options)
    lines = result.stdout.splitlines()
    assert lines[0] == f"{folder / 'model.onnx'} -> {folder / 'model.quantized.onnx'}"
    (heading,) = (line for line in lines if line.startswith("layer "))
    assert heading.split() == ["layer", "operator", "weight", "nearest", "dB", "adaround", "dB", "changed"]
    assert sum(line.startswith(("/c1/", "/c2/", "/c3/", "/fc/")) for line in lines) == 4
    assert any(line.startswith("accuracy") for line in lines)
    assert kinds(folder / "model.quantized.onnx")["c1.weight_quantized"] == onnx.TensorProto.INT4
    assert (folder / "layers.png").stat().st_size > 5000


def test_images_are_read_as_the_file_says(folder: Path) -> None:
    pictures = folder / "pictures"
    pictures.mkdir()
    for i, picture in enumerate(np.random.default_rng(0).integers(0, 256, (8, *X.shape[2:]), np.uint8)):
        Image.fromarray(picture if X.shape[1] == 1 else np.stack([picture] * 3, -1)).save(pictures / f"{i}.png")
    path = folder / "model.onnx"
    command = ["quantize", path, "--data", pictures, "--method", "nearest", "--json"]
    result = invoke(*command, status=2)
    assert "does not say how images become its input" in result.stderr
    assert "--preprocessing imagenet" in result.stderr

    def step(*options: str) -> float:
        invoke(*command, *options)
        quantized = onnx.load(folder / "model.quantized.onnx")
        first = next(node for node in quantized.graph.node if node.op_type == "QuantizeLinear" and node.input[0] == "x")
        scales = {t.name: onnx.numpy_helper.to_array(t) for t in quantized.graph.initializer}
        return float(scales[first.input[1]])

    model = onnx.load(path)
    steps = [step("--preprocessing", "unit"), step("--std", "0.5")]
    for std in (0.5, 0.25):
        preprocessing = Preprocessing(std=(std,))
        onnx.helper.set_model_props(model, {"onnx_convgrad.preprocessing": preprocessing.to_json()})
        onnx.save(model, path)
        steps.append(step())
    steps.append(step("--std", "0.5"))  # in place of the file's
    assert steps == pytest.approx([1 / 255, 2 / 255, 2 / 255, 4 / 255, 2 / 255], rel=0.02)


def test_the_options_of_images_hold_for_the_scores_and_stay_in_the_file(folder: Path) -> None:
    random = np.random.default_rng(0)
    for i, name in enumerate(["a", "b", "a", "b"]):
        (folder / "classes" / name).mkdir(parents=True, exist_ok=True)
        shape = X.shape[2:] if X.shape[1] == 1 else (*X.shape[2:], 3)
        Image.fromarray(random.integers(0, 256, shape, np.uint8)).save(folder / "classes" / name / f"{i}.png")
    pictures = folder / "classes"
    options = ["--preprocessing", "inception", "--method", "nearest", "--json"]
    result = invoke("quantize", folder / "model.onnx", "--data", pictures, "--test", pictures, *options)
    assert len(json.loads(result.stdout)["test"]["accuracy"]) == 2
    scores = invoke(
        "evaluate", folder / "model.quantized.onnx", pictures, "--json"
    )  # the file says how it reads images
    assert json.loads(scores.stdout)["metrics"]["accuracy"] == json.loads(result.stdout)["test"]["accuracy"][1]


def test_json(folder: Path) -> None:
    result = invoke(
        "quantize",
        folder / "model.onnx",
        "--data",
        folder / "data.npz",
        "--method",
        "nearest",
        "--json",
        "-o",
        folder / "q.onnx",
    )
    report = json.loads(result.stdout)
    assert report["method"] == "nearest"
    assert [layer["weight"] for layer in report["layers"]] == ["c1.weight", "c2.weight", "c3.weight", "fc.weight"]
    assert report["outputs"]["y"]["nearest"]["signal_to_noise"] > 10
    assert report["output"] == str(folder / "q.onnx")


def test_mixed_precision_shows_bits_and_sensitivities(folder: Path) -> None:
    command = ["quantize", folder / "model.onnx", "--data", folder / "data.npz", "--method", "nearest"]
    lines = invoke(*command, "--size", "0.3kB").stdout.splitlines()
    (heading,) = (line for line in lines if line.startswith("layer "))
    assert heading.split()[3:] == ["bits", "bytes", "sensitivity", "nearest", "dB"]
    assert any(line.startswith("All weights have 280 bytes, 5.19 bits each on average.") for line in lines)
    report = json.loads(invoke(*command, "--bits", "5", "--sensitivity", "trace", "--json").stdout)
    assert sum(layer["bytes"] for layer in report["layers"]) <= 270
    assert {layer["bits"] for layer in report["layers"]} == {4, 8}


def test_an_unknown_method_is_refused(folder: Path) -> None:
    result = invoke("quantize", folder / "model.onnx", "--data", folder / "data.npz", "--method", "best", status=2)
    assert "method" in result.stderr


@pytest.mark.parametrize("options", [[], ["--learn-scales"], ["--integer-weights"]])
def test_training_with_quantizers(folder: Path, options: list[str]) -> None:
    run = ["--epochs", "1", "--qat", *options, "-q", "-o", folder / "run"]
    invoke("train", folder / "model.onnx", "--data", folder / "data.npz", "--loss", "cross_entropy", *run)
    stored = kinds(folder / "run" / TRAINED)
    assert stored["c1.weight_quantized"] == onnx.TensorProto.INT8
    assert stored["c1.bias_quantized"] == onnx.TensorProto.INT32


def test_learned_scales_need_quantizers(folder: Path) -> None:
    result = invoke(
        "train", folder / "model.onnx", "--data", folder / "data.npz", "--loss", "mse", "--learn-scales", status=2
    )
    assert "--learn-scales is for --qat" in result.stderr


def test_integer_weights_have_no_learned_scales(folder: Path) -> None:
    options = ["--loss", "mse", "--qat", "--learn-scales", "--integer-weights"]
    result = invoke("train", folder / "model.onnx", "--data", folder / "data.npz", *options, status=2)
    assert "--integer-weights keeps all scales" in result.stderr


def test_an_input_is_bound_in_both_models(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = "(float[N,6] x, float factor) => (float[N,4] y) { a = Gemm <transB = 1> (x, w) y = Mul (a, factor) }"
    path, data = tmp_path / "model.onnx", tmp_path / "data.npz"
    onnx.save(graph_of(text, w=rng.normal(size=(4, 6)).astype("f")), path)
    np.savez(data, x=rng.normal(size=(16, 6)).astype("f"), target=rng.integers(0, 4, 16))
    options = ["--data", data, "--test", data, "--method", "nearest", "--input-value", "factor=3", "--json"]
    report = json.loads(invoke("quantize", path, *options).stdout)
    assert len(report["test"]["accuracy"]) == 2
    assert [value.name for value in onnx.load(tmp_path / "model.quantized.onnx").graph.input] == ["x"]
