"""The command `inspect`: the tree of layers, why values are not trained, and globs that select what they promise."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from onnx_convgrad.frontend.exporters.pytorch import FOLDED
from onnx_convgrad.frontend.load import load
from onnx_convgrad.programs.plan import parameter_names
from tests.support.command_line import invoke, process, stored
from tests.support.one_input import graph_of

DIGITS = "examples/models/digits_cnn.onnx"


def inspected(model: onnx.ModelProto | Path, folder: Path, *options: str) -> dict[str, Any]:
    path = model if isinstance(model, Path) else folder / "model.onnx"
    if isinstance(model, onnx.ModelProto):
        onnx.save(model, path)
    content: dict[str, Any] = json.loads(invoke("inspect", path, "--json", *options).stdout)
    return content


def chain(names: list[str], nodes: list[str] | None = None, constant: str = "") -> onnx.ModelProto:
    """Products with weights of these names, by nodes of these names."""
    weights = {name: np.full((4, 4), i + 1, np.float32) for i, name in enumerate(names)}
    text = " ".join(f'h{i + 1} = MatMul (h{i}, "{name}")' for i, name in enumerate(names))
    if constant:
        weights[constant] = np.array(1e-3, np.float32)
        text += f' y = Add (h{len(names)}, "{constant}")'
    last = "y" if constant else f"h{len(names)}"
    model = graph_of(f"(float[N,4] h0) => (float[N,4] {last}) {{ {text} }}", **weights)
    for node, name in zip(model.graph.node, nodes or (), strict=False):
        node.name = name
    return model


def folded() -> onnx.ModelProto:
    """Weights that PyTorch's newer exporter transposed and numbered, beside one that it did not."""
    model = chain(["enc.l.0.scale", "val_3", "val_7"])
    for number, name in {"val_3": "enc.l.0.weight", "val_7": "enc.l.1.weight"}.items():
        info = onnx.helper.make_tensor_value_info(number, onnx.TensorProto.FLOAT, [4, 4])
        info.metadata_props.add(key=FOLDED, value=f"['{name}']")
        model.graph.value_info.append(info)
    return model


FILES = {
    "dots": lambda: chain(["a.0.w", "a.0.v", "a.1.w", "b.w"]),
    "slashes": lambda: chain(["net/a/kernel:0", "net/a/other:0", "net/b/kernel:0"], constant="net/a/eps:0"),
    "numbers": lambda: chain(["413", "414", "onnx::MatMul_9"], ["/a/a.0/MatMul", "/a/a.1/MatMul", "/b/MatMul"]),
    "brackets and commas": lambda: chain(["a[0].w", "a[0].v", "a0.w", "b,c.w", "b,c.v"]),
    "folded": folded,
    "long": lambda: chain([f"backbone.encoder.layers.layer_{i}.{k}" for i in range(12) for k in "wv"]),
}


@pytest.mark.filterwarnings("ignore:.*look like constants")
@pytest.mark.parametrize("kind", FILES)
def test_the_glob_of_a_layer_selects_its_parameters(kind: str, tmp_path: Path) -> None:
    model = FILES[kind]()
    data = inspected(model, tmp_path)
    every = [v["name"] for v in data["values"] if v["kind"] == "parameter"]
    graph = load(model).canonical.graph
    assert data["parameters"] == 16 * len(every) and set(every) == set(parameter_names(graph, "parameters", ()))
    assert data["layers"]
    for row in data["layers"]:
        assert row["glob"], row
        chosen = parameter_names(graph, row["glob"].split(","), ())
        assert (len(chosen), 16 * len(chosen)) == (row["tensors"], row["parameters"]), row
        if len(chosen) < len(every):
            assert set(parameter_names(graph, "parameters", row["glob"])) == set(every) - set(chosen)
    for glob, names in data["globs"].items():
        assert set(parameter_names(graph, glob, ())) == set(names)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dots", {"a": "a.*", "0": "a.0.*", "b.w": "b.w"}),
        ("slashes", {"net": "net/*", "a": "net/a/*"}),
        ("numbers", {"a": "/a/*", "0/413": "413", "b/onnx::MatMul_9": "onnx::MatMul_9"}),
        ("brackets and commas", {"a[0]": "a[[]0].*", "b,c": "b?c.*"}),
        ("folded", {"enc.l": "enc.*", "0": "enc.l.0.*"}),
        ("long", {"layer_1": "*.layer_1.*"}),
    ],
)
def test_layers_come_from_names_or_from_nodes(kind: str, expected: dict[str, str], tmp_path: Path) -> None:
    rows = {row["layer"]: row["glob"] for row in inspected(FILES[kind](), tmp_path)["layers"]}
    assert rows | expected == rows


def test_numbered_weights_of_the_older_exporter_are_found_by_their_modules(tmp_path: Path) -> None:
    block = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3), torch.nn.ReLU())
    net = torch.nn.Sequential(block, torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3))).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.zeros(1, 3, 4, 4),), tmp_path / "model.onnx", dynamo=False)
    rows = {row["layer"]: row for row in inspected(tmp_path / "model.onnx", tmp_path)["layers"]}
    graph = load(tmp_path / "model.onnx").canonical.graph
    for row in rows.values():
        assert len(parameter_names(graph, row["glob"], ())) == row["tensors"]
    assert sum(row["parameters"] for row in rows.values() if row["level"] == 0) == 24


def test_text_of_a_small_network() -> None:
    text = invoke("inspect", DIGITS).stdout
    assert "opset ai.onnx 17" in text and "float32  Nx1x8x8  image" in text
    assert "bn1                                32   0.2%  bn1.*" in text
    assert "  running_mean  16                            running statistic" in text
    assert "Trained by default: 20,698 numbers in 11 tensors." in text
    assert "6  running statistic" in text and "In all layers: *.weight (7), *.bias (4)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "running_mean" not in invoke("inspect", DIGITS, "--depth", 1).stdout
    assert "logits" in invoke("inspect", DIGITS, "-v").stdout.splitlines()[-1]
    assert invoke("inspect", DIGITS, "-q").stdout == ""


def test_a_network_of_many_layers_fits(tmp_path: Path) -> None:
    onnx.save(chain([f"net.block{i}.{k}" for i in range(60) for k in "wv"]), tmp_path / "many.onnx")
    text = invoke("inspect", tmp_path / "many.onnx").stdout
    assert len(text.splitlines()) < 80 and max(map(len, text.splitlines()[1:])) <= 80
    assert re.search(r"^net +1,920  100.0%  net\.\*$", text, re.MULTILINE)
    assert "block59" in invoke("inspect", tmp_path / "many.onnx", "--depth", 2, "-v").stdout


def test_why_values_are_not_trained(tmp_path: Path) -> None:
    text = """(float[N,4] x, float[4] bound) => (float[N,4] y) {
        h = MatMul (x, w) a = Add (h, one) q = DequantizeLinear (wq, s, z) b = MatMul (a, q)
        r = Reshape (b, sizes) f = Mul (r, bound) y = Add (f, half) }"""
    arrays = {
        "w": np.ones((4, 4), np.float32), "one": np.array([2], np.float32), "wq": np.ones((4, 4), np.int8),
        "s": np.array(0.1, np.float32), "z": np.array(0, np.int8), "sizes": np.array([-1, 4]),
        "half": np.array(0.5, np.float32), "unused": np.ones(3, np.float32),
    }  # fmt: skip
    data = inspected(graph_of(text, **arrays), tmp_path, "--input-value", "bound=1")
    reasons = {v["name"]: v["reason"] for v in data["values"]}
    expected = {
        "w": "", "one": "one number", "wq": "weight stored as integers", "sizes": "integers", "unused": "not used",
        "bound": "input that is bound to a constant",
    }  # fmt: skip
    assert reasons | expected == reasons


def test_labels_and_preprocessing_are_shown(tmp_path: Path) -> None:
    model = chain(["w"])
    for key, value in {
        "onnx_convgrad.labels": ["cat", "dog", "owl", "fox", "bee", "ant"],
        "onnx_convgrad.preprocessing": {"size": [8, 9], "layout": "NHWC", "mean": [0.5], "std": [0.1, 0.2, 0.25]},
    }.items():
        model.metadata_props.add(key=key, value=json.dumps(value))
    data = inspected(model, tmp_path)
    assert data["labels"][:2] == ["cat", "dog"] and data["preprocessing"]["size"] == [8, 9]
    text = invoke("inspect", tmp_path / "model.onnx").stdout
    assert "Images: 8x9, NHWC, (pixel * 0.00392157 - 0.5) / [0.1, 0.2, 0.25]" in text
    assert "Labels: cat, dog, owl, fox, bee and 1 more" in text


def test_external_weights_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain([f"a.{i}" for i in range(3)])
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    monkeypatch.setattr(ir.ExternalTensor, "numpy", lambda _: pytest.fail("weights were read"))
    data = inspected(tmp_path / "m.onnx", tmp_path)
    assert data["parameters"] == 48 and data["external_data"]["m.bin"] >= 4 * 48


def test_a_model_that_nothing_can_be_done_with_is_shown(tmp_path: Path) -> None:
    onnx.save(
        graph_of("(float[4] x) => (float[4] y) { y = Nonsense (x, w) }", w=np.ones(4, np.float32)), tmp_path / "n.onnx"
    )
    result = process("inspect", tmp_path / "n.onnx")
    assert "Warning: Nothing in this model can be trained: " in result.stderr
    assert "not known" in result.stdout


BAD = {
    "no_file.onnx": "There is no file",
    ".": "is a folder, not a model",
    "pyproject.toml": "is not a readable ONNX model",
    f"{DIGITS} --input-value imag=1": "Unknown input in input_values: 'imag'. Did you mean 'image'?",
    f"{DIGITS} --input-shape imag:1": "Unknown input 'imag'. Did you mean 'image'?",
    f"{DIGITS} --input-value image=1": "does not fit ['N', 1, 8, 8]. Give every number of it.",
    f"{DIGITS} --limit nods=1": "Unknown limit 'nods'. Did you mean 'nodes'?",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments_give_one_paragraph(arguments: str) -> None:
    result = invoke("inspect", *arguments.split(), status=2)
    assert result.stderr.startswith("Error: ") and BAD[arguments] in result.stderr
    assert result.stderr.count("\n") == 1


def test_errors_about_names_point_here(tmp_path: Path) -> None:
    for option in ("--wrt", "--of"):
        error = invoke("augment", stored(tmp_path), option, "w1x", status=2).stderr
        assert "Did you mean 'w1'?" in error and "`python -m onnx_convgrad inspect MODEL` lists the names." in error
