"""Progress in a pipe, summaries first, real data for `check`, names on narrow terminals, and completion by shells."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli import tables
from onnx_convgrad.cli.tables import Output, Table
from tests.support.command_line import invoke
from tests.support.one_input import graph_of

DIGITS = Path(__file__).parents[2] / "examples" / "models" / "digits_cnn.onnx"


# -- progress ----------------------------------------------------------------------------------------------------------


def test_long_commands_tell_their_progress_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "EVERY", 0.02)
    with Output().stages("reading"):
        announce("row 1 of 2\x1b")
        time.sleep(0.2)
    told = capsys.readouterr()
    assert not told.out
    assert re.fullmatch(r"(\.\.\. 0 s: row 1 of 2\\x1b\n)+", told.err)


def test_short_and_quiet_commands_tell_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Output().stages("reading"):
        announce("lowering")
    monkeypatch.setattr(tables, "EVERY", 0.01)
    with Output(quiet=True).stages("reading"):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


# -- explain -----------------------------------------------------------------------------------------------------------


def test_explain_begins_with_its_summary() -> None:
    lines = invoke("explain", DIGITS, "--target", "cuda", "--placement").stdout.splitlines()
    assert lines[0].startswith("Convolutions and pools: 5; target cuda: ")
    first = next(i for i, line in enumerate(lines) if line.startswith("/conv1/Conv: Conv "))
    assert lines.index("Placement (predicted from the provider's kernels)") < first
    assert not lines[first - 1]


def test_explain_shows_equal_convolutions_once(tmp_path: Path) -> None:
    text = """(float[1, 2, 8, 8] x) => (float[1, 2, 8, 8] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, "v")
        b = Conv <pads = [1, 1, 1, 1]> (a, "w")
        y = Conv <pads = [1, 1, 1, 1]> (b, "u") }"""
    kernel = np.ones((2, 2, 3, 3), np.float32)
    onnx.save(graph_of(text, u=kernel, v=kernel, w=kernel), tmp_path / "m.onnx")
    short, whole = (invoke("explain", tmp_path / "m.onnx", *options).stdout for options in ((), ("-v",)))
    spec = "Conv 1x2x8x8 * 2x2x3x3 -> 1x2x8x8"
    assert short.count(spec) == 2 and short.count(" and 1 more: ") == 1  # the first has no gradient of its input
    assert whole.count(spec) == 3 and " more: " not in whole


# -- check with data ---------------------------------------------------------------------------------------------------


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    path = tmp_path / "digits.npz"
    np.savez(path, image=np.random.default_rng(0).random((40, 1, 8, 8), np.float32), label=np.arange(40))
    return path


@pytest.mark.parametrize("options", [(), ("--provider", "cpu")])
def test_check_takes_real_inputs(digits: Path, options: tuple[str, ...]) -> None:
    words = ("check", DIGITS, "--data", digits, "--wrt", "fc.bias,inputs", *options)
    assert invoke(*words).stdout.startswith(f"Inputs from {digits}: image 32x1x8x8 (seed 0)")
    report = json.loads(invoke(*words, "--json").stdout)
    assert report["passed"] and report["data"] == [str(digits)] and report["inputs"] == {"image": [32, 1, 8, 8]}
    alone = digits.with_name("alone.npy")
    np.save(alone, np.zeros((2, 1, 8, 8), np.float32))
    assert "image 2x1x8x8" in invoke("check", DIGITS, "--data", f"image={alone}", "--wrt", "fc.bias", *options).stdout


def test_data_change_what_check_computes(digits: Path) -> None:
    def norm(*options: object) -> float:
        report = json.loads(invoke("check", DIGITS, "--wrt", "fc.weight", "--json", *options).stdout)
        (row,) = report["rows"]
        return float(row["norm"])

    scaled = digits.with_name("scaled.npz")
    with np.load(digits) as arrays:
        np.savez(scaled, image=100 * arrays["image"])
    assert norm("--data", scaled) > 10 * norm("--data", digits) != norm()


def test_data_that_do_not_fit_are_refused(digits: Path) -> None:
    np.savez(digits, image=np.zeros((4, 8, 8), np.float32))
    assert "image" in invoke("check", DIGITS, "--data", digits, status=2).stderr
    np.savez(digits, picture=np.zeros((4, 1, 8, 8), np.float32), other=np.zeros(4))
    assert "Name the arrays like the inputs" in invoke("check", DIGITS, "--data", digits, status=2).stderr


# -- names on terminals ------------------------------------------------------------------------------------------------


def test_long_names_stand_on_lines_of_their_own() -> None:
    long = "encoder.layers.11.attention.projection.weight"
    rows = [["head", "3", "head.*"], [long, "4x4", ""], ["  tail", "5", f"*.{long}"], [long, "6", long]]
    table = Table(["layer", "shape", "glob"], rows, whole=frozenset({0, 2}))
    assert table.spread(60) == [
        "layer                      shape  glob",
        "head                       3      head.*",
        long,
        "                           4x4",
        "  tail                     5",
        f"    *.{long}",
        long,
        "                           6",
        f"    {long}",
    ]
    assert table.spread(200) == table.plain().splitlines()


# -- completion --------------------------------------------------------------------------------------------------------


def test_shells_complete_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    # the shell that the tests were started from may be gone, so that typer would not find its name
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "complete -o default -F _onnx_convgrad_completion onnx-convgrad" in shown_by("--show-completion", "bash")
    monkeypatch.setenv("_ONNX_CONVGRAD_COMPLETE", "complete_bash")
    for typed, completed in (("a", ["augment", "attribute"]), ("check model.onnx --see", ["--seed"])):
        words = f"onnx-convgrad {typed}"
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert shown_by().split() == completed


def shown_by(*words: str) -> str:
    command = [sys.executable, "-m", "onnx_convgrad", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
