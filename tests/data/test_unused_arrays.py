"""Arrays that nobody uses are told, and refused if they would change the loss; labels are never guessed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from tests.support.command_line import invoke
from tests.support.one_input import graph_of
from tests.training.test_trainer import linear

RNG = np.random.default_rng(0)


def data(**more: Any) -> dict[str, np.ndarray]:
    return {"x": RNG.standard_normal((8, 3)).astype("f"), "target": RNG.integers(0, 4, 8), **more}


CALLS = {
    "step": lambda t, d: t.step(d),
    "evaluate_batch": lambda t, d: t.evaluate_batch(d),
    "fit": lambda t, d: t.fit(d, progress="none"),
    "fit on batches": lambda t, d: t.fit([d], progress="none"),
    "validation": lambda t, d: t.fit(data(), validation=d, progress="none"),
    "evaluate": lambda t, d: t.evaluate(d),
}


@pytest.mark.parametrize("name", ["sample_weight", "sample_weights", "class_weights", "mask", "target_mask", "Weight"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_would_change_the_loss_is_refused(name: str, call: Any) -> None:
    with pytest.raises(
        og.errors.ArgumentError,
        match=rf"no input for the array '{name}', so it would have no effect.*a further argument",
    ):
        call(og.Trainer(linear()), data(**{name: np.ones(8, "f")}))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_other_unused_arrays_are_told_once(call: Any) -> None:
    trainer = og.Trainer(linear())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(trainer, data(id=np.arange(8)))
    assert {str(w.message) for w in caught} == {"The array 'id' is not used: the program takes 'x', 'target'."}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_array_of_any_name_is_no_target(call: Any) -> None:
    wrong = {"x": data()["x"], "id": np.arange(8) % 4}
    with pytest.raises(og.errors.ArgumentError, match=r"none is clearly 'target'.*names=\{'target': 'id'\}"):
        call(og.Trainer(linear()), wrong)


def test_predictions_take_data_with_more_arrays(tmp_path: Path) -> None:
    arrays = data(id=np.arange(8), sample_weight=np.ones(8))
    trainer = og.Trainer(linear())
    assert len(trainer.predict(arrays)["y"]) == 8
    trainer.export(tmp_path / "m.onnx")
    assert len(og.predict(tmp_path / "m.onnx", arrays)) == 8


def test_files_and_commands(tmp_path: Path) -> None:
    net = graph_of("(float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }", w=np.zeros((3, 4), "f"))
    onnx.save(net, tmp_path / "m.onnx")
    np.savez(tmp_path / "weighted.npz", **data(sample_weight=np.ones(8, "f")))
    np.savez(tmp_path / "ids.npz", x=data()["x"], id=np.arange(8) % 4)
    for file, message in (
        ("weighted.npz", "no input for the array 'sample_weight'"),
        ("ids.npz", "is clearly 'target'"),
    ):
        with pytest.raises(og.errors.ArgumentError, match=message):
            og.evaluate(tmp_path / "m.onnx", tmp_path / file)
        model, rest = tmp_path / "m.onnx", ["--loss", "cross_entropy", "--out", tmp_path / "run"]
        for command in (["evaluate", model, tmp_path / file], ["train", model, "--data", tmp_path / file, *rest]):
            result = invoke(*command, status=2)
            assert message in " ".join(result.output.split())
    result = invoke("train", tmp_path / "m.onnx", "--data", tmp_path / "ids.npz", "--map", "target=id", "--loss",
                    "cross_entropy", "--epochs", 1, "--out", tmp_path / "run")  # fmt: skip
    assert (tmp_path / "run" / "trained.onnx").exists(), result.output
