"""Data for training: matching of arrays, dtypes and shapes, order by seed and epoch, files, threads, images."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import parser
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, TensorDataset

import onnx_convgrad as og
from onnx_convgrad.data import Arrays, Batches, ImageFolder, Loader, Preprocessing, Stream, as_batches, read_arrays
from onnx_convgrad.data.datasets import Dataset
from onnx_convgrad.data.inputs import ProgramInputs
from onnx_convgrad.data.prefetch import prefetched
from onnx_convgrad.data.shards import shards_of
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.manifest import Manifest, Port


def manifest(*data: Port, targets: tuple[Port, ...] = (Port("target", "int64", ("N",)),)) -> Manifest:
    """The manifest of a program with these inputs."""
    return Manifest(data, targets, Port("learning_rate", "float32", ()), "loss", (), (), (), ())


IMAGES = manifest(Port("image", "float32", ("N", 1, 8, 8)))


def arrays(count: int = 10) -> dict[str, np.ndarray]:
    numbers = np.arange(count)
    return {"image": np.broadcast_to(numbers[:, None, None, None], (count, 1, 8, 8)).astype("f"), "target": numbers}


def order(loader: Batches, epoch: int, start: int = 0) -> list[int]:
    """The samples of an epoch in order; checks that image and target of each belong together."""
    seen: list[int] = []
    for batch in loader.epoch_iterator(epoch, start):
        np.testing.assert_array_equal(batch["image"][:, 0, 0, 0], batch["target"])
        seen.extend(batch["target"].tolist())
    return seen


# -- order -------------------------------------------------------------------------------------------------------------


def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch_alone() -> None:
    loader = Loader(Arrays(arrays()), IMAGES, batch_size=3, seed=5)
    first = order(loader, 0)
    np.random.seed(1)  # numpy's global state has no effect  # noqa: NPY002
    again = Loader(Arrays(arrays()), IMAGES, batch_size=3, seed=5)
    assert order(again, 0) == first and sorted(first) == list(range(10)) and first != list(range(10))
    assert order(loader, 1) != first and order(Loader(Arrays(arrays()), IMAGES, batch_size=3, seed=6), 0) != first
    assert order(loader, 1) == order(again, 1)
    assert order(loader, 2, start=2) == order(loader, 2)[6:] and order(loader, 2, start=4) == []


@pytest.mark.parametrize(("drop", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_the_last_batch_is_kept_or_dropped(drop: bool, sizes: list[int]) -> None:
    loader = Loader(Arrays(arrays()), IMAGES, batch_size=4, drop_last=drop, shuffle=False)
    batches = list(loader.epoch_iterator(0))
    assert [len(b["target"]) for b in batches] == sizes and len(loader) == len(sizes)
    assert order(loader, 0) == list(range(sum(sizes)))


def test_a_fixed_batch_size_is_kept() -> None:
    fixed = manifest(Port("image", "float32", (4, 1, 8, 8)), targets=(Port("target", "int64", (4,)),))
    loader = Loader(Arrays(arrays()), fixed)
    assert [len(b["target"]) for b in loader.epoch_iterator(0)] == [4, 4]
    with pytest.raises(ArgumentError, match=r"takes batches of 4, not of 3\. .*--input-shape image:N"):
        Loader(Arrays(arrays()), fixed, batch_size=3)
    with pytest.raises(ArgumentError, match="3 samples make no batch of 4"):
        Loader(Arrays(arrays(3)), fixed)


def test_parts_are_disjoint() -> None:
    train, held = Arrays(arrays(20)).split(0.25, seed=3)
    loaders = [Loader(part, IMAGES, batch_size=4) for part in (train, held)]
    kept, left = (order(loader, 0) for loader in loaders)
    assert len(left) == 5 and sorted(kept + left) == list(range(20)) and left != list(range(15, 20))
    assert loaders[1].describe() == loaders[1].describe() | {"kind": "arrays", "samples": 5, "of": 20, "batch_size": 4}
    with pytest.raises(ArgumentError, match=r"share of 0.01 of 20 samples leaves one part empty"):
        Arrays(arrays(20)).split(0.01)
    with pytest.raises(ArgumentError, match="seed must be at least 0, not -1"):
        Arrays(arrays(20)).split(0.25, seed=-1)


# -- matching of arrays ------------------------------------------------------------------------------------------------

TWO = manifest(Port("left", "float32", ("N", 2)), Port("right", "float32", ("N", 3)))


@pytest.mark.parametrize(
    ("found", "ports", "names", "expected"),
    [
        (["target", "image", "more"], IMAGES, {}, {"image": "image", "target": "target"}),
        (["y", "x"], IMAGES, {}, {"image": "x", "target": "y"}),
        (["Labels", "data"], IMAGES, {}, {"image": "data", "target": "Labels"}),
        (["x_train", "y_train"], IMAGES, {}, {"image": "x_train", "target": "y_train"}),
        (["image", "id", "train_labels"], IMAGES, {}, {"image": "image", "target": "train_labels"}),
        (["arr_0", "arr_1"], IMAGES, {}, {"image": "arr_0", "target": "arr_1"}),
        (["pixels", "y"], IMAGES, {}, {"image": "pixels", "target": "y"}),
        (["a", "b", "c"], IMAGES, {"image": "c", "target": "a"}, {"image": "c", "target": "a"}),
        (["a", "right", "y"], TWO, {}, {"left": "a", "right": "right", "target": "y"}),
    ],
)
def test_arrays_are_matched(found: list[str], ports: Manifest, names: dict[str, str], expected: dict[str, str]) -> None:
    assert ProgramInputs(ports, names).match(found) == expected


@pytest.mark.parametrize(
    ("arrays_", "names", "message"),
    [
        ("abc", {}, r"takes 'image', 'target'; of the arrays 'a', 'b', 'c' none is clearly"),
        (["image", "id"], {}, r"none is clearly 'target'.*names=\{'target': 'id'\}, --map target=id"),
        (["x", "length", "id"], {}, r"of the arrays 'x', 'length', 'id' none is clearly 'target'"),
        (["image"], {}, r"no array for 'target': the program takes .*, the data have 'image'\."),
        ("abc", {"image": "d"}, r"no array 'd' for the input 'image'\. There are 'a'"),
        ("abc", {"picture": "a"}, r"no input 'picture' for an array\. It takes 'image', 'target'"),
    ],
)
def test_arrays_without_a_match_are_refused(arrays_: list[str], names: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Loader(Arrays(dict.fromkeys(arrays_, np.zeros(4))), IMAGES, names=names)


# -- dtypes and shapes -------------------------------------------------------------------------------------------------


def test_arrays_are_cast_to_the_dtypes_of_the_inputs_or_not_copied() -> None:
    data = {"image": np.ones((4, 1, 8, 8), np.int16), "target": np.arange(4, dtype=np.float64)}
    batch = next(iter(Loader(Arrays(data), IMAGES, shuffle=False).epoch_iterator(0)))
    assert (batch["image"].dtype, batch["target"].dtype) == (np.float32, np.int64)
    assert batch["target"].tolist() == [0, 1, 2, 3]
    data = arrays()
    batch = next(iter(Loader(Arrays(data), IMAGES, shuffle=False, batch_size=4).epoch_iterator(0)))
    assert np.shares_memory(batch["image"], data["image"]) and np.shares_memory(batch["target"], data["target"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": np.zeros((10, 8, 8))}, r"'image' has shape \(10, 8, 8\) in a batch; .* \(N, 1, 8, 8\)\. Insert an axis"),
        ({"image": np.zeros((10, 8, 8, 1))}, r"\(10, 8, 8, 1\) .* \(N, 1, 8, 8\)\. Transpose it with \(0, 3, 1, 2\)\."),
        ({"image": np.zeros((10, 1, 9, 8))}, r"\(10, 1, 9, 8\) .* \(N, 1, 8, 8\)\.$"),
        ({"target": np.zeros((10, 1))}, r"'target' has shape \(10, 1\) .* takes \(N,\)\. Remove the axis 1"),
        ({"target": np.full(10, 0.5)}, r"'target' holds float64 numbers that int64, .* cannot hold, such as 0\.5"),
        ({"target": np.full(10, np.nan)}, "such as nan"),
        ({"target": np.array(["cat"] * 10)}, "'target' holds <U3; the input 'target' takes int64 numbers"),
        ({"target": np.zeros(9)}, "'image' has 10 samples, but 'target' has 9"),
        ({"target": np.float32(1)}, "'target' is a single number"),
    ],
)  # fmt: skip
def test_wrong_shapes_and_dtypes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Loader(Arrays(arrays() | change), IMAGES, batch_size=10)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_uncompressed_members_of_an_npz_are_mapped(save: Any, tmp_path: Path) -> None:
    data = {"image": np.asfortranarray(arrays()["image"]), "target": arrays()["target"], "none": np.zeros((10, 0))}
    save(tmp_path / "train.npz", **data)
    read = read_arrays(tmp_path / "train.npz")
    for name, array in data.items():
        np.testing.assert_array_equal(read.arrays[name], array)
        mapped = isinstance(read.arrays[name], np.memmap)
        assert mapped == (save is np.savez and name != "none")
    with pytest.warns(UserWarning, match=r"The array 'none' is not used: the program takes 'image', 'target'\."):
        assert sorted(order(as_batches(tmp_path / "train.npz", IMAGES), 0)) == list(range(10))


def test_npy_files_are_mapped(tmp_path: Path) -> None:
    for name, array in arrays().items():
        np.save(tmp_path / f"{name}.npy", array)
    for source in (tmp_path, {name: tmp_path / f"{name}.npy" for name in arrays()}):
        loader = as_batches(source, IMAGES, batch_size=4)
        assert isinstance(loader, Loader) and loader.prefetch == 2 and sorted(order(loader, 0)) == list(range(10))
    assert isinstance(read_arrays(tmp_path / "image.npy").arrays["image"], np.memmap)


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"There is no file .*none\.npz"):
        read_arrays(tmp_path / "none.npz")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    with pytest.raises(ArgumentError, match="could not be read as arrays: Object arrays cannot be loaded"):
        read_arrays(tmp_path / "objects.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "objects.npz").read_bytes()[:50])
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY")
    for name in ("cut.npz", "cut.npy"):
        with pytest.raises(ArgumentError, match=f"{name}' could not be read as arrays"):
            read_arrays(tmp_path / name)
    with pytest.raises(ArgumentError, match=r"objects\.npz' holds several arrays, not one"):
        Arrays({"x": tmp_path / "objects.npz"})
    (tmp_path / "table.csv").touch()
    with pytest.raises(ArgumentError, match=r"table\.csv' is not a data file of a known type"):
        read_arrays(tmp_path / "table.csv")


def test_numbers_of_either_byte_order_and_empty_axes_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", image=np.ones((4, 1, 8, 8), ">f8"), target=np.arange(4, dtype=">i2"))
    (batch,) = as_batches(tmp_path / "d.npz", IMAGES, shuffle=False).epoch_iterator(0)
    assert batch["target"].tolist() == [0, 1, 2, 3] and batch["image"].sum() == 256
    np.save(tmp_path / "e.npy", np.zeros((3, 0), ">f4"))
    assert read_arrays(tmp_path / "e.npy").arrays["e"].shape == (3, 0)


# -- iterables ---------------------------------------------------------------------------------------------------------


def test_a_torch_loader_gives_its_tensors_without_copies() -> None:
    data = arrays()
    tensors = TensorDataset(torch.from_numpy(data["image"]), torch.from_numpy(data["target"]))
    generator = torch.Generator()
    loader = Stream(DataLoader(tensors, batch_size=4, shuffle=True, generator=generator), IMAGES, seed=1)
    assert len(loader) == 3 and loader.describe() == {
        "kind": "iterable", "type": "DataLoader", "batches": 3, "batch_size": 4, "seed": 1}  # fmt: skip
    first = order(loader, 0)
    assert sorted(first) == list(range(10)) and order(loader, 0) == first != order(loader, 1)
    assert order(loader, 0, start=1) == first[4:]
    batch = [torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)]
    fitted = next(iter(Stream([batch], IMAGES).epoch_iterator(0)))
    assert fitted["image"].ctypes.data == batch[0].data_ptr()


def test_batches_may_be_mappings_nested_tuples_or_made_by_a_function() -> None:
    x, y = np.zeros((2, 1, 8, 8), "f"), np.array([0, 1])
    left, right = np.zeros((2, 2)), np.zeros((2, 3))
    for batch, ports in (({"y": y, "x": x}, IMAGES), ((x, y), IMAGES), (((left, right), torch.tensor(y)), TWO)):
        (fitted,) = Stream([batch], ports).epoch_iterator(0)
        assert list(fitted)[-1] == "target" and fitted["target"].tolist() == [0, 1]
    made = as_batches(lambda epoch: [(x, y + epoch)] * 2, IMAGES)
    assert [b["target"].tolist() for b in made.epoch_iterator(3)] == [[3, 4], [3, 4]]
    with pytest.raises(ArgumentError, match=r"A batch has 3 arrays; the program takes 2: 'image', 'target'"):
        next(iter(as_batches([(x, x, y)], IMAGES).epoch_iterator(0)))
    with pytest.raises(ArgumentError, match=r"A batch has 2 samples for the input 'image' and 1 for 'target'"):
        next(iter(as_batches([(x, y[:1])], IMAGES).epoch_iterator(0)))
    with pytest.raises(ArgumentError, match=r"The array number 2 has shape \(1,\) in a batch; .* takes \(N, 3\)"):
        next(iter(as_batches([((left, np.zeros(1)), y)], TWO).epoch_iterator(0)))
    with pytest.raises(ArgumentError, match=r"3\.5 is not a source of data"):
        as_batches(3.5, IMAGES)


def test_an_exhausted_generator_is_an_error() -> None:
    stream = Stream(((np.zeros((1, 1, 8, 8)), np.zeros(1)) for _ in range(2)), IMAGES)
    assert len(list(stream.epoch_iterator(0))) == 2
    with pytest.raises(ArgumentError, match="a generator, which gives its batches only once"):
        next(iter(stream.epoch_iterator(1)))
    with pytest.raises(TypeError):
        len(stream)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_goes_on_where_the_epoch_before_left_it(prefetch: int) -> None:
    batches = ((np.zeros((2, 1, 8, 8)), np.full(2, n)) for n in range(10))
    shards = shards_of(Stream(batches, IMAGES, prefetch=prefetch), rank=1, size=2)
    epochs = [[int(b["target"][0]) for b in itertools.islice(shards.epoch_iterator(epoch), 3)] for epoch in range(3)]
    assert epochs == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_dropped_stream_ends_its_thread() -> None:
    batches = ((np.zeros((2, 1, 8, 8)), np.zeros(2)) for _ in itertools.count())
    stream = Stream(batches, IMAGES, prefetch=2)
    next(stream.epoch_iterator(0))
    assert len(workers()) == 1
    del stream
    assert not workers()


# -- threads -----------------------------------------------------------------------------------------------------------


def workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "onnx_convgrad-prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_thread_works_ahead_by_the_given_number(depth: int) -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for i in range(20):
            made.append(i)
            yield i

    items = prefetched(source(), depth)
    assert next(items) == 0
    deadline = time.monotonic() + 5
    while depth and len(made) < depth + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == (depth + 2 if depth else 1)  # one taken, `depth` waiting, one that finds no room
    assert [0, *items] == list(range(20)) and not workers()


def test_an_exception_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    items = prefetched(source(), 2)
    assert next(items) == 1
    with pytest.raises(KeyError, match="broken"):
        next(items)
    assert not workers()


def test_a_dropped_iterator_ends_its_thread_and_closes_the_source() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.set()

    items = prefetched(source(), 1)
    assert next(items) == 0 and len(workers()) == 1
    del items
    gc.collect()
    assert closed.wait(5) and not workers()


def test_a_garbage_collection_in_the_thread_closes_the_iterator() -> None:
    held: list[Any] = []
    taken, closed = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield 0
        taken.wait(5)
        held.pop().close()
        closed.set()
        yield 1

    held.append(items := prefetched(source(), 1))
    assert next(items) == 0
    taken.set()
    assert closed.wait(5) and not list(items)


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of images, 40 wide and 20 high: gray, with a colored middle half."""
    for name, count in {"dog": 2, "cat": 3}.items():
        (tmp_path / name).mkdir()
        for i in range(count):
            pixels = np.full((20, 40, 3), 128, np.uint8)
            pixels[:, 10:30] = (255, 51 * i, 0)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    (tmp_path / "cat" / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_images_are_cropped_normalized_and_numbered_by_class(photos: Path) -> None:
    ports = manifest(Port("input", "float32", ("N", 3, 10, 10)))
    folder = ImageFolder(photos, mean=(0.5, 0.5, 0.5), std=0.5)
    loader = Loader(folder, ports, batch_size=5, shuffle=False)
    (batch,) = loader.epoch_iterator(0)
    assert folder.classes == ("cat", "dog") and batch["target"].tolist() == [0, 0, 0, 1, 1]
    assert batch["input"].shape == (5, 3, 10, 10) and loader.describe()["classes"] == ["cat", "dog"]
    for picture, i in zip(batch["input"], (0, 1, 2, 0, 1), strict=True):
        color = (np.array([255, 51 * i, 0]) / 255 - 0.5) / 0.5
        np.testing.assert_allclose(picture[:, 2:-2, 2:-2], np.broadcast_to(color[:, None, None], (3, 6, 6)), atol=1e-6)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA", "P"])
@pytest.mark.parametrize("channels", [1, 3])
def test_numbers_are_those_of_pillow_s_own_steps(tmp_path: Path, channels: int, mode: str, orientation: int) -> None:
    """Bit for bit; images are turned as cameras say, and have the mode of the input."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 36, 3), np.uint8)
    tags = Image.Exif()
    tags[0x0112] = orientation
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / ("1.png" if mode in ("RGBA", "P") else "1.jpg")
    Image.fromarray(pixels).convert(mode).save(file, exif=tags)
    ports = manifest(Port("input", "float32", ("N", channels, 10, 12)))
    mean, std = (0.1, 0.2, 0.3)[:channels], (0.4, 0.5, 0.6)[:channels]
    folder = ImageFolder(tmp_path, resize=16, mean=mean, std=std, size=(10, 12), transform=lambda i: i.convert("RGB"))
    (batch,) = Loader(folder, ports, shuffle=False, augment=True).epoch_iterator(0)
    turned = ImageOps.exif_transpose(Image.open(file))
    wide, high = (24, 16) if turned.width > turned.height else (16, 24)
    image = turned.convert("L" if channels == 1 else "RGB").resize((wide, high), Image.Resampling.BILINEAR)
    image = image.crop(((wide - 12) // 2, (high - 10) // 2, (wide + 12) // 2, (high + 10) // 2))
    wanted = np.asarray(image, np.float32).reshape(10, 12, channels) * np.float32(1 / 255)
    wanted = (wanted - np.float32(mean)) / np.float32(std)
    np.testing.assert_array_equal(batch["input"][0], np.moveaxis(wanted, -1, 0))


def test_16_bit_and_hidden_images(tmp_path: Path) -> None:
    """Images of 16 bits are scaled, not clipped; an unknown scale is an error; hidden files are ignored."""
    folder = tmp_path / "a"
    (folder / ".hidden").mkdir(parents=True)
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / ".hidden" / "1.png")
    Image.fromarray((np.arange(16, dtype=np.uint16) * 4369).reshape(4, 4)).save(folder / "1.png")
    ports = manifest(Port("input", "float32", ("N", 1, 4, 4)))
    (batch,) = Loader(ImageFolder(tmp_path), ports, shuffle=False).epoch_iterator(0)
    np.testing.assert_allclose(batch["input"].reshape(-1), np.arange(16) / 15, atol=1e-6)
    Image.fromarray(np.ones((4, 4), np.float32)).save(folder / "2.tiff")
    with pytest.raises(og.errors.ArgumentError, match=r"2\.tiff' could not be read: its pixels have the mode 'F'"):
        next(iter(Loader(ImageFolder(tmp_path, on_broken="error"), ports, shuffle=False).epoch_iterator(0)))


def test_images_take_the_layout_of_the_input(photos: Path) -> None:
    def read(shape: tuple[Any, ...], dtype: str = "float32", **options: Any) -> np.ndarray:
        loader = Loader(ImageFolder(photos, **options), manifest(Port("input", dtype, shape)), shuffle=False)
        return next(iter(loader.epoch_iterator(0)))["input"]

    first, last = read(("N", 3, 10, 16)), read(("N", 10, 16, 3))
    np.testing.assert_array_equal(np.moveaxis(first, 1, -1), last)
    whole = read((None, "H", "W", 3), "uint8", size=(10, 16))
    assert whole.dtype == np.uint8
    np.testing.assert_allclose(last, whole / 255, atol=1e-6)
    assert read((None, 1, "H", "W"), size=8).shape == (5, 1, 8, 8)
    far, near = read((None, 3, 10, 20)), read((None, 3, 10, 20), resize=40)
    assert np.ptp(far[0, 0]) > 0 and np.ptp(near[0, 0]) == 0  # the whole image, and its colored middle
    np.testing.assert_array_equal(read((None, 3, 20, 40))[1], read((None, 3, 20, 40), resize=20)[1])


def test_pixels_in_arrays_are_scaled_like_image_files(photos: Path) -> None:
    """In either layout; with the preprocessing of the file, or in its absence to [0, 1], which a warning says."""

    def first(data: Dataset, ports: Manifest) -> dict[str, np.ndarray]:
        return next(iter(Loader(data, ports, shuffle=False).epoch_iterator(0)))

    known = Preprocessing(mean=(0.4, 0.5, 0.6), std=(0.2,), scale=1 / 128)
    for shape in (("N", 3, 10, 16), ("N", 10, 16, 3)):
        plain = manifest(Port("input", "float32", shape))
        raw = next(
            iter(Loader(ImageFolder(photos), manifest(Port("input", "uint8", shape)), shuffle=False).epoch_iterator(0))
        )
        pixels = {"input": raw["input"], "target": raw["target"]}
        for ports in (plain.described(None, known), plain):
            wanted = first(ImageFolder(photos), ports)
            with warnings.catch_warnings() if ports.preprocessing else pytest.warns(UserWarning, match="scaled to"):
                found = first(Arrays(pixels), ports)
            np.testing.assert_array_equal(found["input"], wanted["input"])
    other = {**pixels, "input": np.moveaxis(pixels["input"], -1, 1)}
    with pytest.warns(UserWarning, match="scaled to"):
        again = first(Arrays(other), plain)
    np.testing.assert_array_equal(again["input"], wanted["input"])


def test_preprocessing_and_numbering_come_from_the_model_unless_options_say_otherwise(photos: Path) -> None:
    known = Preprocessing(size=(12, 14), mean=(0.5,), resize=30)
    ports = manifest(Port("input", "float32", ("N", 3, "H", "W"))).described(["horse", "dog", "cat"], known)
    folder = ImageFolder(photos).bound(ports)
    assert folder.preprocessing == known and folder.take(slice(0, 1))["image"].shape == (1, 3, 12, 14)
    assert folder.classes == ("horse", "dog", "cat") and folder.take(slice(0, 5))["label"].tolist() == [2, 2, 2, 1, 1]
    assert ImageFolder(photos, size=12, std=0.5).bound(ports).preprocessing == Preprocessing(
        size=(12, 12), mean=(0.5,), std=(0.5,)
    )
    mine = Preprocessing(size=(8, 8), scale=1.0)
    assert ImageFolder(photos, preprocessing=mine).bound(ports).preprocessing == mine
    with pytest.raises(ArgumentError, match="cannot be used: 'std"):
        ImageFolder(photos, preprocessing=Preprocessing(std=(0.0,)))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (("N", 3, "H", "W"), {}, "takes images of any height"),
        (("N", 3, 10, 10), {"size": 12}, "takes images of height 10, not 12"),
        (("N", 3, 10, 10), {"mean": (0.1, 0.2)}, "mean has 2 numbers for 3 channels"),
        (("N", 100), {}, "No input of the program takes a batch of images"),
        (("N", 7, 10, 10), {}, "no axis of 1 or 3 channels"),
        (("N", 3, 10, 10), {"classes": ["cat"]}, "has the class 'dog', which is not among"),
        (("N", 3, 10, 10), {"on_broken": "error"}, r"The image .*0\.png' could not be read"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    photos: Path, shape: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    if options.get("on_broken"):
        (photos / "cat" / "0.png").write_bytes(b"not an image")
    with pytest.raises(ArgumentError, match=message):
        Loader(ImageFolder(photos, **options), manifest(Port("input", "float32", shape)))


def test_batches_have_the_inputs_of_a_program(digits_cnn: Path) -> None:
    program = og.build_training(digits_cnn, loss="cross_entropy", optimizer=og.optim.SGD(0.1))
    batch = next(iter(as_batches(arrays(), program.manifest, batch_size=4).epoch_iterator(0)))
    assert {p.name for p in (*program.manifest.data, *program.manifest.targets)} == set(batch)


@pytest.mark.parametrize("shape", ["1, 3", "1, -1"])
def test_a_fixed_batch_is_freed_in_the_exported_model_too(shape: str, tmp_path: Path) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 21]> g (float[1,3,1] x) => (float[1,2] y)
    <float[1,3] r, int64[2] flat = {{{shape}}}, float[3,2] w = {{1, 2, 3, 4, 5, 6}}> {{
        r = Reshape (x, flat)  y = MatMul (r, w) }}"""
    data = {"x": np.zeros((8, 3, 1), np.float32), "target": np.zeros(8, np.int64)}
    model = parser.parse_model(text)
    program = og.build_training(model, loss="cross_entropy", optimizer="sgd")
    remedy = r"give og\.load\(model, input_shapes=\{'x': \['N', 3, 1\]\}\) as the model, or --input-shape x:N,3,1\."
    with pytest.raises(ArgumentError, match=rf"takes batches of 1, not of 4\. Free the size: {remedy}"):
        og.Trainer(program).fit(data, epochs=1, batch_size=4)
    freed = og.load(model, input_shapes={"x": ["N", 3, 1]})
    trainer = og.Trainer(og.build_training(freed, loss="cross_entropy", optimizer="sgd"))
    trainer.fit(data, epochs=1, batch_size=4, progress="none")
    trainer.export(tmp_path / "trained.onnx")
    (y,) = og.session(tmp_path / "trained.onnx").run(None, {"x": data["x"]})
    assert y.shape == (8, 2)


def test_a_batch_that_a_node_fixes_needs_another_export() -> None:
    text = """<ir_version: 8, opset_import: ["" : 21]> g (float[N,3] x) => (float[1,2] y)
    <int64[2] one = {1, -1}, float[3,2] w = {1, 2, 3, 4, 5, 6}> { r = Reshape (x, one)  y = MatMul (r, w) }"""
    data = {"x": np.zeros((8, 3), np.float32), "target": np.zeros(8, np.int64)}
    program = og.build_training(parser.parse_model(text), loss="cross_entropy", optimizer="sgd")
    with pytest.raises(ArgumentError, match=r"A node inside the model fixes the size.*dynamic_shapes of torch\.onnx"):
        og.Trainer(program).fit(data, epochs=1, batch_size=4)
