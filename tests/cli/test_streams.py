"""`--states`, `--part-length` and `--part-past` of `train`, `predict` and `evaluate`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.testing import assert_allclose

import onnx_convgrad as og
from tests.support.command_line import invoke
from tests.support.streams import CELL, SIZE

X = np.random.default_rng(0).standard_normal((3, 12, SIZE)).astype("f")
STATES = ("--states", "h=hn")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of one frame, and sequences with labels."""
    monkeypatch.chdir(tmp_path)
    onnx.save(CELL, tmp_path / "cell.onnx")
    np.savez(tmp_path / "data.npz", x=X, target=0.1 * np.cumsum(X[:, :, :1], 1))
    np.save(tmp_path / "x.npy", X)
    return tmp_path


def test_predictions_carry_the_states_along_sequences(files: Path) -> None:
    invoke("predict", "cell.onnx", "x.npy", *STATES, "--part-length", "1", "-o", "found.npz")
    wide = og.session(og.transforms.over_time(og.load(CELL, states={"h": "hn"})))
    (wanted,) = wide.run(["y"], {"x": X, "h": np.zeros((3, 5), "f")})
    with np.load(files / "found.npz") as found:
        assert list(found) == ["y"]
        assert_allclose(found["y"].reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-6)


def test_a_trained_file_knows_its_states(files: Path) -> None:
    options = ("--loss", "mse", "--part-length", "1", "--epochs", "2", "--out", "run")
    invoke("train", "cell.onnx", "--data", "data.npz", *STATES, *options)
    assert og.load(files / "run" / "trained.onnx").states == {"h": "hn"}
    assert "the input h takes the output hn" in invoke("inspect", "run/trained.onnx").output
    assert "36" in invoke("evaluate", "run", "data.npz", "--part-length", "1").output


def test_gradients_are_checked_on_data_without_states(files: Path) -> None:
    onnx.save(og.transforms.add_adapters(og.load(CELL, states={"h": "hn"}), rank=1), files / "known.onnx")
    np.savez(files / "frames.npz", x=X[:, 0])
    assert "gradients agree" in invoke("check", "known.onnx", "--data", "frames.npz").output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--states", "h"), "not of the form NAME=VALUE"),
        (("--states", "h=z"), "output in states: 'z'"),
        (("--part-past", "1"), "--part-past is for --part-length"),
        (("--part-length", "x=two"), "'two' is not a whole number"),
    ],
)
@pytest.mark.usefixtures("files")
def test_what_does_not_fit_is_refused(options: tuple[str, ...], message: str) -> None:
    result = invoke("predict", "cell.onnx", "x.npy", *options, status=2)
    assert message in result.output.replace("\n", " ")
