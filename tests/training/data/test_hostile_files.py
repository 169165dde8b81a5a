"""Damaged and malicious pictures, arrays, archives and options are refused; they cost neither memory nor time."""

from __future__ import annotations

import os
import pickle
import resource
import struct
import tracemalloc
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import onnx_convgrad as og
from onnx_convgrad.cli.train_config import read_config
from onnx_convgrad.data import ImageFolder, Preprocessing, read_arrays
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.data.pictures import ImageReader, cropped


def png(width: int, height: int) -> bytes:
    """A black picture of one bit per pixel in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (1 + (width + 7) // 8) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def pictures(folder: Path, content: bytes, name: str = "0.png") -> ImageFolder:
    (folder / "a").mkdir(exist_ok=True)
    (folder / "a" / name).write_bytes(content)
    made = ImageFolder(folder, size=(224, 224), workers=1, on_broken="error")
    made.reader = ImageReader(Preprocessing(size=(224, 224)))
    return made


def test_a_long_and_narrow_picture_costs_only_its_crop(tmp_path: Path) -> None:
    """Enlarged as a whole, it had 4 GB."""
    long = pictures(tmp_path, png(20_000, 1))
    tracemalloc.start()
    assert long.take(slice(0, 1))["image"].shape == (1, 3, 224, 224)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    long.take(slice(0, 1))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("shape", [(400, 3), (3, 400), (97, 61), (8, 8)])
def test_a_crop_of_the_enlarged_picture_equals_a_crop_that_is_enlarged(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    scale = max(60 / shape[0], 50 / shape[1])
    wide, high = max(50, round(shape[1] * scale)), max(60, round(shape[0] * scale))
    whole = image.resize((wide, high), Image.Resampling.BILINEAR)
    left, top = (wide - 50) // 2, (high - 60) // 2
    expected = np.asarray(whole.crop((left, top, left + 50, top + 60))).astype(int)
    assert np.abs(np.asarray(cropped(image, (60, 50), None)).astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (png(10_000, 9_000), r"it has 90,000,000 pixels, and PIL\.Image\.MAX_IMAGE_PIXELS allows|decompression bomb"),
        (png(2**31 - 1, 1)[:70], "decompression bomb|pixels"),
        (png(64, 64)[:-30], "could not be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "cannot identify image file"),
    ],
    ids=["bomb", "header", "truncated", "postscript"],
)
def test_unusable_pictures_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=rf"The image '.*0\.png' could not be read: .*({reason})|{reason}"):
        pictures(tmp_path, content).take(slice(0, 1))


@pytest.mark.parametrize("make", [lambda p: p.symlink_to("/dev/zero"), os.mkfifo], ids=["device", "pipe"])
def test_devices_and_pipes_are_no_data(make: Any, tmp_path: Path) -> None:
    for name in ("d.npy", "d.npz", "manifest.json", "train.toml"):
        make(tmp_path / name)
    for name in ("d.npy", "d.npz"):
        with pytest.raises(ArgumentError, match=rf"'.*{name}' is not a regular file"):
            read_arrays(tmp_path / name)
    with pytest.raises(og.ModelError, match="is not a regular file"):
        og.TrainingProgram.load(tmp_path)
    with pytest.raises(ArgumentError, match="is not a regular file"):
        read_config(tmp_path / "train.toml")
    folder = pictures(tmp_path, png(8, 8))
    (tmp_path / "a" / "0.png").unlink()
    make(tmp_path / "a" / "0.png")
    with pytest.raises(ArgumentError, match="is not a regular file"):
        folder.take(slice(0, 1))


def npy(shape: str, descr: str = "'<f4'", data: bytes = b"") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def archive(path: Path, *members: tuple[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as made:
        warnings.simplefilter("ignore")
        for name, content in members:
            made.writestr(name, content)


ODD_ARRAYS = {
    "beyond the file": (npy(f"({2**40},)"), r"takes 4,398,046,511,104 bytes, and it has 0"),
    "beyond 64 bits": (npy(f"({2**62}, {2**62})"), "takes"),
    "negative": (npy("(-1,)", data=bytes(8)), "takes|shape"),
    "object": (npy("(1,)", "'|O'", pickle.dumps([1])), "Object arrays cannot be loaded"),
    "records": (npy("(1,)", "[('a', '<f4'), ('b', '<i8')]", bytes(12)), "not numbers"),
    "nested header": (npy("(" * 3000), "could not be read"),
    "unknown version": (b"\x93NUMPY\x09\x00" + npy("(1,)")[8:], "unknown version"),
    "text": (b"no array at all", "could not be read"),
    "empty": (b"", "could not be read"),
}


@pytest.mark.parametrize(("content", "reason"), ODD_ARRAYS.values(), ids=ODD_ARRAYS)
def test_odd_arrays_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "d.npy").write_bytes(content)
    archive(tmp_path / "packed.npz", ("x.npy", content))
    archive(tmp_path / "stored.npz", ("x.npy", content), compression=zipfile.ZIP_STORED)
    for name in ("d.npy", "packed.npz", "stored.npz"):
        with pytest.raises(ArgumentError, match=rf"'.*{name}' could not be read as arrays: .*({reason})|{reason}"):
            read_arrays(tmp_path / name)


def test_archives_that_would_fill_the_memory_or_hide_an_array_are_refused(tmp_path: Path) -> None:
    big, small = npy(f"({2**29},)"), npy("(2,)", data=bytes(8))
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(big + bytes(2**20)) + packer.flush()
    info = zipfile.ZipInfo("x.npy")
    archive(tmp_path / "bomb.npz", ("x.npy", b""))
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_STORED) as made:
        made.writestr(info, packed)
        entry = made.infolist()[0]
        entry.compress_type, entry.file_size = zipfile.ZIP_DEFLATED, len(big) + 2**31
    with pytest.raises(ArgumentError, match=r"'x\.npy' has .* bytes and expands to 2,147,"):
        read_arrays(tmp_path / "bomb.npz")
    archive(tmp_path / "two.npz", ("x.npy", small), ("x.npy", small))
    with pytest.raises(ArgumentError, match="two of its arrays have the same name"):
        read_arrays(tmp_path / "two.npz")
