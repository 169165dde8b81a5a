"""Models over protobuf's limit of 2 GB work as smaller ones do, wherever they are and their results go.

The limit is lowered, so that the files are small.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.ir import serialize
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.standard_normal((32, 32)).astype(np.float32) / 6 for name in ("w1", "w2")}
X = RNG.standard_normal((4, 32)).astype(np.float32)
FEED = {"x": X, "y_grad": np.ones_like(X)}
BATCH = {"x": X, "target": np.zeros_like(X)}


def whole() -> onnx.ModelProto:
    text = "(float[N, 32] x) => (float[N, 32] y) { h = MatMul (x, w1) t = Tanh (h) y = MatMul (t, w2) }"
    return graph_of(text, opset=21, **WEIGHTS)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model over the limit, as a relative path, which is wrong from other working directories."""
    (tmp_path / "big").mkdir()
    (tmp_path / "elsewhere").mkdir()
    onnx.save(whole(), tmp_path / "big/model.onnx", save_as_external_data=True, location="model.onnx.data")
    monkeypatch.setattr(serialize, "PROTO_LIMIT", 5000)
    monkeypatch.chdir(tmp_path)
    return "big/model.onnx"


@pytest.fixture
def want() -> dict[str, np.ndarray]:
    return run(og.augment(whole()), FEED)


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


def results(opened: ort.InferenceSession) -> dict[str, np.ndarray]:
    return dict(zip([o.name for o in opened.get_outputs()], opened.run(None, FEED), strict=True))


def test_a_result_runs_and_is_saved_anywhere(
    path: str, want: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = og.augment(path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    same(results(og.session(made)), want)
    og.save(made, "saved.onnx")
    assert sorted(p.name for p in Path.cwd().iterdir()) == ["saved.onnx", "saved.onnx.data"]
    assert run(og.vjp("saved.onnx", wrt="x", of="y"), FEED | {"y_grad_1": FEED["y_grad"]})["x_grad"].shape == X.shape
    (tmp_path / "elsewhere" / "plain").mkdir()
    onnx.save(made, "plain/plain.onnx")  # ONNX's own function writes the weights, too
    for folder in (tmp_path / "big", tmp_path / "elsewhere"):
        monkeypatch.chdir(folder)
        for file in ("saved.onnx", "plain/plain.onnx"):
            same(results(ort.InferenceSession(tmp_path / "elsewhere" / file)), want)
            same(results(og.session(tmp_path / "elsewhere" / file)), want)


def test_a_result_is_a_model_again(path: str, want: dict[str, np.ndarray]) -> None:
    made = og.augment(path, wrt="w1")
    before = [tensor.SerializeToString() for tensor in made.graph.initializer]
    again = og.augment(made, wrt="w2", of="y")
    assert [t.name for t in again.graph.initializer if t.data_location == TensorProto.EXTERNAL] == ["w1", "w2"]
    np.testing.assert_array_equal(run(again, FEED | {"y_grad_1": FEED["y_grad"]})["w2_grad"], want["w2_grad"])
    og.save(made, "first.onnx")
    og.save(made, "second.onnx")  # unlike onnx.save, it leaves the proto as it was
    assert [tensor.SerializeToString() for tensor in made.graph.initializer] == before
    next(t for t in made.graph.initializer if t.name == "w1").raw_data = b"cut"
    with pytest.raises(og.errors.ModelError, match=r"The weight 'w1' takes 4096 bytes, not 3\."):
        og.session(made)


def test_an_ir_model_stays_on_disk(path: str, want: dict[str, np.ndarray]) -> None:
    made = og.augment(ir.load(path))
    assert isinstance(made.graph.initializers["w1"].const_value, ir.ExternalTensor)
    same(results(og.session(made)), want)
    og.save(made, "elsewhere/made.onnx")
    same(run("elsewhere/made.onnx", FEED), want)


@pytest.mark.parametrize("wrt", ["parameters", ["w2"]])
def test_training(path: str, wrt: str | list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {"loss": "mse", "optimizer": og.optim.SGD(0.1, momentum=0.9), "wrt": wrt}
    program = og.build_training(path, **settings)
    reference = og.Trainer(og.build_training(whole(), **settings))
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer = og.Trainer(program)
    losses = [float(reference.step(BATCH)["loss"]) for _ in range(2)]
    assert [float(trainer.step(BATCH)["loss"]) for _ in range(2)] == losses
    assert float(run(program.step, BATCH)["loss"]) == losses[0]
    program.save("program")
    loaded = og.Trainer("program")
    assert [float(loaded.step(BATCH)["loss"]) for _ in range(2)] == losses
    for folder, each in (("own", trainer), ("loaded", loaded)):
        Path(folder).mkdir()
        each.export(f"{folder}/trained.onnx")
        got = ort.InferenceSession(f"{folder}/trained.onnx").run(None, {"x": X})[0]
        np.testing.assert_array_equal(got, reference.evaluate_batch(BATCH)["y"])
        assert Path(f"{folder}/trained.onnx.data").exists()


def test_source_files_that_are_gone(path: str) -> None:
    program = og.build_training(path, loss="mse", optimizer=og.optim.SGD(0.1), wrt="w2")
    model = og.augment(ir.load(path))
    Path("big/model.onnx.data").rename("big/moved.data")
    gone = r"'w\d' was in the file '.*big/model.onnx.data', which has been moved or deleted.*Put the file back"
    for use in (lambda: og.Trainer(program).step(BATCH), lambda: program.save("program"), lambda: program.evaluate):
        with pytest.raises(og.errors.ModelError, match=gone):
            use()
    for use in (lambda: og.session(model), lambda: og.save(model, "saved.onnx")):
        with pytest.raises(
            og.errors.ModelError, match=r"'w\d' is in the file '.*big/model.onnx.data', which is not there"
        ):
            use()
    with pytest.raises(og.errors.ModelError, match=r"'w1' is in the file 'big/model.onnx.data', which is not there"):
        og.augment(path)
    assert not Path("program").exists() and not Path("saved.onnx").exists()


@pytest.mark.parametrize("location", ["{}/big/model.onnx.data", "../big/model.onnx.data", "big/model.onnx.data"])
def test_a_proto_of_a_stranger_reads_no_file(path: str, location: str, tmp_path: Path) -> None:
    stranger = onnx.load(path, load_external_data=False)
    for tensor in stranger.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = location.format(tmp_path)
    for use in (og.augment, og.session, lambda model: og.save(model, "copy.onnx")):
        with pytest.raises(
            og.errors.ModelError, match=r"the folder of that file is not known|not inside the model's folder"
        ):
            use(stranger)
    for tensor in stranger.graph.initializer:  # with its own numbers it needs no file, and none is read
        tensor.raw_data = np.full(1024, 0.5, np.float32).tobytes()
    og.save(stranger, "copy.onnx")
    arrays = [numpy_helper.to_array(tensor) for tensor in onnx.load("copy.onnx").graph.initializer]
    assert len(arrays) == 2 and all((array == 0.5).all() for array in arrays)


def test_models_below_the_limit_are_one_file(tmp_path: Path, want: dict[str, np.ndarray]) -> None:
    onnx.save(whole(), tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    made = og.augment(tmp_path / "model.onnx")
    assert not any(tensor.data_location for tensor in made.graph.initializer)
    same(results(ort.InferenceSession(made.SerializeToString())), want)
    (tmp_path / "copies").mkdir()
    og.save(tmp_path / "model.onnx", tmp_path / "copies" / "copy.onnx")
    assert [p.name for p in (tmp_path / "copies").iterdir()] == ["copy.onnx"]
