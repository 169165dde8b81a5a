"""`train` says, also with -q, the choices that it makes: preprocessing, a new last layer, classes, nothing left to do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image
from typer.testing import Result

from onnx_convgrad.data.datasets import Arrays
from onnx_convgrad.data.images import ImageFolder
from onnx_convgrad.frontend.metadata import NAMED
from tests.support.command_line import invoke as invoke_command
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
CLASSES = 4


def invoke(command: str, *arguments: object, status: int = 0) -> Result:
    return invoke_command(command, *arguments, status=status)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of four classes without metadata, images in four folders, and one image."""
    folder = tmp_path_factory.mktemp("choices")
    text = (
        "(float[N,3,8,8] image) => (float[N,4] y) { g = GlobalAveragePool (image) f = Flatten (g) y = Gemm (f, w, b) }"
    )
    w = RNG.standard_normal((3, CLASSES)).astype(np.float32)
    onnx.save(graph_of(text, w=w, b=np.zeros(CLASSES, np.float32)), folder / "model.onnx")
    for number in range(CLASSES):
        (folder / "images" / f"c{number}").mkdir(parents=True)
        for i in range(3):
            pixels = RNG.integers(0, 255, (8, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"c{number}" / f"{i}.png")
    return folder


def trained(course: Path, tmp_path: Path, labels: np.ndarray, *options: object, status: int = 0) -> str:
    """The output of training on labels with -q."""
    image = RNG.random((len(labels), 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", image=image, target=labels)
    return " ".join(
        invoke(
            "train", course / "model.onnx", "--data", tmp_path / "data.npz", "--loss", "cross_entropy", "--epochs", 1,
            "-q", "--out", tmp_path / "run", *options, status=status,
        ).stderr.split()
    )  # fmt: skip


def outputs(tmp_path: Path) -> int:
    model = onnx.load(tmp_path / "run" / "trained.onnx")
    return int(model.graph.output[0].type.tensor_type.shape.dim[1].dim_value)


ASSUMED = "does not say how pixels become numbers: they are scaled to [0, 1]"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), True),
        (("--preprocessing", "imagenet"), False),
        (("--preprocessing", "unit"), False),
        (("--mean", "0.5", "--std", "0.5"), False),
        (("--image-size", "8"), True),
    ],
)
def test_an_assumed_preprocessing_is_said(
    course: Path, tmp_path: Path, options: tuple[str, ...], *, said: bool
) -> None:
    run = tmp_path / "run"
    result = invoke(
        "train", course / "model.onnx", "--data", course / "images", "--epochs", 1, "-q", "-o", run, *options
    )
    assert (ASSUMED in " ".join(result.stderr.split())) is said
    stored = {p.key: p.value for p in onnx.load(run / "trained.onnx").metadata_props}["onnx_convgrad.preprocessing"]
    if options[:1] == ("--preprocessing",):
        assert json.loads(stored)["mean"] == list(NAMED[options[1]].mean)
    again = invoke("train", "--resume", run, "--epochs", 2, "-q")
    assert ASSUMED not in " ".join(again.stderr.split())


@pytest.mark.parametrize("name", NAMED)
def test_usual_preprocessings_have_names(course: Path, tmp_path: Path, name: str) -> None:
    """For predict, evaluate and attribute; mean and std win over a name."""
    p = NAMED[name]
    numbers = ["--mean", ",".join(map(str, p.mean)), "--std", ",".join(map(str, p.std)), "--scale", str(p.scale)]
    found = []
    for given in (["--preprocessing", name], numbers, ["--preprocessing", "clip", *numbers]):
        invoke("predict", course / "model.onnx", course / "images" / "c0", "-o", tmp_path / "p.npz", *given)
        with np.load(tmp_path / "p.npz") as arrays:
            found.append(arrays["y"])
        invoke("evaluate", course / "model.onnx", course / "images", *given)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    np.testing.assert_allclose(found[0], found[2], rtol=1e-6)


def test_unknown_preprocessings_are_refused(course: Path) -> None:
    result = invoke("predict", course / "model.onnx", course / "images", "--preprocessing", "imagnet", status=2)
    assert "imagenet" in result.stderr


@pytest.mark.parametrize(
    ("labels", "options", "classes", "message"),
    [
        (np.arange(32) % 4, (), 4, ""),
        (
            np.arange(32) % 4 + 1,
            (),
            5,
            "had 4 classes: it was replaced by one with 5 and fresh weights. The labels count from 1",
        ),
        (np.arange(32) % 6, (), 6, "had 4 classes: it was replaced by one with 6 and fresh weights. The data have 6"),
        (np.arange(32) % 2, (), 2, "had 4 classes: it was replaced by one with 2 and fresh weights. The data have 2"),
        (np.arange(32) % 2, ("--classes", 4), 4, ""),
        (np.where(np.arange(32) % 2, 3, 0), (), 4, ""),
        (np.where(np.arange(32) == 3, 255, np.arange(32) % 4), ("--loss-option", "ignore_index=255"), 4, ""),
    ],
    ids=["fitting", "from one", "more", "fewer", "fewer but kept", "gaps inside", "ignored"],
)
def test_a_new_last_layer_is_said(
    course: Path, tmp_path: Path, labels: np.ndarray, options: tuple[object, ...], classes: int, message: str
) -> None:
    said = trained(course, tmp_path, labels, *options)
    assert outputs(tmp_path) == classes
    assert ("was replaced" in said) == bool(message)
    assert message in said


@pytest.mark.parametrize("odd", [255, 1000, 30_000_000, 2**62])
def test_labels_far_above_the_others_are_refused(course: Path, tmp_path: Path, odd: int) -> None:
    said = trained(course, tmp_path, np.where(np.arange(32) == 3, odd, np.arange(32) % 4), status=2)
    assert f"5 different labels, the largest of which is {odd}, and the model has 4 classes" in said
    assert f"--loss-option ignore_index={odd}" in said
    assert (f"--classes {odd + 1}" in said) == (odd < 10**6)


def test_a_single_class_is_said(course: Path, tmp_path: Path) -> None:
    assert "All samples are of the class '0': there is nothing to tell it from" in trained(
        course, tmp_path, np.zeros(8, np.int64), "--classes", 4
    )


def test_a_resumed_run_with_nothing_left_says_so(course: Path, tmp_path: Path) -> None:
    trained(course, tmp_path, np.arange(32) % 4)
    for option, epochs in (((), 1), (("--epochs", 1), 1)):
        said = " ".join(invoke("train", "--resume", tmp_path / "run", "-q", *option).stderr.split())
        assert f"Nothing is left to train: 1 of {epochs} epochs are finished. To go on, give more: --epochs 2." in said
    assert "Nothing is left" not in invoke("train", "--resume", tmp_path / "run", "-q", "--epochs", 2).stderr


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_splits_have_about_the_share_of_each_class(course: Path, share: float, seed: int) -> None:
    labels = RNG.permutation(np.repeat([0, 1, 2], [100, 40, 20]))
    sets = [Arrays({"x": np.arange(160), "y": labels})]
    for whole in sets:
        train, held = whole.split(share, seed)
        assert len(held) == round(share * len(whole))
        rows = [part.take(slice(None)) for part in (train, held)]
        assert sorted(np.concatenate([r["x"] for r in rows])) == list(range(160))
        for number, count in ((0, 100), (1, 40), (2, 20)):
            assert abs((rows[1]["y"] == number).sum() - share * count) <= 1
    other = sets[0].split(share, seed + 1)[1].take(slice(None))["x"]
    assert not np.array_equal(other, rows[1]["x"])
    images = ImageFolder(course / "images").split(1 / 3, seed)[1]
    assert sorted(np.bincount([ImageFolder(course / "images").files[i][1] for i in images.rows])) == [1, 1, 1, 1]
