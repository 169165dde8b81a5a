"""Folders of programs whose files come from several builds, or from several ways to save one."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from tests.support.one_input import graph_of

FILES = ("step", "gradients", "update", "evaluate", "inference")
BATCH = {"x": np.ones((2, 3), np.float32), "target": np.ones((2, 200), np.float32)}


def model(seed: int, activation: str = "Relu") -> onnx.ModelProto:
    weights = np.random.default_rng(seed).standard_normal((3, 200)).astype(np.float32)
    body = f"{{ p = MatMul (x, w) q = {activation} (p) y = Mul (q, s) }}"
    return graph_of(f"(float[N,3] x) => (float[N,200] y) {body}", w=weights, s=weights[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs that differ in weights, in the optimizer, in the graph, or in how they are saved."""
    folder = tmp_path_factory.mktemp("programs")
    sgd = og.optim.SGD(0.1)
    first = og.build_training(model(0), loss="mse", optimizer=sgd, freeze="s")
    first.save(folder / "first")
    first.save(folder / "fed", defaults=False)
    first.save(folder / "shared", shared_weights=True)
    first.save(folder / "both", shared_weights=True, defaults=False)
    og.build_training(model(1), loss="mse", optimizer=sgd, freeze="s").save(folder / "weights", shared_weights=True)
    og.build_training(model(0), loss="mse", optimizer=og.optim.SGD(0.2), freeze="s").save(folder / "rate")
    og.build_training(model(0, "Sigmoid"), loss="mse", optimizer=sgd, freeze="s").save(folder / "graph")
    og.build_training(model(0), loss="mse", optimizer=og.optim.Adam(0.1)).save(folder / "optimizer", defaults=False)
    return folder


def used(folder: Path) -> None:
    """Use every graph of a program."""
    trainer = og.Trainer(folder)
    trainer.step(BATCH)
    trainer.step(BATCH, BATCH)
    trainer.evaluate_batch(BATCH)
    trainer.predict({"x": BATCH["x"]})
    og.TrainingProgram.load(folder).save(folder.with_name("again"))


NAMES = ("first", "fed", "shared", "both", "weights", "rate", "graph", "optimizer")


@pytest.mark.parametrize("name", NAMES)
def test_whole_folders_can_be_used(saved: Path, name: str, tmp_path: Path) -> None:
    shutil.copytree(saved / name, tmp_path / name)
    used(tmp_path / name)
    assert (tmp_path / "again" / "step.onnx").exists()


QUICK = [("first", "fed"), ("both", "weights"), ("first", "graph")]


@pytest.mark.parametrize(
    ("into", "of"),
    [pytest.param(*p, marks=[] if p in QUICK else pytest.mark.slow) for p in itertools.permutations(NAMES, 2)],
)
def test_a_file_of_another_program_is_refused(saved: Path, into: str, of: str, tmp_path: Path) -> None:
    """Every file of every program, alone, in the folder of every other one."""
    for file in sorted(path.name for path in (saved / of).iterdir()):
        if not (saved / into / file).exists() and file == "weights.bin":
            continue  # nothing refers to it
        folder = tmp_path / file / "program"
        shutil.copytree(saved / into, folder)
        shutil.copy(saved / of / file, folder / file)
        if (saved / into / file).exists() and (saved / into / file).read_bytes() == (folder / file).read_bytes():
            continue
        with pytest.raises(og.errors.ModelError):
            used(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_refused(saved: Path, name: str, tmp_path: Path) -> None:
    for file in sorted(path.name for path in (saved / name).iterdir()):
        folder = tmp_path / file / "program"
        shutil.copytree(saved / name, folder)
        (folder / file).unlink()
        with pytest.raises(og.errors.ModelError):
            used(folder)


def test_programs_of_earlier_releases_are_read(saved: Path, tmp_path: Path) -> None:
    """Their files have no digest."""
    shutil.copytree(saved / "fed", tmp_path / "program")
    for path in (tmp_path / "program").glob("*.onnx"):
        old = onnx.load(path)
        kept = [entry for entry in old.metadata_props if entry.key != "onnx_convgrad.program"]
        assert len(kept) == len(old.metadata_props) - 1
        del old.metadata_props[:]
        old.metadata_props.extend(kept)
        onnx.save(old, path)
    used(tmp_path / "program")
    shutil.copy(saved / "first" / "step.onnx", tmp_path / "program" / "step.onnx")
    with pytest.raises(og.errors.ModelError, match="another build"):
        used(tmp_path / "program")
