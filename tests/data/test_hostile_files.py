"""Damaged and malicious pictures, arrays, archives and options are refused; they cost neither memory nor time."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import time
import tracemalloc
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

import onnx_convgrad as og
from onnx_convgrad.cli.train_folder import read_config
from onnx_convgrad.data import ImageFolder, Preprocessing, read_arrays
from onnx_convgrad.data.files import ImageFiles
from onnx_convgrad.data.pictures import ImageReader, cropped
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.evaluation.predict import described
from onnx_convgrad.evaluation.predictor import open_model
from onnx_convgrad.pipeline import option_text
from onnx_convgrad.training.run_folder import read_labels


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
    with pytest.raises(og.errors.ModelError, match="is not a regular file"):
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
    "samples of nothing": (npy(f"({2**33}, 0)"), "holds no numbers, but more than 16,777,216 samples"),
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


COMPRESSIONS = {"bzip2": zipfile.ZIP_BZIP2, "LZMA": zipfile.ZIP_LZMA}


@pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)
def test_archives_that_numpy_does_not_write_are_refused(compression: int, tmp_path: Path) -> None:
    archive(tmp_path / "d.npz", ("x.npy", npy("(2,)", data=bytes(8))), compression=compression)
    with pytest.raises(ArgumentError, match=r"'x\.npy' is compressed by another method"):
        read_arrays(tmp_path / "d.npz")


@pytest.mark.parametrize("shared", [False, True], ids=["members", "members that share their bytes"])
def test_the_sum_of_what_members_expand_to_is_bounded(shared: bool, tmp_path: Path) -> None:
    """Each of them stays below the limit for one."""
    path = tmp_path / "d.npz"
    archive(path, *[(f"x{i}.npy", npy("(0,)")) for i in range(8)])
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as made:
        start, first = made.start_dir, made.infolist()[0].header_offset
    for _ in range(8):
        assert data[start : start + 4] == b"PK\x01\x02"
        struct.pack_into("<I", data, start + 24, 2**29)  # what it expands to
        if shared:
            struct.pack_into("<I", data, start + 42, first)
        start += 46 + sum(struct.unpack_from("<HHH", data, start + 28))
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ArgumentError, match=r"'x0\.npy', 'x1\.npy', 'x2\.npy' and 5 more have .* expand to 4,294,967,296"
    ):
        read_arrays(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_a_large_picture_is_not_taken_as_it_is(tmp_path: Path) -> None:
    """Twelve bytes for each pixel of one bit."""
    (tmp_path / "0.png").write_bytes(png(9000, 9000))
    with pytest.raises(ArgumentError, match="it has 9000 x 9000 pixels; give a smaller size"):
        ImageReader(Preprocessing())(tmp_path / "0.png")
    assert ImageReader(Preprocessing(size=(8, 8)))(tmp_path / "0.png").shape == (3, 8, 8)


def test_large_pictures_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_convgrad.data import pictures as module

    together, most = [0], [0]

    def slowly(image: Image.Image) -> Image.Image:
        together[0] += 1
        most[0] = max(most[0], together[0])
        time.sleep(0.02)
        together[0] -= 1
        return image

    monkeypatch.setattr(module, "_in_bytes", slowly)
    folder = pictures(tmp_path, png(5000, 4000))
    for i in range(1, 4):
        (tmp_path / "a" / f"{i}.png").write_bytes(png(5000, 4000))
    reader = folder.reader
    assert reader is not None
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(reader, sorted((tmp_path / "a").iterdir())))
    assert most == [1]


SIZES = [
    ("H,W", {"size": [20_000, 20_000]}),
    ("H,W", {"size": [2**16, 2**16]}),
    ("H,W", {"size": [2**16, 2**16], "fit": "pad"}),
    ("20000,20000", {}),
    ("20000,W", {"size": [8, 20_000]}),
]


@pytest.mark.parametrize(("sizes", "preprocessing"), SIZES)
def test_no_model_asks_for_pictures_of_any_size(sizes: str, preprocessing: dict[str, Any], tmp_path: Path) -> None:
    text = f"(float[N,3,{sizes}] x) => (float[N,3,1,1] y) {{ y = GlobalAveragePool (x) }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    model.metadata_props.add(key="onnx_convgrad.preprocessing", value=json.dumps(preprocessing))
    Image.new("RGB", (1, 1)).save(tmp_path / "1.png")
    (tmp_path / "d" / "a").mkdir(parents=True)
    Image.new("RGB", (1, 1)).save(tmp_path / "d" / "a" / "1.png")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for call in (lambda: og.predict(model, tmp_path / "1.png"), lambda: og.evaluate(model, tmp_path / "d")):
        with pytest.raises(og.errors.LimitError, match=r"takes images of .* pixels, and at most .* are allowed"):
            call()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_enlarged_pictures_are_read_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_convgrad.training import prediction

    monkeypatch.setattr(prediction, "_BYTES", 3 * 12 * 64 * 64)
    text = "(float[N,3,64,64] x) => (float[N,3,1,1] y) { y = GlobalAveragePool (x) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    model.metadata_props.add(key="onnx_convgrad.preprocessing", value="{}")
    for i in range(7):
        Image.new("RGB", (1, 1), (i, i, i)).save(tmp_path / f"{i}.png")
    read: list[int] = []
    take = ImageFiles.take
    monkeypatch.setattr(ImageFiles, "take", lambda self, rows: (read.append(len(range(7)[rows])), take(self, rows))[1])
    found = og.predict(model, tmp_path)
    assert max(read) == 3 and len(found) == 7


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../private.png", "not inside its folder"),
        ("{top}/private.png", "not inside its folder"),
        ("..\\\\private.png", "not inside its folder"),
        ("C:private.png", "not inside its folder"),
        ("sub/../../private.png", "not inside its folder"),
        ("link.png", "a link to .*private.png' outside its folder"),
        ("sub/private.png", "a link to .*private.png' outside its folder"),
        ("a" * 5000 + ".png", "cannot be read: File name too long"),
        ("loop.png", "cannot be read"),
        ("x\0.png", "not inside its folder"),
        ("pipe.png", "not a file in its folder"),
        ("none.png", "not a file in its folder"),
        (".", "not a file in its folder"),
    ],
)
def test_a_table_names_files_in_its_folder_only(name: str, reason: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "private.png")
    (data / "link.png").symlink_to("../private.png")
    (data / "sub").symlink_to("..")
    (data / "loop.png").symlink_to("loop.png")
    os.mkfifo(data / "pipe.png")
    for table, between in (("t.csv", ","), ("t.tsv", "\t")):
        (data / table).write_text(f"{name.format(top=tmp_path)}{between}abc\n")
        with pytest.raises(ArgumentError, match=rf"Row 1 of .*t\.[ct]sv' names .*, (which is |which )?({reason})"):
            og.data.TextImages(data / table)


def test_a_picture_that_is_replaced_by_a_link_is_not_read(tmp_path: Path) -> None:
    """Between the table and the pictures is time."""
    (tmp_path / "data").mkdir()
    for file in (tmp_path / "private.png", tmp_path / "data" / "a.png"):
        Image.new("RGB", (4, 4)).save(file)
    (tmp_path / "data" / "t.csv").write_text("a.png,abc\n")
    source = og.data.TextImages(tmp_path / "data" / "t.csv", size=(4, 4))
    manifest = described(open_model(onnx.parser.parse_model(IMAGES)), None, None).manifest
    bound = source.bound(manifest)
    assert bound.take(slice(0, 1))["image"].shape == (1, 3, 4, 4)
    (tmp_path / "data" / "a.png").unlink()
    (tmp_path / "data" / "a.png").symlink_to("../private.png")
    with pytest.raises(ArgumentError, match=r"'.*a\.png' is a link that leads out of '.*data'"):
        bound.take(slice(0, 1))


def test_tables_in_content_addressed_caches(tmp_path: Path) -> None:
    """The table and its pictures are links into one folder of blobs, as huggingface_hub lays files out."""
    for folder in ("blobs", "snapshots/abc"):
        (tmp_path / folder).mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "blobs" / "B.png")
    (tmp_path / "blobs" / "A").write_text("a.png,abc\n")
    (tmp_path / "snapshots" / "abc" / "t.csv").symlink_to("../../blobs/A")
    (tmp_path / "snapshots" / "abc" / "a.png").symlink_to("../../blobs/B.png")
    assert og.data.TextImages(tmp_path / "snapshots" / "abc" / "t.csv").texts == ["abc"]


@pytest.mark.parametrize("name", ["t.csv", "labels.txt", "o.toml", "f.json"])
def test_texts_have_a_limit(name: str, tmp_path: Path) -> None:
    """Such a file holds nothing but a hole, so it takes no place on the disk."""
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**36)
    read = {
        "t.csv": og.data.TextImages,
        "labels.txt": read_labels,
        "o.toml": read_config,
        "f.json": lambda path: option_text.lowering([str(path)]),
    }[name]
    with pytest.raises(ArgumentError, match=r"longer than .* bytes"):
        read(tmp_path / name)


IMAGES = (
    '<ir_version: 10, opset_import: ["": 21]> g (float[N,3,4,4] x) => (float[N,3,1,1] y) { y = GlobalAveragePool (x) }'
)
