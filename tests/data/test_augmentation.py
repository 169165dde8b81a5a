"""Random changes of training images are the same for the same seed, epoch and sample; broken images are replaced."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import onnx_convgrad as og
from onnx_convgrad.data import ImageFolder, Loader
from onnx_convgrad.data.augmentation import AUGMENTATIONS, Augmentation
from tests.support.command_line import invoke


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / name).mkdir()
        for i in range(6):
            Image.fromarray(rng.integers(0, 256, (10, 12), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def program(digits_cnn: Path) -> og.TrainingProgram:
    return og.build_training(digits_cnn, loss="cross_entropy", optimizer=og.optim.SGD(0.01, momentum=0.9))


def images(
    folder: ImageFolder, program: og.TrainingProgram, epoch: int, *, augment: bool = True, **options: Any
) -> Any:
    loader = Loader(folder, program.manifest, shuffle=False, augment=augment, **options)
    return np.concatenate([batch["image"] for batch in loader.epoch_iterator(epoch)])


def test_the_numbers_drawn_depend_on_seed_epoch_and_sample_alone(pictures: Path, program: og.TrainingProgram) -> None:
    folder = ImageFolder(pictures, augment=AUGMENTATIONS)
    first = images(folder, program, 0, batch_size=4)
    np.testing.assert_array_equal(first, images(folder, program, 0, batch_size=5))
    for other in (
        images(folder, program, 1),
        images(folder, program, 0, seed=1),
        images(folder, program, 0, augment=False),
    ):
        assert (first != other).any(axis=(1, 2, 3)).mean() > 0.7
    np.testing.assert_array_equal(images(folder, program, 0, augment=False), images(ImageFolder(pictures), program, 0))


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_change(name: str) -> None:
    """A flip is one of two images; the others change the image within their ranges."""
    ramp = Image.fromarray(np.tile(np.arange(40, 200, 4, dtype=np.uint8), (30, 1)))
    made = [Augmentation(name)(ramp, np.random.default_rng(i)) for i in range(20)]
    changed = [np.asarray(image) for image in made]
    assert len({image.tobytes() for image in made}) == (2 if name == "flip" else 20)
    if name == "flip":
        assert all(image.tobytes() in (ramp.tobytes(), ImageOps.mirror(ramp).tobytes()) for image in made)
    elif name == "crop":
        shares = [image.size / np.asarray(ramp).size for image in changed]
        assert 0.3 < min(shares) < 0.6 < max(shares) <= 1 and all(
            (np.diff(image.astype(int)) == 4).all() for image in changed
        )
    elif name == "color":
        means = [image.mean() / np.asarray(ramp).mean() for image in changed]
        assert 0.65 < min(means) < 0.9
        assert 1.1 < max(means) < 1.35
    else:
        assert all(abs(image[15, 20].astype(int) - np.asarray(ramp)[15, 20]) < 10 for image in changed)


def test_a_resumed_run_sees_the_same_images(pictures: Path, program: og.TrainingProgram, tmp_path: Path) -> None:
    folder, options = (
        ImageFolder(pictures, augment=["flip", "crop"], preprocessing="unit"),
        {"batch_size": 4, "progress": "none"},
    )
    whole = og.Trainer(program)
    whole.fit(folder, epochs=2, **options)  # type: ignore[arg-type]
    half = og.Trainer(program)
    half.fit(folder, epochs=1, **options)  # type: ignore[arg-type]
    resumed = og.Trainer(program)
    resumed.restore(half.save(tmp_path / "half.safetensors"))
    resumed.fit(folder, epochs=2, validation=folder, **options)  # type: ignore[arg-type]
    for name, array in whole.parameters().items():
        np.testing.assert_array_equal(resumed.parameters()[name], array)
    assert resumed.evaluate(ImageFolder(pictures))["loss"] == pytest.approx(resumed.progress.history[-1]["val_loss"])


def test_a_function_of_the_caller(pictures: Path, program: og.TrainingProgram, tmp_path: Path) -> None:
    inverted = images(ImageFolder(pictures, transform=lambda image: 255 - np.asarray(image)), program, 0)
    for path in pictures.rglob("*.png"):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        Image.fromarray(255 - np.asarray(Image.open(path))).save(tmp_path / path.relative_to(pictures))
    np.testing.assert_array_equal(inverted, images(ImageFolder(tmp_path), program, 0))
    noisy = ImageFolder(pictures, transform=lambda image, rng: image.point(lambda p: p // 2 + int(rng.integers(99))))
    np.testing.assert_array_equal(images(noisy, program, 3), images(noisy, program, 3))

    def failing(image: Any) -> Any:
        raise KeyError(image.size)

    with pytest.raises(KeyError):
        images(ImageFolder(pictures, transform=failing), program, 0)
    for wrong, message in (
        ("flop", "Unknown augmentation 'flop'. Did you mean 'flip'"),
        (3, "takes a name or several"),
    ):
        with pytest.raises(og.errors.ArgumentError, match=message):
            ImageFolder(pictures, augment=wrong)  # type: ignore[arg-type]
    with pytest.raises(og.errors.ArgumentError, match="returned an array of float64"):
        images(ImageFolder(pictures, transform=lambda _: np.zeros((3, 3))), program, 0)


def test_broken_images_are_left_out_or_replaced_and_listed(pictures: Path, digits_cnn: Path, tmp_path: Path) -> None:
    data = shutil.copytree(pictures, tmp_path / "data")
    (data / "a" / "0.png").write_bytes(b"not an image")
    whole = (data / "b" / "5.png").read_bytes()
    (data / "b" / "5.png").write_bytes(whole[: len(whole) // 2])
    program = og.build_training(digits_cnn, loss="cross_entropy", optimizer=og.optim.SGD(0.01))
    with pytest.warns(UserWarning, match=r"1 of 12 images in '.*data' cannot be read and are left out: '.*a/0\.png'"):
        folder = ImageFolder(data)
    assert len(folder) == 11
    with pytest.warns(UserWarning, match=r"b/5\.png' could not be read: .*Another image of its class takes its place"):
        read = images(folder, program, 0)
    np.testing.assert_array_equal(read[-1], read[5])  # the first of its class
    assert [Path(name).name for name in folder.broken] == ["0.png", "5.png"]
    options = ["--loss", "cross_entropy", "--epochs", 1, "--augment", "flip,crop", "--out", tmp_path / "run"]
    result = invoke("train", digits_cnn, "--data", data, *options)
    assert "1 of 12 images" in result.stderr
    assert (tmp_path / "run" / "broken_images.txt").read_text().count("\n") == 2
    for path in (data / "a").iterdir():
        path.write_bytes(b"")
    for path in (data / "b").iterdir():
        path.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="12 of 12"),
        pytest.raises(og.errors.ArgumentError, match="no folders with images"),
    ):
        ImageFolder(data)
