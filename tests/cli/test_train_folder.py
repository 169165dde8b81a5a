"""The folder of a run: what a kill leaves, what a strange one may do, what divergence keeps, signals in a validation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import Result

import onnx_convgrad as og
from onnx_convgrad.training import checkpoint
from tests.support.command_line import invoke as invoke_command
from tests.support.one_input import graph_of


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a small model and its data."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 4)).astype("f")
    onnx.save(graph_of("(float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }", w=w), tmp_path / "model.onnx")
    np.savez(tmp_path / "d.npz", x=rng.standard_normal((40, 3)).astype("f"), target=rng.integers(0, 4, 40))
    monkeypatch.chdir(tmp_path)
    return tmp_path


OPTIONS = "--data d.npz --loss cross_entropy --batch-size 8 --threads 1 --epochs 2 --out run -q".split()


def train(*more: object, status: int = 0) -> Result:
    return invoke_command("train", "model.onnx", *OPTIONS, *more, status=status)


def resume(*more: object, status: int = 0) -> Result:
    return invoke_command("train", "--resume", "run", "-q", *more, status=status)


def drafts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith((".part", ".old")) or ".tmp" in path.name]


KILL = """
import os, pathlib, signal, sys
import onnx_convgrad as og

die, calls = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL), []
def at_call(function):
    def call(*args, **kwargs):
        calls.append(args)
        return die() if len(calls) == int(sys.argv[2]) else function(*args, **kwargs)
    return call

if sys.argv[1] == "rename":
    os.replace = at_call(os.replace)
else:  # safetensors renames a draft of its own
    import safetensors.numpy
    def half(arrays, path, header):
        pathlib.Path(path).with_name(".tmpABCDEF").write_bytes(bytes(1000))
        die()
    safetensors.numpy.save_file = half
from onnx_convgrad.cli.app import main
main(sys.argv[3:])
"""


def killed(where: str, number: int, *arguments: str) -> None:
    """Run `train` in a process that is killed in place of a rename, or while a checkpoint is written."""
    command = [sys.executable, "-c", KILL, where, str(number), "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


# -- kills -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_run_that_was_killed_at_its_start_can_be_started_again(work: Path, number: int) -> None:
    killed("rename", number, "model.onnx", *OPTIONS)  # the program and the options get their names
    assert not (work / "run" / "train.toml").exists()
    refused = resume(status=2)
    assert "was killed before its first step. Start it again, with the same command as before." in refused.stderr
    train("--lr", 0.5)
    assert tomllib.loads((work / "run" / "train.toml").read_text())["lr"] == 0.5
    assert drafts(work) == []


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_nothing(work: Path) -> None:
    killed("checkpoint", 1, "model.onnx", *OPTIONS, "--checkpoint-every", "3")
    assert len(drafts(work)) == 2
    resume("--checkpoint-every", 2)
    assert drafts(work) == [] and (work / "run" / "trained.onnx").exists()


def test_a_folder_that_only_looks_like_a_start_is_left_alone(work: Path) -> None:
    (work / "run").mkdir()
    for name in (".train.toml.part", "letter.txt"):
        (work / "run" / name).write_text("mine")
    assert "already exists and is not a run" in train(status=2).stderr
    assert (work / "run" / "letter.txt").read_text() == "mine"


def test_a_signal_ends_a_validation_at_the_next_batch(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, calls = og.Trainer.evaluate_batch, []

    def interrupted(self: og.Trainer, batch: Any, **options: Any) -> Any:
        calls.append(batch)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self, batch, **options)

    with monkeypatch.context() as patch:
        patch.setattr(og.Trainer, "evaluate_batch", interrupted)
        train("--validation", "d.npz", status=143)
    assert len(calls) == 2
    resume()
    train("--validation", "d.npz", "--out", "whole")
    last = [checkpoint.read(work / name / "checkpoints" / "step-00000010.safetensors") for name in ("run", "whole")]
    for name, array in last[0].tensors.items():
        np.testing.assert_array_equal(array, last[1].tensors[name])
    assert [row["val_loss"] for row in last[0].info["progress"]["history"]] == [
        row["val_loss"] for row in last[1].info["progress"]["history"]]  # fmt: skip


# -- borders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["log", "plot", "tensorboard"])
def test_a_strange_run_does_not_write_outside_of_its_folder(work: Path, name: str) -> None:
    train()
    file = work / ("precious" + {"log": ".csv", "plot": ".svg", "tensorboard": ""}[name])
    file.write_text("precious")
    config = work / "run" / "train.toml"
    config.write_text(config.read_text().replace("epochs = 2", f'epochs = 3\n{name} = "../{file.name}"'))
    refused = resume(status=2)
    assert f"'run/train.toml' writes {name} to '{file}', which is not in the folder of the run." in refused.stderr
    assert f"give --{name} {file} again" in refused.stderr and file.read_text() == "precious"
    if name == "log":
        resume("--log", file)
        assert file.read_text().startswith("epoch,")


def test_outputs_elsewhere_are_given_again_by_the_printed_command(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = og.Trainer.step

    def interrupted(self: og.Trainer, *batches: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return step(self, *batches, **options)

    with monkeypatch.context() as patch:
        patch.setattr(og.Trainer, "step", interrupted)
        stopped = train("--log", "my log.csv", status=130)
    command = stopped.stderr.strip().splitlines()[-1]
    assert command == "  python -m onnx_convgrad train --resume run --log 'my log.csv'"
    resume("--log", "my log.csv")
    assert (work / "my log.csv").exists()


@pytest.mark.parametrize("name", ["checkpoints", "history.csv", "trained.onnx", "program/step.onnx"])
def test_links_out_of_the_folder_are_refused(work: Path, name: str) -> None:
    train()
    path, target = work / "run" / name, work / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    before = target.stat().st_mtime_ns
    refused = resume("--epochs", 3, status=2)
    assert f"'run/{name}' is a link to '{target}', outside the folder of the run." in refused.stderr
    assert target.stat().st_mtime_ns == before
    path.unlink()
    target.rename(work / "run" / "moved")
    path.symlink_to(os.path.relpath(work / "run" / "moved", path.parent))
    resume("--epochs", 3)  # a link inside


def test_the_draft_of_the_options_is_not_followed(work: Path) -> None:
    train()
    (work / "precious").write_text("precious")
    (work / "run" / ".train.toml.part").hardlink_to(work / "precious")
    resume("--epochs", 3)
    assert (work / "precious").read_text() == "precious"


def test_other_threads_are_told(work: Path) -> None:
    train()
    assert "with --threads 2 instead of 1: sums are rounded in another order" in resume("--threads", 2).stderr
    assert "threads" not in resume().stderr
    assert work.exists()


# -- divergence --------------------------------------------------------------------------------------------------------


def test_nan_in_the_data_keeps_the_healthy_checkpoints_and_models(work: Path) -> None:
    train("--keep", 2, "--checkpoint-every", 2)
    exported = (work / "run" / "trained.onnx").read_bytes()
    data = dict(np.load("d.npz"))
    data["x"][30] = -np.inf
    np.savez("bad.npz", **data)
    for _ in range(2):
        failed = resume("--data", "bad.npz", "--epochs", 4, status=3)
        assert "'x' is not finite in sample 30" in failed.stderr and "The last good checkpoint is" in failed.stderr
        assert "python -m onnx_convgrad train --resume run" in failed.stderr
    assert (work / "run" / "trained.onnx").read_bytes() == exported
    saved = list((work / "run" / "checkpoints").iterdir())
    assert len(saved) == 2
    for path in saved:
        assert all(np.isfinite(array).all() for array in checkpoint.read(path).tensors.values())
    resume("--data", "d.npz", "--epochs", 4)
    assert (work / "run" / "trained.onnx").read_bytes() != exported
