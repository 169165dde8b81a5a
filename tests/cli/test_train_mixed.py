"""Folders of runs with a file of another run: an error that names it, unless any run may have that file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.command_line import invoke as invoke_command
from tests.support.one_input import graph_of

RUNS: dict[str, tuple[object, ...]] = {
    "sgd": ("--optimizer", "sgd"),
    "seed": ("--seed", 3),
    "classes": ("--classes", 6),
    "ema": ("--ema", 0.9),
    "half": ("--precision", "float16"),
}
MOVED = ["train.toml", "program", "checkpoints", "program/step.onnx", "program/manifest.json", "program/weights.bin"]
SAME = {("seed", "checkpoints")}
"""Checkpoints with another seed fit the program, which takes that seed from them."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    text = "(float[N, 6] x) => (float[N, 4] y) { p = Gemm (x, v, c) r = Relu (p) y = Gemm (r, w, b) }"
    rng = np.random.default_rng(0)
    shapes = {"v": (6, 64), "c": (64,), "w": (64, 4), "b": (4,)}
    stored = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    onnx.save(graph_of(text, **stored), folder / "model.onnx")
    np.savez(folder / "data.npz", x=rng.random((32, 6)).astype(np.float32), target=np.arange(32) % 4)
    for name, options in {"plain": (), **RUNS}.items():
        invoke_command("train", folder / "model.onnx", "--data", folder / "data.npz", "--loss", "cross_entropy",
                       "--epochs", 1, "-q", "--out", folder / name, *options)  # fmt: skip
    return folder


@pytest.mark.parametrize("moved", MOVED)
@pytest.mark.parametrize("other", RUNS)
def test_files_of_another_run_are_refused(runs: Path, other: str, moved: str, tmp_path: Path) -> None:
    shutil.copytree(runs / "plain", tmp_path / "run")
    old, new = tmp_path / "run" / moved, runs / other / moved
    shutil.rmtree(old) if old.is_dir() else old.unlink()
    shutil.copytree(new, old) if new.is_dir() else shutil.copy(new, old)
    config = tmp_path / "run" / "train.toml"
    lines = [line for line in config.read_text().splitlines() if not line.startswith("out = ")]
    config.write_text("\n".join(lines))
    status = 0 if (other, moved) in SAME else 2
    said = invoke_command("train", "--resume", tmp_path / "run", "--epochs", 2, "-q", status=status)
    assert ("Error: " in said.stderr) == bool(status)
    assert "failed unexpectedly" not in said.stderr
