"""The command `train` on a changed model: low-rank adapters, and BatchNormalization put back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.command_line import invoke
from tests.support.one_input import graph_of


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    digits = load_digits()
    path = tmp_path_factory.mktemp("data") / "train.npz"
    images = np.rot90(digits.images, axes=(1, 2))[:256, None].astype("f") / 16
    np.savez(path, pixels=images, target=digits.target[:256])
    return path


def basic(model: Path, data: Path, out: Path) -> list[object]:
    return [
        model,
        "--data",
        data,
        "--loss",
        "cross_entropy",
        "--lr",
        0.01,
        "--epochs",
        3,
        "--out",
        out,
        "--threads",
        1,
        "--map",
        "image=pixels",
    ]


def numbers(path: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def test_a_new_last_layer_is_trained_with_the_adapters(digits_cnn: Path, data: Path, tmp_path: Path) -> None:
    fresh = og.transforms.replace_head(digits_cnn, 12)
    result = invoke("train", *basic(digits_cnn, data, tmp_path / "run"), "--lora", 2, "--classes", 12)
    assert "and fresh weights. It is trained with the adapters." in " ".join(result.output.split())
    base, trained = numbers(digits_cnn), numbers(tmp_path / "run" / "trained.onnx")
    moved = {name for name in base if base[name].shape != trained[name].shape or (base[name] != trained[name]).any()}
    assert moved == {"fc.weight", "fc.bias"}
    stored = {t.name: numpy_helper.to_array(t) for t in fresh.graph.initializer}
    assert (trained["fc.weight"] != stored["fc.weight"]).any()
    assert trained["conv1.lora_B"].any()
    again = invoke("train", "--resume", tmp_path / "run", "--epochs", 4)
    assert "adapter.safetensors" in " ".join(again.stdout.split())


def test_adapters_are_trained_and_written(digits_cnn: Path, data: Path, tmp_path: Path) -> None:
    options = ["--lora", 2, "--lora-alpha", 4, "--lora-targets", "conv*", "--lora-targets", "fc.weight"]
    result = invoke("train", *basic(digits_cnn, data, tmp_path / "run"), *options)
    assert "adapter.onnx_adapter and adapter.safetensors" in " ".join(result.stdout.split())
    base, trained = numbers(digits_cnn), numbers(tmp_path / "run" / "trained.onnx")
    assert all(np.array_equal(trained[name], value) for name, value in base.items())
    assert trained["fc.lora_B"].any()
    added = set(trained) - set(base)
    assert {name.rpartition(".")[2] for name in added} == {"lora_A", "lora_B", "adapter_scale"}
    x = np.load(data)["pixels"][:20]
    adapted = og.transforms.add_adapters(digits_cnn, rank=2, alpha=4, targets=["conv*", "fc.weight"])
    filled = og.transforms.load_adapters(adapted, tmp_path / "run" / "adapter.safetensors")
    (want,) = onnxruntime.InferenceSession(str(tmp_path / "run" / "trained.onnx")).run(None, {"image": x})
    np.testing.assert_array_equal(run(filled, {"image": x})["logits"], want)
    again = invoke("train", "--resume", tmp_path / "run", "--epochs", 4)
    assert "adapter.safetensors" in " ".join(again.stdout.split())


def test_batchnormalization_is_put_back(data: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        folded (float[N,1,8,8] image) => (float[N,10] logits) {
        [conv] a = Conv (image, "conv.weight", "conv.bias") b = Relu (a) c = GlobalAveragePool (b) d = Flatten (c)
        [fc] logits = Gemm (d, "fc.weight") }""")
    for name, shape in {"conv.weight": (16, 1, 3, 3), "conv.bias": (16,), "fc.weight": (16, 10)}.items():
        model.graph.initializer.append(numpy_helper.from_array(generator.standard_normal(shape).astype("f"), name))
    onnx.save(model, tmp_path / "folded.onnx")
    invoke("train", *basic(tmp_path / "folded.onnx", data, tmp_path / "run"), "--unfold-batchnorm")
    trained = onnx.load(tmp_path / "run" / "trained.onnx")
    assert [n.op_type for n in trained.graph.node][:3] == ["Conv", "BatchNormalization", "Relu"]
    before = og.transforms.unfold_batchnorm(model, {"image": np.load(data)["pixels"]})
    changed = numbers(tmp_path / "run" / "trained.onnx")
    for tensor in before.graph.initializer:
        assert not np.array_equal(changed[tensor.name], numpy_helper.to_array(tensor)), tensor.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", 0], "--lora must be at least 1, not 0"),
        (["--lora-alpha", 3], "--lora-targets and --lora-alpha are for --lora. Give a rank"),
        (["--lora", 2, "--lora-alpha", 0], "alpha must be above 0"),
        (["--lora", 2, "--lora-targets", "cnv1*"], "Unknown weight or node in targets: 'cnv1*'"),
        (["--lora", 2, "--unfold-batchnorm"], "--unfold-batchnorm has no effect with --lora"),
        (["--unfold-batchnorm"], "No BatchNormalization can follow"),
    ],
)
def test_refusals(options: list[object], message: str, digits_cnn: Path, data: Path, tmp_path: Path) -> None:
    result = invoke("train", *basic(digits_cnn, data, tmp_path / "run"), *options, status=2)
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("layers", "normalized"), [(8, False), (8, True), (2, False)])
def test_a_deep_network_without_normalization_is_told_of_it(layers: int, normalized: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    steps = [f"x{i + 1} = Conv <pads = [1, 1, 1, 1]> (x{i}, w{i}, zeros)" for i in range(layers)]
    stored = {f"w{i}": rng.normal(size=(2, 2, 3, 3)) / 4 for i in range(layers)} | {"zeros": np.zeros(2)}
    last = f"x{layers}"
    if normalized:
        steps.append(f"n = BatchNormalization ({last}, ones, zeros, zeros, ones)")
        stored, last = stored | {"ones": np.ones(2)}, "n"
    text = (
        f"(float[N,2,4,4] x0) => (float[N,2] y) {{ {' '.join(steps)} g = GlobalAveragePool ({last}) y = Flatten (g) }}"
    )
    onnx.save(graph_of(text, **{name: array.astype("f") for name, array in stored.items()}), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(4, 2, 4, 4)).astype("f"), target=rng.integers(0, 2, 4))
    options = ["--data", tmp_path / "data.npz", "--loss", "cross_entropy", "--epochs", 1]
    said = invoke("train", tmp_path / "model.onnx", *options).stderr
    assert ("8 convolutions and no normalization" in said and "--unfold-batchnorm" in said) == (
        layers == 8 and not normalized
    )
