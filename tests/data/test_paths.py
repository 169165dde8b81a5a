"""Every path of data is read once, as what it is: whatever its name ends in, through links, and among others."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

import onnx_convgrad as og
from onnx_convgrad.data.batches import as_dataset
from onnx_convgrad.data.files import ImageFiles, read_data
from onnx_convgrad.data.images import SUFFIXES, ImageFolder, images_in
from tests.support.one_input import graph_of

NAMES = [f"a{suffix}" for suffix in (*sorted(SUFFIXES), ".csv", ".tsv", ".txt", ".npz", ".npy", ".onnx", "", ".v2")]


def picture(path: Path, gray: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (2, 2), (gray, gray, gray)).save(path)
    return path


def first_pixels() -> onnx.ModelProto:
    return graph_of("(float[N, 3, 2, 2] x) => (float[N, 12] y) { y = Flatten (x) }")


def seen(data: str | list[str]) -> list[int]:
    """The gray of each image that a model is given, in order."""
    plain = og.data.Preprocessing(size=(2, 2), scale=1.0)
    return og.predict(first_pixels(), data, preprocessing=plain, task="numbers").outputs["y"][:, 0].astype(int).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_a_folder_whatever_its_name(name: str, tmp_path: Path) -> None:
    """Alone, beside another folder, beside a file, and as a class."""
    picture(tmp_path / name / "1.png", 10)
    other, file = picture(tmp_path / "other" / "2.png", 20), picture(tmp_path / "3.png", 30)
    assert seen(str(tmp_path / name)) == [10]
    assert seen([str(other.parent), str(tmp_path / name)]) == [20, 10]
    assert seen([str(tmp_path / name), str(file), str(other.parent)]) == [10, 30, 20]
    picture(tmp_path / "classes" / name / "1.png", 10)
    picture(tmp_path / "classes" / "z.png" / "deep.gif" / "2.png", 20)
    for found in (read_data(str(tmp_path / "classes")), as_dataset(tmp_path / "classes")):
        assert isinstance(found, ImageFolder)
        assert found.classes == (name, "z.png")
        assert [file.name for file, _ in found.files] == ["1.png", "2.png"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_arrays_is_one_whatever_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name / "b.npy").mkdir(parents=True)
    (tmp_path / name / "b.npy").rmdir()
    np.save(tmp_path / name / "x.npy", np.arange(3))
    for found in (read_data(str(tmp_path / name)), as_dataset(str(tmp_path / name))):
        assert isinstance(found, og.data.Dataset)
        np.testing.assert_array_equal(found.take(slice(0, 3))["x"], [0, 1, 2])


def test_links_are_followed_once(tmp_path: Path) -> None:
    """Links to files, to folders, and to a folder around the link, which would never end."""
    picture(tmp_path / "real" / "1.png", 10)
    picture(tmp_path / "elsewhere" / "2.png", 20)
    (tmp_path / "real" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "real" / "single.png").symlink_to(tmp_path / "elsewhere" / "2.png")
    (tmp_path / "real" / "round").symlink_to(tmp_path / "real")
    (tmp_path / "real" / ".hidden").symlink_to(tmp_path / "elsewhere")
    assert [p.relative_to(tmp_path / "real").as_posix() for p in images_in(tmp_path / "real")] == [
        "1.png",
        "linked/2.png",
        "single.png",
    ]
    (tmp_path / "real" / "broken.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(og.errors.ArgumentError, match=r"broken\.png"):
        seen(str(tmp_path / "real"))


def test_files_are_read_as_often_as_they_are_given(tmp_path: Path) -> None:
    a, b = picture(tmp_path / "f" / "a.png", 10), picture(tmp_path / "f" / "b.PNG", 20)
    assert seen([str(b), str(a), str(b)]) == [20, 10, 20]
    assert seen([str(tmp_path / "f"), str(a)]) == [10, 20, 10]


@pytest.mark.parametrize("path", ["", "\0", "a\0.png"])
def test_text_that_names_no_file_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above all not read as the current folder."""
    picture(tmp_path / "a" / "1.png")
    monkeypatch.chdir(tmp_path)
    for read in (read_data, as_dataset, lambda p: read_data([p, "a"])):
        with pytest.raises(og.errors.ArgumentError, match="cannot be the name of a file"):
            read(path)


def test_mixed_and_unknown_data_are_refused(tmp_path: Path) -> None:
    image = picture(tmp_path / "f" / "1.png")
    np.save(tmp_path / "x.npy", np.zeros(2))
    (tmp_path / "photo").write_bytes(image.read_bytes())
    (tmp_path / "t.csv").write_text("1.png,a\n")
    (tmp_path / "empty.png").mkdir()
    cases = {
        ("f", "x.npy"): "images and arrays at once: .*1.png' and .*x.npy'",
        ("photo",): "not a data file of a known type. Give .npz or .npy files, images",
        ("f/1.png", "t.csv"): "not a data file of a known type.* one table",
        ("f/1.png", "empty.png"): r"empty\.png' holds neither \.npy files nor",
        ("empty.png",): r"empty\.png' holds neither \.npy files nor",
        ("f/2.png",): "There is no file .*2.png",
    }
    for names, message in cases.items():
        with pytest.raises(og.errors.ArgumentError, match=message):
            seen([str(tmp_path / name) for name in names])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    picture(tmp_path / "f" / "1.png")
    picture(tmp_path / "f" / "g" / "1.png")
    (tmp_path / "f" / "g").chmod(0)
    with pytest.raises(og.errors.ArgumentError, match="could not be read"):
        seen(str(tmp_path / "f"))


def test_images_beside_the_folders_of_classes_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "1.png")
    picture(tmp_path / "stray.png")
    with pytest.warns(UserWarning, match=r"1 images are in .* itself.*'stray\.png'.*left out"):
        assert len(ImageFolder(tmp_path)) == 1
    assert isinstance(read_data(str(tmp_path)), ImageFiles)
