"""The command `quantize`, and quantization-aware training by the command `train`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_convgrad.training.run.run_folder import TRAINED
from tests.support.command_line import invoke
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


def test_an_unknown_method_is_refused(folder: Path) -> None:
    result = invoke("quantize", folder / "model.onnx", "--data", folder / "data.npz", "--method", "best", status=2)
    assert "method" in result.stderr


@pytest.mark.parametrize("options", [[], ["--learn-scales"]])
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
