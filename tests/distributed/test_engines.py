"""Real ranks: processes of mpiexec and of torchrun on loopback."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.support.launching import ENGINES, command, environment, launch, need
from tests.support.rank_program import PROGRAMS, net, samples

pytestmark = pytest.mark.ranks
PROGRAM = Path(__file__).parents[1] / "support" / "rank_program.py"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_equal_one_process_and_repeat_bit_by_bit(engine: str, size: int, tmp_path: Path) -> None:
    done = launch(engine, size, PROGRAM, "equal", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    for name in PROGRAMS:
        assert len({row[name][key] for row in rows for key in ("digest", "again")}) == 1, name
        assert rows[0][name]["parameters"] < 2e-6, name
        assert rows[0][name]["losses"] < 2e-6, name


def failing(engine: str, size: int, rank: int, step: int, folder: Path) -> None:
    variables = {"RANK_THAT_FAILS": str(rank), "STEP": str(step)}
    done = launch(engine, size, PROGRAM, "fail", folder / "finished", variables=variables, timeout=60)
    assert done.returncode != 0
    assert "ValueError: a bad sample" in done.stderr
    assert not (folder / "finished").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exception_on_one_rank_ends_all(engine: str, tmp_path: Path) -> None:
    failing(engine, 2, 1, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("engine", ENGINES)
def test_exceptions_at_random_moments_never_hang(engine: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    size = draw.choice([2, 3, 4])
    failing(engine, size, draw.randrange(size), draw.choice([0, 1, 7, 50]), tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_timeout_names_the_missing_rank(engine: str, tmp_path: Path) -> None:
    start = time.monotonic()
    done = launch(engine, 3, PROGRAM, "hang", tmp_path / "finished", timeout=60)
    assert done.returncode != 0
    assert "for rank 1 in a sum over all ranks" in done.stderr
    assert time.monotonic() - start < 50
    assert not (tmp_path / "finished").exists()


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    onnx.save(net(), folder / "net.onnx")
    onnx.save(net(normalized=True), folder / "normalized.onnx")
    np.savez(folder / "data.npz", **samples(90, 0))
    return folder


def training(task: Path, out: Path, *more: str, model: str = "net.onnx") -> list[str]:
    options = ["--data", str(task / "data.npz"), "--loss", "cross_entropy", "--validation", "0.2", "--threads", "1"]
    options += ["--metric", "auroc", "--batch-size", "10", "--checkpoint-every", "3"]
    return ["-m", "onnx_convgrad", "train", str(task / model), *options, "-o", str(out), *more]


def exported(folder: Path) -> dict[str, np.ndarray]:
    model = onnx.load(folder / "trained.onnx")
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_command_trains_as_in_one_process(engine: str, task: Path, tmp_path: Path) -> None:
    for name in ("alone", "ranks"):
        arguments = training(task, tmp_path / name, "--epochs", "2", "--sync-batchnorm", model="normalized.onnx")
        done = launch(engine, 3, *arguments) if name == "ranks" else subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment(), timeout=120
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "3 processes train together; each computes its share of every batch." in done.stdout
    assert done.stdout.count("normalized.onnx ->") == 1
    assert done.stderr.count("epoch 2/2") == 1
    ours, theirs = exported(tmp_path / "ranks"), exported(tmp_path / "alone")
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=2e-6, atol=2e-6, err_msg=name)
    rows = [(tmp_path / name / "history.csv").read_text().splitlines() for name in ("ranks", "alone")]
    columns = [i for i, c in enumerate(rows[0][0].split(",")) if c not in ("seconds", "samples_per_second")]
    tables = [np.array([[float(line.split(",")[i]) for i in columns] for line in lines[1:]]) for lines in rows]
    np.testing.assert_allclose(tables[0], tables[1], rtol=2e-6)
    assert {p.name for p in (tmp_path / "ranks").iterdir()} == {p.name for p in (tmp_path / "alone").iterdir()}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_of_the_command_is_told_once(engine: str, task: Path, tmp_path: Path) -> None:
    done = launch(engine, 2, *training(task, tmp_path / "run", "--optimizer", "sgdd"), timeout=60)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "sgdd" in line]
    assert len(lines) == 1
    assert lines[0].startswith("Error on rank 0 of 2: ")


def disturbed(engine: str, size: int, task: Path, out: Path, after: float | None, victim: int) -> bool:
    """Train while one rank is killed so long after its start, or after the first checkpoint; go on until the run ends.

    Return whether a kill has struck.
    """
    need(engine)
    arguments = training(task, out, "--epochs", "3")
    marked = environment(RUN_OF_A_TEST=str(out))
    process = subprocess.Popen(
        command(engine, size, *arguments, restarts=3),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=marked,
    )
    if after is not None:
        while process.poll() is None and not signal_rank(str(out), victim, 0):
            time.sleep(0.01)
        time.sleep(after)
    else:
        for _ in range(600):
            if any((out / "checkpoints").glob("step-*")):
                break
            time.sleep(0.1)
    struck = signal_rank(str(out), victim, signal.SIGKILL)
    text, _ = process.communicate(timeout=120)
    for _ in range(3):
        if process.returncode == 0:
            return struck
        assert engine == "mpi", text
        again = ["-m", "onnx_convgrad", "train", "--resume", str(out)] if (out / "train.toml").exists() else arguments
        done = launch(engine, size, *again)
        text, process.returncode = done.stdout + done.stderr, done.returncode
    pytest.fail(text)


def signal_rank(mark: str, victim: int, number: int) -> bool:
    """Send a signal to the rank `victim` of the run with this mark in its environment; 0 looks whether it is there."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        rank = {f"PMI_RANK={victim}", f"OMPI_COMM_WORLD_RANK={victim}", f"RANK={victim}"}
        named = {v.decode(errors="replace") for v in variables}
        if f"RUN_OF_A_TEST={mark}" in named and named & rank and b"onnx_convgrad" in words:
            os.kill(int(folder.name), number)
            return True
    return False


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, np.ndarray]]:
    """The result of a run of 2 ranks of an engine if nothing is killed."""

    @functools.cache
    def run(engine: str) -> dict[str, np.ndarray]:
        out = tmp_path_factory.mktemp(engine) / "run"
        done = launch(engine, 2, *training(task, out, "--epochs", "3"))
        assert done.returncode == 0, done.stderr
        return exported(out)

    return run


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_ends_with_the_same_bits(
    engine: str, task: Path, undisturbed: Callable[[str], dict[str, np.ndarray]], tmp_path: Path
) -> None:
    wanted = undisturbed(engine)
    assert disturbed(engine, 2, task, tmp_path / "run", None, 1)
    for name, array in wanted.items():
        np.testing.assert_array_equal(exported(tmp_path / "run")[name], array, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("engine", ENGINES)
def test_kills_at_random_moments(
    engine: str, seed: int, task: Path, undisturbed: Callable[[str], dict[str, np.ndarray]], tmp_path: Path
) -> None:
    draw, wanted = random.Random(seed), undisturbed(engine)
    moment, victim, attempt = draw.uniform(0.0, 8.0), draw.randrange(2), 0
    while not disturbed(engine, 2, task, tmp_path / f"run{attempt}", moment, victim):  # it had ended already
        moment, attempt = moment / 2, attempt + 1
    found = exported(tmp_path / f"run{attempt}")
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
