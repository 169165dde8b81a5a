"""Checkpoints: a resumed run equals an uninterrupted one bit for bit, also after damaged files and killed processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import onnx_convgrad as og
from onnx_convgrad import callbacks, optim, schedules
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training import checkpoint
from onnx_convgrad.training.protocols import Run
from tests.support.training_nets import build, exported, same
from tests.training.test_trainer import data, linear

EPOCHS, BATCH = 3, 4


def program(**options: Any) -> og.TrainingProgram:
    """A program with running statistics, Dropout, optimizer state and a schedule."""
    defaults = {"optimizer": optim.AdamW(lr=schedules.Cosine(0.01, steps=20)), "seed": 3}
    return build(exported(training=True), **{**defaults, **options})


def fit(trainer: og.Trainer, *extra: callbacks.Callback, epochs: int = EPOCHS) -> og.Trainer:
    trainer.fit(data(3), epochs=epochs, batch_size=BATCH, metrics="accuracy", callbacks=extra, progress="none")
    return trainer


def values(trainer: og.Trainer) -> dict[str, np.ndarray]:
    return {**trainer.parameters(), **trainer.state()}


def rows(trainer: og.Trainer) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "second" not in k} for row in trainer.progress.history]


class StopAt(callbacks.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Any, results: Any) -> None:
        assert "loss" in results
        if run.trainer.progress.steps == self.step:
            run.stop()


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 5, 10])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, step: int) -> None:
    """Stopped in the first epoch, at the end of the first, in the last."""
    whole = fit(og.Trainer(program(), seed=7), callbacks.EarlyStopping("loss", patience=2))
    first = fit(og.Trainer(program(), seed=7), callbacks.EarlyStopping("loss", patience=2), StopAt(step))
    path = first.save(tmp_path / "here")
    assert path == tmp_path / "here" and first.progress.steps == step
    program().save(tmp_path / "program")
    second = og.Trainer(tmp_path / "program")
    assert second.restore(path) == path
    same(values(second), values(first))
    stopping = callbacks.EarlyStopping("loss", patience=2)
    fit(second, stopping)
    same(values(second), values(whole))
    assert rows(second) == rows(whole)
    assert stopping.state() == whole.progress.callbacks["EarlyStopping"]
    assert second.learning_rate == whole.learning_rate


def test_a_run_that_cannot_begin_leaves_the_restored_state_to_the_next(tmp_path: Path) -> None:
    first = fit(og.Trainer(program()), callbacks.EarlyStopping("loss", patience=2), epochs=1)
    second = og.Trainer(program())
    second.restore(first.save(tmp_path / "here"))
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ArgumentError, match="is a file; checkpoints need a folder"):
        fit(second, callbacks.EarlyStopping("loss", patience=2), callbacks.Checkpoints(tmp_path / "file"))
    stopping = callbacks.EarlyStopping("loss", patience=2)
    fit(second, stopping, epochs=1)  # without a step: the state is that of the checkpoint
    assert stopping.state() == first.progress.callbacks["EarlyStopping"]
    assert not second.restored


def test_a_save_at_the_beginning_and_at_the_end_of_a_run_is_like_one_outside(tmp_path: Path) -> None:
    class Save(callbacks.Callback):
        def on_begin(self, run: Run) -> None:
            run.trainer.save(tmp_path / "begin")

        def on_end(self, run: Run) -> None:
            run.trainer.save(tmp_path / "end")

    trainer = og.Trainer(program())
    before = trainer.progress.to_json()
    fit(trainer, Save(), epochs=1)
    described = {"data": trainer.progress.data}
    assert checkpoint.read(tmp_path / "begin").info["progress"] == {**before, **described}
    assert checkpoint.read(tmp_path / "end").info["progress"] == trainer.progress.to_json()


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_checkpoints_contain_the_state_of_later_callbacks(tmp_path: Path, epoch: int) -> None:
    """A run resumed from any of them stops early at the same epoch as an uninterrupted one."""
    idle = {"optimizer": optim.SGD(lr=0.0)}
    whole = og.Trainer(program(**idle), seed=7)
    fit(whole, callbacks.Checkpoints(tmp_path, keep=9), callbacks.EarlyStopping("accuracy", patience=3), epochs=9)
    again = og.Trainer(program(**idle), seed=7)
    again.restore(sorted(tmp_path.glob("*.safetensors"))[epoch - 1])
    assert again.progress.epoch == epoch
    stopping = callbacks.EarlyStopping("accuracy", patience=3)
    fit(again, stopping, epochs=9)
    assert rows(again) == rows(whole) and len(rows(again)) < 9
    assert stopping.state() == whole.progress.callbacks["EarlyStopping"]


def test_early_stopping_restarts_for_another_column(tmp_path: Path) -> None:
    trainer = fit(og.Trainer(program()), callbacks.EarlyStopping("loss", patience=9))
    again = og.Trainer(program())
    again.restore(trainer.save(tmp_path))
    stopping = callbacks.EarlyStopping("accuracy", patience=9)
    fit(again, stopping, epochs=EPOCHS + 1)
    assert stopping.best.value == again.progress.history[-1]["accuracy"]


# -- unusable files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    trainer = og.Trainer(linear())
    for _ in range(2):
        trainer.step({"x": np.ones((2, 3)), "target": [0, 1]})
        trainer.save(tmp_path)
    return tmp_path


def write_later_version(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", checkpoint.VERSION + 1)
        checkpoint.write(path, checkpoint.Checkpoint({}, {}))


def write_other_shape(path: Path) -> None:
    content = checkpoint.read(path)
    checkpoint.write(path, checkpoint.Checkpoint({**content.tensors, "b": np.zeros(7, np.float32)}, content.info))


def change(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(edit(path.read_bytes()))


def save_with(name: str, **options: Any) -> Callable[[Path], object]:
    return lambda path: og.Trainer(linear(optimizer=getattr(optim, name)(lr=0.1, **options))).save(path)


def forge(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A change of the JSON in the header, with a fitting digest."""

    def write(path: Path) -> None:
        content = checkpoint.read(path)
        info = json.loads(json.dumps(content.info))
        change(info)
        checkpoint.write(path, checkpoint.Checkpoint(content.tensors, info))

    return write


CUT = "truncated, damaged or not a safetensors file"
OTHER = "of another program:"
DIGEST = "is damaged: its content does not match the digest"
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (change(lambda _: b""), CUT),
    "short": (change(lambda content: content[:-7]), CUT),
    "half": (change(lambda content: content[: len(content) // 2]), CUT),
    "flipped": (change(lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]), DIGEST),
    "steps": (change(lambda content: content.replace(rb"\"steps\": 2", rb"\"steps\": 3")), DIGEST),
    "text": (change(lambda _: b"not a checkpoint at all"), CUT),
    "other": (partial(safetensors.numpy.save_file, {"a": np.zeros(3)}), "is a safetensors file, but not a checkpoint"),
    "later": (write_later_version, "has version 2; this release reads version 1"),
    "no progress": (forge(lambda info: info.pop("progress")), "is damaged: in its header there is no 'progress'"),
    "negative": (forge(lambda info: info["progress"].update(steps=-1)), r"'progress\.steps' must be a whole number"),
    "history": (
        forge(lambda info: info["progress"].update(history=[{}])),
        r"there is no 'progress\.history\[0\]\.epoch'",
    ),
    "sums": (
        forge(lambda info: info["progress"].update(sums={"loss": [1]})),
        r"'progress\.sums\.loss' must be two numbers",
    ),
    "seed": (forge(lambda info: info.update(seed="a")), "'seed' must be a whole number"),
    "schedule": (forge(lambda info: info.update(schedule=[])), "'schedule' must be a map"),
    "optimizer": (save_with("AdamW"), f"{OTHER} its optimizer is AdamW, this program's is Adam"),
    "state": (
        save_with("Adam", amsgrad=True),
        f"{OTHER} it has '[bw]_max_exp_avg_sq', which this program does not have",
    ),
    "shape": (write_other_shape, rf"{OTHER} 'b' is float32\[7\] there and float32\[4\] here"),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILED.values(), ids=SPOILED)
def test_unusable_checkpoints_are_refused_or_skipped(saved: Path, spoil: Any, reason: str) -> None:
    first, last = (saved / f"step-0000000{step}.safetensors" for step in (1, 2))
    spoil(last)
    trainer = og.Trainer(linear())
    before = values(trainer)
    with pytest.raises(og.errors.CheckpointError, match=reason):
        trainer.restore(last)
    same(values(trainer), before)
    with pytest.warns(UserWarning, match=rf"{reason}.*Continuing from step-00000001.safetensors"):
        assert trainer.restore(saved) == first
    assert trainer.progress.steps == int(trainer.state()["step"]) == 1
    SPOILED["short"][0](first)
    with pytest.raises(og.errors.CheckpointError, match=rf"No checkpoint in .* can be used\..*{reason}.*truncated"):
        trainer.restore(saved)


def test_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = og.Trainer(linear())
    (tmp_path / ".step-00000005.safetensors.part").write_text("left by a run that was killed")
    with pytest.raises(og.errors.CheckpointError, match="holds no checkpoint"):
        trainer.restore(tmp_path)
    with pytest.raises(og.errors.CheckpointError, match="There is no checkpoint"):
        trainer.restore(tmp_path / "nothing")
    with pytest.raises(og.errors.CheckpointError, match="could not be written"):
        trainer.save(tmp_path / "nowhere" / "file")
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(og.errors.ExecutionError, match="python -m pip install safetensors`"):
        trainer.save(tmp_path)
    with pytest.raises(og.errors.ExecutionError, match=r"safetensors.*is not installed"):
        fit(fresh := og.Trainer(program()), callbacks.Checkpoints(tmp_path / "run"))
    assert fresh.progress.steps == 0  # noticed before training


def test_another_schedule_and_other_data_give_warnings(tmp_path: Path) -> None:
    fit(og.Trainer(program()), StopAt(2)).save(tmp_path)
    other = og.Trainer(program(), schedule=0.5)
    with pytest.warns(UserWarning, match=r"now follows {'name': 'Constant', 'lr': 0.5}; .*'Cosine'"):
        other.restore(tmp_path)
    with pytest.warns(UserWarning, match="The data are not those of the restored run"):
        other.fit(data(2), batch_size=2, progress="none")


def test_the_state_of_a_callback_must_be_one(tmp_path: Path) -> None:
    trainer = fit(og.Trainer(program()), callbacks.EarlyStopping("loss", patience=9))
    path = trainer.save(tmp_path)
    forge(lambda info: info["progress"]["callbacks"]["EarlyStopping"].update(waited="long"))(path)
    again = og.Trainer(program())
    again.restore(path)
    with pytest.raises(og.errors.CheckpointError, match=r"no state of 'loss': 'waited' must be a whole number"):
        fit(again, callbacks.EarlyStopping("loss", patience=9), epochs=9)


# -- kept files ----------------------------------------------------------------------------------------------------------


def test_the_last_and_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    keeper = callbacks.Checkpoints(tmp_path / "run", every_steps=2, every_epochs=0, keep=2, best="loss")
    trainer = fit(og.Trainer(program()), keeper)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"step-00000012.safetensors", "step-00000014.safetensors", "best.safetensors"}
    losses = [row["loss"] for row in trainer.progress.history]
    best = og.Trainer(program())
    best.restore(tmp_path / "run" / "best.safetensors")
    assert best.progress.epoch == int(np.argmin(losses)) + 1
    fresh = og.Trainer(program())
    with pytest.raises(
        og.errors.ArgumentError, match=r"holds a checkpoint of step 14, and this run is at step 0.*restore"
    ):
        fit(fresh, callbacks.Checkpoints(tmp_path / "run"))
    for name in ("step-00000012.safetensors", "step-00000014.safetensors"):
        SPOILED["half"][0](tmp_path / "run" / name)
    fit(fresh, callbacks.Checkpoints(tmp_path / "run", keep=1), epochs=1)  # unreadable files do not block a run
    assert (tmp_path / "run" / "step-00000005.safetensors").exists()


# -- kill -9 -------------------------------------------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
import numpy as np
import onnx_convgrad as og
import onnxruntime, safetensors.numpy, onnx_convgrad.training.fit
from onnx_convgrad.callbacks import Callback, Checkpoints

folder, kills = sys.argv[1], int(sys.argv[2])
arrays = dict(np.load(f"{folder}/data.npz"))

def train(run, say):
    class Say(Callback):
        def on_begin(self, _):
            os.write(say, b"x")

    trainer = og.Trainer(f"{folder}/program", seed=3, options={"threads": 1})
    if os.path.isdir(run) and any(name.startswith("step") for name in os.listdir(run)):
        trainer.restore(run)
    keeper = Checkpoints(run, every_steps=1, keep=2)
    trainer.fit(arrays, epochs=8, batch_size=3, callbacks=[Say(), keeper], progress="none")
    np.savez(f"{run}/done.npz", **trainer.parameters(), **trainer.state())

def life(run, delay):
    # Train in a process that is killed after `delay` seconds; return whether it finished, and the time.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(run, write)
            os._exit(0)
        except BaseException as problem:
            os.write(2, repr(problem).encode())
            os._exit(1)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    start = time.perf_counter()
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"exit status {status}"
    return status == 0, time.perf_counter() - start

_, duration = life(f"{folder}/whole", None)
want = np.load(f"{folder}/whole/done.npz")
rng, killed, runs, finished = random.Random(5), 0, 0, 0
while killed < kills or not finished:
    run = f"{folder}/run{runs}"
    done, _ = life(run, rng.uniform(0, duration / 5) if killed < kills else None)
    killed += not done
    if done:
        got = np.load(f"{run}/done.npz")
        assert sorted(got) == sorted(want)
        assert all(np.array_equal(got[name], want[name]) for name in want), run
        runs, finished = runs + 1, finished + 1
print(killed, finished)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    """After SIGKILL at any moment, mostly while a checkpoint is written, only the last steps are lost."""
    linear().save(tmp_path / "program")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((30, 3)).astype(np.float32), target=rng.integers(0, 4, 30))
    command = [sys.executable, "-c", KILLED, str(tmp_path), "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    killed, finished = map(int, done.stdout.split())
    assert killed >= 20 and finished >= 1
