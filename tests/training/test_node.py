"""Saved steps and gradients run in JavaScript as in Python: `onnxruntime-node`, and `onnxruntime-web`'s WebAssembly.

The packages are taken from `NODE_PATH`, or from a cache that npm fills.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.node import packages
from tests.support.training_nets import ProgramRun, same, untrained

pytestmark = pytest.mark.slow

STEPS, BATCH = 12, 32


def digits() -> dict[str, np.ndarray]:
    found = load_digits()
    return {"image": (found.images[:, None] / 16).astype(np.float32), "target": found.target.astype(np.int64)}


def losses_in_python(program: og.TrainingProgram, data: dict[str, np.ndarray]) -> list[float]:
    step = ProgramRun(program)
    batches = ({name: a[i * BATCH : (i + 1) * BATCH] for name, a in data.items()} for i in range(STEPS))
    return [float(step(batch)[program.manifest.loss]) for batch in batches]


@pytest.mark.parametrize(
    ("package", "target"), [("onnxruntime-node", "cpu"), ("onnxruntime-web", "web")], ids=["node", "web"]
)
def test_the_step_trains_in_javascript(package: str, target: str, root: Path, digits_cnn: Path, tmp_path: Path) -> None:
    modules = packages(package)
    optimizer = og.optim.SGD(lr=0.05, momentum=0.9)
    model = untrained(digits_cnn, np.random.default_rng(0))
    program = og.build_training(model, loss="cross_entropy", optimizer=optimizer, target=target)
    program.save(tmp_path / "program", defaults=False)
    data = digits()
    for name, array in data.items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "node_modules").symlink_to(modules)  # Node looks for modules beside the script
    script = shutil.copy(root / "examples" / "train_in_node.mjs", tmp_path)
    done = subprocess.run(
        ["node", str(script), str(tmp_path / "program"), str(tmp_path), str(BATCH), str(STEPS), package],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    got, want = [float(line) for line in done.stdout.split()], losses_in_python(program, data)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got[-1] < 0.3 * got[0]


def test_an_adapter_runs_in_javascript(root: Path, digits_cnn: Path, tmp_path: Path) -> None:
    modules = packages("onnxruntime-node")
    adapted = og.transforms.add_adapters(str(digits_cnn), rank=2)
    trainer = og.Trainer(og.build_training(adapted, loss="cross_entropy", optimizer=og.optim.Adam(0.05)))
    for step in range(3):
        trainer.step({name: array[step * BATCH : (step + 1) * BATCH] for name, array in digits().items()})
    trainer.export_adapter(tmp_path / "adapter.safetensors")
    without = [t for t in adapted.graph.initializer if ".lora_" not in t.name]
    del adapted.graph.initializer[:]
    adapted.graph.initializer.extend(without)
    onnx.save(adapted, tmp_path / "base.onnx")
    image = digits()["image"][:4]
    save_file({"image": image}, tmp_path / "data.safetensors")
    (tmp_path / "node_modules").symlink_to(modules)
    script = shutil.copy(root / "examples" / "adapter_in_node.mjs", tmp_path)
    names = [str(tmp_path / name) for name in ("base.onnx", "adapter.safetensors", "data.safetensors")]
    done = subprocess.run(["node", str(script), *names], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    want = trainer.evaluate_batch({"image": image, "target": digits()["target"][:4]})["logits"]
    np.testing.assert_allclose(np.reshape(json.loads(done.stdout), want.shape), want, rtol=1e-4, atol=1e-5)
    assert not np.allclose(want, run(str(digits_cnn), {"image": image})["logits"], atol=0.1)


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_a_gradient_is_computed_in_javascript(package: str, root: Path, digits_cnn: Path, tmp_path: Path) -> None:
    """As on the page `docs/how_to/gradient_in_node.md`."""
    modules = packages(package)
    onnx.save(og.augment(str(digits_cnn), wrt="image", of="logits"), tmp_path / "with_gradient.onnx")
    image = digits()["image"][:3]
    (tmp_path / "images.json").write_text(json.dumps({"shape": image.shape, "values": image.ravel().tolist()}))
    (tmp_path / "node_modules").symlink_to(modules)
    script = shutil.copy(root / "examples" / "gradient_in_node.mjs", tmp_path)
    command = ["node", str(script), str(tmp_path / "with_gradient.onnx"), str(tmp_path / "images.json"), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout)
    logits = run(str(digits_cnn), {"image": image})["logits"]
    assert got["predicted"] == list(logits.argmax(axis=1)) == list(digits()["target"][:3])
    seed = np.eye(10, dtype=np.float32)[got["predicted"]]
    want = run(str(tmp_path / "with_gradient.onnx"), {"image": image, "logits_grad": seed})["image_grad"]
    assert got["shape"] == list(want.shape)
    np.testing.assert_allclose(np.reshape(got["gradient"], want.shape), want, rtol=1e-4, atol=1e-5)
    assert np.abs(want).max() > 0.1


def test_inputs_without_defaults(digits_cnn: Path, tmp_path: Path) -> None:
    """The initial values are in a separate file; a loaded program has defaults again."""
    program = og.build_training(str(digits_cnn), loss="cross_entropy", optimizer=og.optim.Adam(), target="web")
    program.save(tmp_path / "program")
    first = run(str(tmp_path / "program" / "initial.onnx"), {})
    manifest = program.manifest
    assert set(first) == {manifest.learning_rate.name, *(entry.name for entry in manifest.moving())}
    batch = {name: array[:4] for name, array in digits().items()}
    step = str(tmp_path / "program" / "step.onnx")
    graph = onnx.load(step).graph
    assert {i.name for i in graph.input} - {t.name for t in graph.initializer} == {*batch, *first}
    want = run(program.step, batch)
    same(run(step, {**batch, **first}), want)
    loaded = og.TrainingProgram.load(tmp_path / "program")
    loaded.save(tmp_path / "program", defaults=True)
    assert not (tmp_path / "program" / "initial.onnx").exists()
    same(run(loaded.step, batch), want)
