"""Classifiers as people have them are fine-tuned on 200 pictures by one command, and run from their own metadata."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn

import onnx_convgrad as og
from tests.support.command_line import invoke
from tests.support.one_input import graph_of

NAMES = ("checks", "columns", "dots", "plain", "rows")


def picture(name: str, rng: np.random.Generator) -> Image.Image:
    """A texture of two random colors, of a random size."""
    height, width = rng.integers(70, 100, 2)
    y, x = np.mgrid[:height, :width]
    period = int(rng.integers(8, 13))
    down, across = (((line + rng.integers(period)) // (period // 2)) % 2 for line in (y, x))
    mask = {"rows": down, "columns": across, "checks": down ^ across, "dots": down & across, "plain": 0 * down}[name]
    light, dark = rng.integers(130, 255, 3), rng.integers(0, 90, 3)
    pixels = np.where(mask[..., None] == 1, dark, light) + rng.integers(-12, 13, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(5)
    for part, count in (("train", 40), ("test", 10)):
        for name in NAMES:
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                picture(name, rng).save(folder / part / name / f"{i}.jpg", quality=90)
    return folder


def torchlike() -> onnx.ModelProto:
    """1000 classes, one image at a time, Softmax at the end, folded BatchNormalization: an export of PyTorch."""
    rng = np.random.default_rng(0)
    shapes = {"c1": (16, 3, 3, 3), "c2": (32, 16, 3, 3), "c3": (48, 32, 3, 3), "fc.weight": (1000, 48)}
    stored = {name: rng.standard_normal(s) * (2 / np.prod(s[1:])) ** 0.5 for name, s in shapes.items()}
    stored |= {"b1": np.zeros(16), "b2": np.zeros(32), "b3": np.zeros(48), "fc.bias": np.zeros(1000)}
    return graph_of(
        """(float[1,3,96,96] input) => (float[1,1000] prob) {
        a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (input, c1, b1) d = Relu (a)
        e = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (d, c2, b2) f = Relu (e)
        g = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (f, c3, b3) h = Relu (g) i = GlobalAveragePool (h)
        j = Flatten (i) k = Gemm <transB = 1> (j, "fc.weight", "fc.bias") prob = Softmax <axis = 1> (k) }""",
        **{name: array.astype("f") for name, array in stored.items()},
    )


def tensorflowlike() -> onnx.ModelProto:
    """Channels last at the input and before the mean, SAME padding, a background class: a file of tf2onnx."""
    rng = np.random.default_rng(1)
    shapes = {"stem/kernel": (16, 3, 3, 3), "dw": (16, 1, 3, 3), "pw": (32, 16, 1, 1), "last": (48, 32, 3, 3)}
    stored = {name: rng.standard_normal(s) * (2 / np.prod(s[1:])) ** 0.5 for name, s in shapes.items()}
    stored |= {
        "stem/bias": np.zeros(16),
        "dense/kernel": rng.standard_normal((48, 1001)) / 7,
        "dense/bias": np.zeros(1001),
    }
    return graph_of(
        """(float[unk__1,64,64,3] input_1) => (float[unk__1,1001] Predictions) {
        t = Transpose <perm = [0, 3, 1, 2]> (input_1)
        a = Conv <strides = [2, 2], auto_pad = "SAME_UPPER"> (t, "stem/kernel", "stem/bias") b = Relu (a)
        c = Conv <group = 16, strides = [2, 2], auto_pad = "SAME_UPPER"> (b, dw) e = Conv (c, pw) f = Relu (e)
        h = Conv <strides = [2, 2], auto_pad = "SAME_UPPER"> (f, last) i = Relu (h)
        j = Transpose <perm = [0, 2, 3, 1]> (i) k = ReduceMean <axes = [1, 2], keepdims = 0> (j)
        l = MatMul (k, "dense/kernel") n = Add (l, "dense/bias") Predictions = Softmax <axis = -1> (n) }""",
        **{name: array.astype("f") for name, array in stored.items()},
    )


class Inverted(nn.Module):
    """An inverted residual block (MobileNetV2)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        hidden, self.residual = 3 * inner, stride == 1 and inner == outer
        self.layers = nn.Sequential(
            nn.Conv2d(inner, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(),
            nn.Conv2d(hidden, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return x + y if self.residual else y


class Mobile(nn.Module):
    """A small MobileNetV2, whose exporter folds BatchNormalization."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(), Inverted(12, 16, 2),
            Inverted(16, 16, 1), Inverted(16, 32, 2), nn.Conv2d(32, 96, 1, bias=False), nn.BatchNorm2d(96), nn.ReLU6(),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(96, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.classifier(self.features(x).mean((2, 3))), -1)


def mobile(folder: Path) -> Path:
    torch.manual_seed(0)
    net = Mobile().train()
    for _ in range(5):
        net(torch.rand(8, 3, 64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.eval(), (torch.zeros(1, 3, 128, 128),), folder / "model.onnx", dynamo=False, input_names=["data"]
        )
    assert "BatchNormalization" not in {n.op_type for n in onnx.load(folder / "model.onnx").graph.node}
    return folder / "model.onnx"


CASES: dict[str, tuple[Any, list[object]]] = {
    "softmax": (torchlike, ["--image-size", 64, "--lr", 0.002]),
    "tensorflow": (tensorflowlike, ["--lr", 0.003]),
    "mobile": (None, ["--unfold-batchnorm", "--image-size", 64, "--lr", 0.002]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_command_reaches_95_percent(name: str, pictures: Path, tmp_path: Path) -> None:
    made, options = CASES[name]
    path = mobile(tmp_path) if made is None else tmp_path / "model.onnx"
    if made is not None:
        onnx.save(made(), path)
    told = invoke(
        "train", path, "--data", pictures / "train", "--validation", pictures / "test", "--epochs", 15, *options
    )
    assert "it was replaced by one with 5 and fresh weights" in told.stderr
    assert "the loss cross_entropy takes logits: it reads" in told.stderr
    best = tmp_path / "model.train" / "best.onnx"
    found = json.loads(invoke("evaluate", best, pictures / "test", "--json").stdout)
    assert found["metrics"]["accuracy"] >= 0.95

    session = onnxruntime.InferenceSession(str(best))  # the rest does without this package
    about = session.get_modelmeta().custom_metadata_map
    labels, how = (json.loads(about[f"onnx_convgrad.{key}"]) for key in ("labels", "preprocessing"))
    assert labels == list(NAMES)
    right = []
    for file in sorted((pictures / "test").rglob("*.jpg")):
        with Image.open(file) as image:
            height, width = how["size"]
            scale = max(height / image.height, width / image.width)
            wide, high = max(width, round(image.width * scale)), max(height, round(image.height * scale))
            left, top = (wide - width) // 2, (high - height) // 2
            whole = image.convert("RGB").resize((wide, high), Image.Resampling.BILINEAR)
            pixels = np.asarray(whole.crop((left, top, left + width, top + height)), np.float32)
        numbers = (pixels * how["scale"] - np.array(how["mean"])) / np.array(how["std"])
        numbers = numbers.transpose(2, 0, 1) if how["layout"] == "NCHW" else numbers
        (y,) = session.run(None, {session.get_inputs()[0].name: numbers[None].astype(np.float32)})
        right.append(labels[int(y.argmax())] == file.parent.name)
        assert y.sum() == pytest.approx(1, abs=1e-5)
    assert np.mean(right) == pytest.approx(found["metrics"]["accuracy"])


def test_statistics_are_measured_at_the_size_of_the_training(pictures: Path) -> None:
    model = torchlike()
    x = np.random.default_rng(0).random((4, 3, 32, 32), np.float32)
    back = og.transforms.unfold_batchnorm(og.load(model, input_shapes={"input": ["N", 3, 32, 32]}), {"input": x})
    assert sum(n.op_type == "BatchNormalization" for n in back.graph.node) == 3
    assert [d.dim_value for d in back.graph.input[0].type.tensor_type.shape.dim] == [1, 3, 96, 96]
    with pytest.raises(og.errors.ArgumentError, match="takes"):
        og.transforms.unfold_batchnorm(model, {"input": x})
    assert len(list(pictures.rglob("*.jpg"))) == 250
