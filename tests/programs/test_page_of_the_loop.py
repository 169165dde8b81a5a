"""`docs/how_to/train_with_onnxruntime.md`: its programs train and export as `og.Trainer` does, without the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.training_nets import untrained

pytestmark = pytest.mark.slow

SAMPLES, BATCH, EPOCHS = 160, 64, 3
FORBIDDEN = 'raise ImportError("The program must run without the package.")\n'


@pytest.fixture(scope="module")
def programs(root: Path) -> dict[str, str]:
    """The programs of the page by the name of their file, which their first line calls."""
    page = (root / "docs" / "how_to" / "train_with_onnxruntime.md").read_text(encoding="utf-8")
    blocks = re.findall(r'^```python\n(""".*?)^```$', page, re.MULTILINE | re.DOTALL)
    named = {re.search(r"python (\w+\.py)", text.splitlines()[0])[1]: text for text in blocks}  # type: ignore[index]
    assert set(named) == {"train.py", "export.py"}
    return named


@pytest.fixture
def program(digits_cnn: Path, tmp_path: Path) -> og.TrainingProgram:
    """A program with running statistics, saved with its data."""
    model = untrained(digits_cnn, np.random.default_rng(0))
    built = og.build_training(model, loss="cross_entropy", optimizer=og.optim.Adam(0.01))
    built.save(tmp_path / "program")
    np.savez(tmp_path / "data.npz", **digits())
    return built


def digits() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    target = rng.integers(10, size=SAMPLES)
    image = rng.random((SAMPLES, 1, 8, 8)) * 0.2
    image[np.arange(SAMPLES), 0, target % 8, target // 8] += 1
    return {"image": image.astype(np.float32), "target": target.astype(np.int64)}


def plain(folder: Path, name: str, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder`, in a process where importing the package fails."""
    (folder / "without" / "onnx_convgrad").mkdir(parents=True, exist_ok=True)
    (folder / "without" / "onnx_convgrad" / "__init__.py").write_text(FORBIDDEN)
    (folder / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder / "without")}
    return subprocess.run(
        [sys.executable, name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=200,
    )


def trained(program: og.TrainingProgram) -> tuple[og.Trainer, list[float]]:
    """The trainer after the epochs of the page, and the losses of its steps."""
    trainer, data, rng, losses = og.Trainer(program), digits(), np.random.default_rng(0), []
    for epoch in range(EPOCHS):
        order = rng.permutation(SAMPLES)
        trainer.learning_rate = 0.01 * 0.5**epoch
        for start in range(0, SAMPLES, BATCH):
            batch = {name: array[order[start : start + BATCH]] for name, array in data.items()}
            losses.append(float(trainer.step(batch)["loss"]))
    return trainer, losses


def test_the_package_cannot_be_imported_there(tmp_path: Path) -> None:
    done = plain(tmp_path, "import.py", "import onnx_convgrad\n")
    assert done.returncode == 1
    assert "must run without the package" in done.stderr


def test_the_page_trains_and_exports_as_the_trainer_does(
    programs: dict[str, str], program: og.TrainingProgram, tmp_path: Path
) -> None:
    assert len(programs["train.py"].splitlines()) <= 60
    done = plain(tmp_path, "train.py", programs["train.py"], "program", "data.npz")
    assert done.returncode == 0, done.stderr
    got = [float(line) for line in done.stdout.split()]
    trainer, want = trained(program)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert got[-1] < 0.5 * got[0]
    whole = float(done.stderr.split()[-1])
    np.testing.assert_allclose(whole, trainer.evaluate_batch(digits())["loss"], rtol=1e-5)

    done = plain(tmp_path, "export.py", programs["export.py"], "program", "trained.npz", "plain.onnx")
    assert done.returncode == 0, done.stderr
    trainer.export(tmp_path / "want.onnx")
    image = {"image": digits()["image"]}
    result, expected = (run(str(tmp_path / f"{name}.onnx"), image)["logits"] for name in ("plain", "want"))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    first = run(str(tmp_path / "program" / "inference.onnx"), image)["logits"]
    assert not np.allclose(result, first, atol=0.1)


def test_the_runtime_refuses_other_learning_rates(program: og.TrainingProgram, tmp_path: Path) -> None:
    session = _session(tmp_path)
    batch = {name: array[:4] for name, array in digits().items()}
    for rate, message in (
        (0.01, "Unable to handle object of type"),
        (np.float32(0.01), "Unable to handle object of type"),
        (np.array(0.01), "Unexpected input data type"),
    ):
        with pytest.raises(Exception, match=message):
            session.run(None, {**batch, "learning_rate": rate})
    want = program.manifest.loss
    names = [output.name for output in session.get_outputs()]
    (loss,) = session.run([names[names.index(want)]], {**batch, "learning_rate": np.array(0.01, np.float32)})
    assert np.isfinite(loss)


def test_a_loop_over_the_listed_inputs_does_not_train(program: og.TrainingProgram, tmp_path: Path) -> None:
    session = _session(tmp_path)
    assert {value.name for value in session.get_inputs()} == {"image", "target"}
    hidden = {value.name for value in session.get_overridable_initializers()}
    assert hidden == {"learning_rate", *(value.name for value in program.manifest.moving())}
    losses = [session.run([program.manifest.loss], digits())[0] for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]


def _session(folder: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(folder / "program" / "step.onnx"), options, ["CPUExecutionProvider"])
