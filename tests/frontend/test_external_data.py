"""External weights are read from regular files inside the folder of the model only."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from tests.support.one_input import graph_of

WEIGHT = np.arange(16, dtype=np.float32).reshape(4, 4)


def _model(location: str = "w.bin", **entries: str) -> onnx.ModelProto:
    model = graph_of("(float[2,4] x) => (float[2,4] y) { y = MatMul (x, w) }")
    tensor = model.graph.initializer.add(name="w", data_type=1, dims=[4, 4], data_location=1)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return model


def _weight(model: onnx.ModelProto) -> np.ndarray:
    return onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "w"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a weight, beside a secret."""
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "secret").write_bytes(b"s" * 64)
    (inside / "w.bin").write_bytes(WEIGHT.tobytes())
    return inside


def test_a_proto_has_no_folder_unless_it_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(
        og.errors.ModelError, match=r"in the file 'w.bin', and the folder of that file is not known.*base_dir="
    ):
        og.augment(_model(), wrt="inputs")
    np.testing.assert_array_equal(_weight(og.augment(og.load(_model(), base_dir=folder), wrt="inputs")), WEIGHT)
    with pytest.raises(og.errors.ArgumentError, match="base_dir must be a folder"):
        og.augment(og.load(_model(), base_dir=folder / "w.bin"), wrt="inputs")
    program = og.build_training(og.load(_model(), base_dir=folder), loss="mse", optimizer=og.optim.SGD(lr=0.1))
    np.testing.assert_array_equal(_weight(program.step), WEIGHT)


def _unchanged(_: Path) -> None: ...


OUTSIDE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "the folder above": ("../secret", _unchanged, "not inside the model's folder"),
    "an absolute path": ("/etc/hostname", _unchanged, "not inside the model's folder"),
    "nothing": ("", _unchanged, "not inside the model's folder"),
    "a link to the folder above": (
        "link",
        lambda d: (d / "link").symlink_to(d.parent / "secret"),
        "a link to .*secret' outside the model's folder",
    ),
    "a folder that is a link": (
        "sub/secret",
        lambda d: (d / "sub").symlink_to(d.parent),
        "a link to .*secret' outside the model's folder",
    ),
    "a pipe": ("pipe", lambda d: os.mkfifo(d / "pipe"), "not a regular file"),
    "a link to a device": ("zero", lambda d: (d / "zero").symlink_to("/dev/zero"), "outside the model's folder"),
    "a folder": ("sub", lambda d: (d / "sub").mkdir(), "not a regular file"),
    "a loop of links": ("link", lambda d: (d / "link").symlink_to("link"), "cannot be read"),
    "a missing file": ("missing", _unchanged, "which is not there"),
}


@pytest.mark.parametrize("case", OUTSIDE)
@pytest.mark.parametrize("form", ["proto", "path"])
def test_files_outside_are_refused(folder: Path, case: str, form: str) -> None:
    location, prepare, message = OUTSIDE[case]
    prepare(folder)
    model, options = _model(location), {"base_dir": folder}
    if form == "path":
        (folder / "m.onnx").write_bytes(model.SerializeToString())
        model, options = folder / "m.onnx", {}
    with pytest.raises(og.errors.ModelError, match=message):
        og.augment(og.load(model, **options), wrt="inputs")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "4"}, "up to byte 68, but that has 64 bytes"),
        ({"length": "8"}, "takes 64 bytes, not 8 from byte 0"),
        ({"offset": "-64"}, "cannot be read"),
        ({"offset": "many"}, "cannot be read"),
    ],
)
def test_places_that_do_not_fit_the_file_are_refused(folder: Path, entries: dict[str, str], message: str) -> None:
    with pytest.raises(og.errors.ModelError, match=message):
        og.augment(og.load(_model(**entries), base_dir=folder), wrt="inputs")


def test_the_model_must_be_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    with pytest.raises(og.errors.ModelError, match="is not a regular file, and not a model"):
        og.augment(tmp_path / "m.onnx")


def test_content_addressed_caches(tmp_path: Path) -> None:
    """As huggingface_hub lays files out: the model and its weights are links into one folder of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "A").write_bytes(_model("model.onnx_data").SerializeToString())
    (blobs / "B").write_bytes(WEIGHT.tobytes())
    (snapshot / "model.onnx").symlink_to("../../blobs/A")
    (snapshot / "model.onnx_data").symlink_to("../../blobs/B")
    np.testing.assert_array_equal(_weight(og.augment(snapshot / "model.onnx", wrt="inputs")), WEIGHT)
    hard = tmp_path / "hard"
    hard.mkdir()
    (hard / "model.onnx_data").hardlink_to(blobs / "B")
    (hard / "model.onnx").write_bytes((blobs / "A").read_bytes())
    np.testing.assert_array_equal(_weight(og.augment(hard / "model.onnx", wrt="inputs")), WEIGHT)
    # a file of one's own that names a link has no blobs
    (snapshot / "own.onnx").write_bytes((blobs / "A").read_bytes())
    with pytest.raises(og.errors.ModelError, match="outside the model's folder"):
        og.augment(snapshot / "own.onnx", wrt="inputs")


@pytest.mark.parametrize("name", ["INT4", "UINT4", "FLOAT4E2M1", "FLOAT8E4M3FN", "BFLOAT16", "BOOL", "DOUBLE", "INT64"])
def test_a_weight_in_a_file_equals_one_in_the_model(name: str, tmp_path: Path) -> None:
    from onnx_convgrad.frontend.files import read

    dtype = ir.DataType[name]
    values = np.arange(14).reshape(7, 2).astype(np.float32) % 2
    (tmp_path / "w.bin").write_bytes(b"behind" + ir.Tensor(values.astype(dtype.numpy()), dtype=dtype).tobytes())
    model = graph_of("(float[1] x) => (float[1] y) { y = Identity (x) }")
    tensor = model.graph.initializer.add(name="w", data_type=dtype.value, dims=[7, 2], data_location=1)
    for key, value in {"location": "w.bin", "offset": "6"}.items():
        tensor.external_data.add(key=key, value=value)
    found = read(model, tmp_path).graph.initializers["w"].const_value
    assert found is not None and found.numpy().dtype == dtype.numpy()
    np.testing.assert_array_equal(found.numpy().astype(np.float32), values)
    with (tmp_path / "copy").open("wb") as file:
        found.tofile(file)  # type: ignore[attr-defined]
    assert (tmp_path / "copy").read_bytes() == found.tobytes() == (tmp_path / "w.bin").read_bytes()[6:]


def test_what_is_read_is_what_was_checked(folder: Path) -> None:
    """Another file may take the name between the check and the reading, and after it."""
    from onnx_convgrad.frontend.files import read

    for kind in ("plain", "hard links"):
        if kind == "hard links":
            (folder / "other").hardlink_to(folder / "w.bin")
        tensor = read(_model(), folder).graph.initializers["w"].const_value
        assert tensor is not None
        (folder / "w.bin").rename(folder / "aside")
        (folder / "w.bin").symlink_to("../secret")
        with pytest.raises(og.errors.ModelError, match=r"a link to .*secret' outside the model's folder"):
            tensor.numpy()
        (folder / "w.bin").unlink()
        (folder / "aside").rename(folder / "w.bin")
        np.testing.assert_array_equal(tensor.numpy(), WEIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("linked", [False, True])
def test_no_race_leads_out_of_the_folder(folder: Path, linked: bool) -> None:
    if linked:
        (folder / "other").hardlink_to(folder / "w.bin")
    (folder / "m.onnx").write_bytes(_model("swap").SerializeToString())
    end = threading.Event()

    def swap() -> None:
        while not end.is_set():
            for take in (
                lambda: os.link(folder / "w.bin", folder / "new"),
                lambda: Path(folder / "new").symlink_to("../secret"),
            ):
                take()
                Path(folder / "new").replace(folder / "swap")
                (folder / "new").unlink(missing_ok=True)  # renaming a link to the same file does nothing
                time.sleep(2e-4)

    (folder / "swap").symlink_to("../secret")
    thread = threading.Thread(target=swap)
    thread.start()
    try:
        read = 0
        for _ in range(1500):
            with contextlib.suppress(og.errors.ModelError):
                found = og.augment(folder / "m.onnx", wrt="inputs")
                read += 1
                assert b"ssss" not in found.SerializeToString()
        assert read > 10
    finally:
        end.set()
        thread.join()
