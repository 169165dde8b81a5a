"""Private training on the command line."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.programs.test_privacy import plain
from tests.support.command_line import invoke
from tests.support.training_nets import exported
from tests.training.test_private import data


@pytest.fixture(name="course")
def course_(tmp_path: Path) -> Path:
    onnx.save(plain()[1], tmp_path / "model.onnx")
    onnx.save(exported(), tmp_path / "normalized.onnx")
    np.savez(tmp_path / "train.npz", **data())
    return tmp_path


def train(course: Path, *options: Any, model: str = "model.onnx", status: int = 0) -> Any:
    common = ["--data", course / "train.npz", "--loss", "cross_entropy", "--epochs", 2, "--batch-size", 20]
    return invoke("train", course / model, *common, "--out", course / "run", *options, status=status)


@pytest.mark.peers
@pytest.mark.parametrize(("option", "number"), [("--noise", 1.5), ("--epsilon", 6)])
def test_history_has_epsilon(course: Path, option: str, number: float) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    result = train(course, "--private", option, number, "--max-norm", 0.5, "--delta", 1e-3)
    with (course / "run" / "history.csv").open(encoding="utf-8") as file:
        spent = [float(row["epsilon"]) for row in csv.DictReader(file)]
    assert 0 < spent[0] < spent[1] and (option == "--noise" or 5.9 < spent[1] <= 6)
    assert "epsilon" in result.stdout and f"epsilon {spent[1]:.4f}" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--private"], "needs one of --noise and --epsilon"),
        (["--private", "--noise", 1, "--epsilon", 3], "needs one of --noise and --epsilon"),
        (["--noise", 1], "--noise is for --private"),
        (["--max-norm", -1, "--delta", "nan"], "--max-norm and --delta are for --private"),
        (["--private", "--noise", 1, "--delta", 2], "delta"),
    ],
    ids=["neither", "both", "not private", "options alone", "delta"],
)
def test_options_that_do_not_fit(course: Path, options: list[Any], message: str) -> None:
    assert message in train(course, *options, status=2).stderr


def test_batch_normalization_is_refused_with_the_option_that_helps(course: Path) -> None:
    options = ["--private", "--noise", 1]
    assert "--replace-batchnorm" in train(course, *options, model="normalized.onnx", status=2).stderr
