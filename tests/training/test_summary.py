"""The summary before training: data and what is odd about them, what is trained and frozen, loss, optimizer, steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import onnx_convgrad as og
from onnx_convgrad.frontend.metadata import Preprocessing
from tests.support.command_line import invoke


def folder(path: Path, **counts: int) -> Path:
    for name, count in counts.items():
        (path / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(np.full((8, 8), 20 * i, np.uint8)).save(path / name / f"{i}.png")
    return path


@pytest.fixture(scope="module")
def program(digits_cnn: Path) -> og.TrainingProgram:
    return og.build_training(digits_cnn, loss="cross_entropy", optimizer=og.optim.SGD(0.1), freeze="conv1.*")


def test_it_says_what_is_trained_on_what_and_how(program: og.TrainingProgram, tmp_path: Path) -> None:
    names = [f"class{i}" for i in range(10)]
    train = folder(tmp_path / "train", **dict.fromkeys(names, 2), empty=0)
    val = folder(tmp_path / "val", **dict.fromkeys(names[:9], 1))
    trainer = og.Trainer(program)
    summary = trainer.summary(train, epochs=3, batch_size=4, validation=val)
    assert summary.train and summary.validation and summary.steps == (5, 15)
    assert summary.train.classes == dict.fromkeys(names, 2) and summary.validation.classes["class9"] == 0
    assert summary.train.inputs["image"] == ("float32", (4, 1, 8, 8), 0.0, pytest.approx(20 / 255))
    frozen = {layer: counts for layer, counts in summary.layers.items() if counts[1]}
    assert frozen == {"conv1": (0, 144)}
    trained = sum(array.size for array in trainer.parameters().values())
    assert sum(counts[0] for counts in summary.layers.values()) == trained
    text = str(summary)
    for part in ("20 samples of 10 classes, 2 of each", "CrossEntropy of 'logits'", "SGD(lr=0.1", "Constant(lr=0.1)",
                 "5 per epoch, 15 in total", f"{trained:,} numbers; 144 are frozen", "8x8, (pixel * 1/255"):  # fmt: skip
        assert part in text
    assert "hold no images and are not classes: 'empty'" in text
    assert "The validation has no samples of 'class9'." in text
    assert str(og.Trainer(program).summary()).startswith("loss ")


def test_odd_data_are_told(program: og.TrainingProgram, tmp_path: Path) -> None:
    trainer = og.Trainer(program)
    image, target = np.full((12, 1, 8, 8), 200.0, "f"), np.arange(12) % 3
    held = {"image": image / 255, "target": np.arange(12) % 5}
    first, *more = trainer.summary({"image": image, "target": target}, validation=held).warnings
    assert first.startswith("Nothing to train on for '3', '4', '5', '6', '7', '8' and 1 more of 10 classes")
    assert "numbers from 200 to 200, which look like pixels" in more[0]
    assert more[1] == "The validation has samples of '3', '4', of which there are none to train on."
    trainer.preprocessing = Preprocessing(mean=(0.5,), std=(0.5,))
    assert "images give -1 to 1" in trainer.summary({"image": image, "target": target}).warnings[1]
    few = trainer.summary(folder(tmp_path / "few", a=1, b=1))
    assert "The model has 10 classes, the data 2" in few.warnings[0]


def test_the_folder_above_training_and_validation_is_refused(digits_cnn: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        folder(tmp_path / "my data" / part, cat=1, dog=1)
    message = r"holds no classes but parts of a data set: train, val\. Give --data '.*/train' --validation '.*/val'"
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.data.ImageFolder(tmp_path / "my data")
    data = ["--data", tmp_path / "my data", "--loss", "cross_entropy", "--out", tmp_path / "run"]
    result = invoke("train", digits_cnn, *data, status=2)
    assert "Give --data" in result.stderr and not (tmp_path / "run").exists()
    folder(tmp_path / "vehicles", train=1, car=1)  # a class may have such a name
    assert og.data.ImageFolder(tmp_path / "vehicles").classes == ("car", "train")
