"""The command `attribute`: pictures and arrays of explanations, for files of every layout, and error messages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from onnx_convgrad import attribution
from onnx_convgrad.cli.attribute import METHODS
from onnx_convgrad.runtime import run
from tests.support.classifiers import Classifier
from tests.support.command_line import invoke

PIXELS = ["--mean", 0.5, "--std", 0.25]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images, their classifier in two layouts, and names of its classes."""
    folder, rng = tmp_path_factory.mktemp("work"), np.random.default_rng(0)
    for name in ("cat", "dog"):
        Image.fromarray(rng.integers(0, 256, (20, 12, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    net = Classifier()
    onnx.save(net.file(end="Softmax"), folder / "m.onnx")
    onnx.save(net.file(batch="2", layout="NHWC"), folder / "two.onnx")
    (folder / "labels.txt").write_text("ant\nbee\ncat\ndog\neel\n")
    return folder


def test_the_methods_are_those_of_the_package() -> None:
    assert set(METHODS) == set(attribution.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grad_cam", "lrp", "occlusion"])
def test_a_picture_of_two_images(work: Path, tmp_path: Path, method: str) -> None:
    path = tmp_path / "map.png"
    options = ["--model", work / "m.onnx", "--labels", work / "labels.txt", "--method", method, "-o", path, *PIXELS]
    shown = invoke("attribute", work / "cat.png", work / "dog.png", *options).stdout
    assert shown.splitlines()[0].split() == ["image", "explained", "class", "probability"]
    assert f"The explanation by {method} is in {path}." in shown
    with Image.open(path) as drawn:
        pixels = np.asarray(drawn.convert("RGB"))
    assert drawn.size[0] > 1000 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100


def test_arrays_equal_the_function(work: Path, tmp_path: Path) -> None:
    path, exported = tmp_path / "map.npz", tmp_path / "explained.onnx"
    options = ["--model", work / "m.onnx", "--method", "integrated-gradients", "--steps", 5, "--label", 2, *PIXELS]
    shown = invoke(
        "attribute", work / "cat.png", work / "dog.png", *options, "-o", path, "--export", exported, "--json"
    ).stdout
    found = np.load(path)
    rows = json.loads(shown)["images"]
    assert [row["class"] for row in rows] == found["label"].tolist() == [2, 2]
    assert all(0 < row["probability"] < 1 for row in rows)
    made = attribution.integrated_gradients(str(work / "m.onnx"), label=2, steps=5)
    for i, name in enumerate(("cat", "dog")):
        with Image.open(work / f"{name}.png") as image:
            small = image.resize((8, 13), Image.Resampling.BILINEAR).crop((0, 2, 8, 10))
        x = ((np.asarray(small, np.float32) / 255 - 0.5) / 0.25).transpose(2, 0, 1)[None]
        for model in (made, exported):
            expected = run(model, {"image": x})["attribution"][0]
            np.testing.assert_allclose(found["attribution"][i], expected, rtol=1e-4, atol=1e-6)


def test_a_fixed_batch_with_channels_last(work: Path, tmp_path: Path) -> None:
    for model, path in (("m.onnx", tmp_path / "one.npz"), ("two.onnx", tmp_path / "two.npz")):
        options = ["--model", work / model, "--method", "saliency", "-o", path, "-q", *PIXELS]
        assert invoke("attribute", work / "cat.png", work / "dog.png", *options).stdout == ""
    one, two = (np.load(tmp_path / f"{name}.npz")["attribution"] for name in ("one", "two"))
    np.testing.assert_allclose(two.transpose(0, 3, 1, 2), one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "cam"], "Unknown method 'cam'. Did you mean 'grad_cam'"),
        (["--window", 4], "--window is for the method occlusion, not for grad_cam."),
        (["-o", "map.gif"], "An explanation cannot be written as 'map.gif'. Use .png, .svg, .pdf, .npz."),
        (["--label", "cta"], "The model does not name its classes, so 'cta' is not known. Give a number."),
        (["--label", 7], "There is no class 7: the model has 5, numbered from 0."),
        (["--layer", "r3"], "Unknown value in layer: 'r3'."),
    ],
)
def test_errors(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = invoke("attribute", work / "cat.png", "--model", work / "m.onnx", *PIXELS, *options, status=2).output
    assert message in shown
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_classes_is_not_taken_for_a_folder_of_images(work: Path, tmp_path: Path) -> None:
    (tmp_path / "images" / "cats").mkdir(parents=True)
    shutil.copy(work / "cat.png", tmp_path / "images" / "cats")
    shown = invoke("attribute", tmp_path / "images", "--model", work / "m.onnx", *PIXELS, status=2).output
    assert f"'{tmp_path / 'images'}' has no images of its own, but a folder for each class. Name the images" in shown


def test_wrong_names_of_classes_get_suggestions(work: Path, tmp_path: Path) -> None:
    options = ["--model", work / "m.onnx", "--labels", work / "labels.txt", "--label", "cta", *PIXELS]
    shown = invoke("attribute", work / "cat.png", *options, "-o", tmp_path / "map.png", status=2).output
    assert "Unknown class 'cta'. Did you mean 'cat'" in shown
