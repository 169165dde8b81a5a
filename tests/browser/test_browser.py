"""The site of the command `web` in a real browser: it trains as natively, and its buttons do what they say.

A headless Chromium is driven by Node: that of the system (`CHROMIUM`, or on the path), or one from npm.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad.cli.web import write_site
from onnx_convgrad.runtime import run
from tests.support.browser import drive, served
from tests.support.node import packages
from tests.support.training_nets import ProgramRun, untrained

pytestmark = pytest.mark.browser

BATCH, STEPS, TRAIN = 32, 12, 1397
"""Samples of a batch, steps that are compared with Python's, and samples to train on. Differences of rounding between
processors grow by a third in each step: after 20 steps they were 2e-5."""


def digits() -> tuple[np.ndarray, np.ndarray]:
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return (found.images[order, None] / 16).astype(np.float32), found.target[order].astype(np.int64)


def program(digits_cnn: Path) -> og.TrainingProgram:
    model = untrained(digits_cnn, np.random.default_rng(0))
    optimizer = og.optim.SGD(lr=0.02, momentum=0.9)
    return og.build_training(model, loss="cross_entropy", optimizer=optimizer, target="web")


@pytest.fixture(scope="module")
def site(digits_cnn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of the digits program, with the data as raw numbers beside it."""
    folder = tmp_path_factory.mktemp("web")
    program(digits_cnn).save(folder / "program")
    runtime = packages("onnxruntime-web") / "onnxruntime-web" / "dist"
    write_site(folder / "program", folder / "site", runtime=str(runtime))
    image, target = digits()
    image.tofile(folder / "site" / "image.f32")
    target.tofile(folder / "site" / "target.i64")
    return folder / "site"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    yield from served(site)


def accuracy(model: Path) -> float:
    image, target = digits()
    return float((run(str(model), {"image": image[TRAIN:]})["logits"].argmax(1) == target[TRAIN:]).mean())


def test_steps_in_webassembly_are_those_of_python(node_modules: Path, address: str, digits_cnn: Path) -> None:
    got = drive(node_modules, address, "steps", provider="wasm", batch=BATCH, steps=STEPS)["losses"]
    (image, target), step = digits(), ProgramRun(program(digits_cnn))
    cuts = [slice(i * BATCH, (i + 1) * BATCH) for i in range(STEPS)]
    want = [float(step({"image": image[rows], "target": target[rows]})["loss"]) for rows in cuts]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got[-1] < 0.5 * got[0]


def test_the_first_step_follows_the_navigation(node_modules: Path, address: str) -> None:
    got = drive(node_modules, address, "first")
    assert got["said"].startswith("Step ")
    assert got["after"] > 0
    sys.stdout.write(f"from the navigation to the first step: {got['after'] / 1e3:.2f} s\n")


def test_the_page_trains_undoes_saves_and_exports(node_modules: Path, address: str, site: Path, tmp_path: Path) -> None:
    image, target = digits()
    np.save(tmp_path / "image.npy", image[:TRAIN])
    np.save(tmp_path / "target.npy", target[:TRAIN])
    names = ("before", "after", "undone", "loaded")
    files = {name: tmp_path / f"{name}.onnx" for name in names}
    data = {name: tmp_path / f"{name}.npy" for name in ("image", "target")}
    shot = Path(os.environ.get("SCREENSHOTS", tmp_path)) / "page.png"
    said = drive(node_modules, address, "train", epochs=6, shot=shot, **files, **data)
    assert said["trained"].startswith(f"Step {6 * (TRAIN // BATCH)} of {6 * (TRAIN // BATCH)}: loss ")
    assert accuracy(files["after"]) > 0.95
    assert accuracy(files["before"]) < 0.5
    assert files["undone"].read_bytes() == files["before"].read_bytes()
    assert files["before"].read_bytes() == (site / "program" / "inference.onnx").read_bytes()
    assert files["loaded"].read_bytes() == files["after"].read_bytes()
    assert said["loaded"] == f"Loaded, after {6 * (TRAIN // BATCH)} steps."


def test_the_page_says_what_is_missing(node_modules: Path, address: str) -> None:
    said = drive(node_modules, address, "errors")
    assert said["nothing"] == "Give a file for image, target, or take random numbers."
    assert said["gpu"].startswith("This browser offers no WebGPU device.")
    assert said["provider"] == "wasm"
    assert said["random"].startswith("Step 2 of 2")


def test_symbols_are_taught_by_drawing(node_modules: Path, root: Path, tmp_path: Path) -> None:
    example = root / "examples" / "web"
    command = [sys.executable, str(example / "make_program.py"), str(tmp_path / "program")]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    runtime = packages("onnxruntime-web") / "onnxruntime-web" / "dist"
    write_site(tmp_path / "program", tmp_path / "site", runtime=str(runtime), page=example)
    files = {name: tmp_path / f"{name}.onnx" for name in ("after", "loaded")}
    shot = Path(os.environ.get("SCREENSHOTS", tmp_path)) / "draw.png"
    serving = served(tmp_path / "site")
    said = drive(node_modules, next(serving), "draw", shot=shot, **files)
    next(serving, None)
    assert said["right"] >= 20  # of 24
    assert said["taught"].startswith("12 drawings, 144 steps, loss ")
    assert said["undone"].startswith("11 drawings, 132 steps, loss ")
    assert files["loaded"].read_bytes() == files["after"].read_bytes()
    logits = run(str(files["after"]), {"image": np.zeros((1, 1, 8, 8), np.float32)})["logits"]
    assert logits.shape == (1, 5)
