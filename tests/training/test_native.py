"""`examples/native`: programs in C and C++ train a saved program with the package's library, with the same bits."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad.programs.graph_names import ROLES
from tests.support.training_nets import untrained

BATCH, STEPS = 32, 20
HEADERS = ("/usr/include/onnxruntime", "/usr/include/onnxruntime/core/session", "/usr/local/include/onnxruntime")
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]


def compiled(root: Path, folder: Path, *flags: str) -> Path:
    """The compiled `train.c`; skips the test where there is no C compiler or no sanitizer for it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("There is no C compiler.")
    trial = folder / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    binary = folder / "train"
    if subprocess.run([compiler, *flags, str(trial), "-o", str(binary)], capture_output=True, check=False).returncode:
        pytest.skip(f"The C compiler lacks {' '.join(flags)}.")
    command = [compiler, *FLAGS, *flags, str(root / "examples" / "native" / "train.c"), "-ldl", "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return binary


def library() -> Path:
    """The shared library of the installed ONNX Runtime; skips the test where it is not a file of its own."""
    found = sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    if not found:
        pytest.skip("The onnxruntime package has no libonnxruntime.so.")
    return found[0]


def written(digits_cnn: Path, folder: Path) -> og.TrainingProgram:
    """Write the program and the data for the native program; return the program."""
    model = untrained(digits_cnn, np.random.default_rng(0))
    program = og.build_training(model, loss="cross_entropy", optimizer=og.optim.Adam(0.01))
    program.save(folder / "program", defaults=False)
    found = load_digits()
    (found.images / 16).astype(np.float32).tofile(folder / "image.bin")
    found.target.astype(np.int64).tofile(folder / "target.bin")
    return program


def losses_in_python(program: og.TrainingProgram) -> list[np.float32]:
    found, losses = load_digits(), []
    images, labels = (found.images[:, None] / 16).astype(np.float32), found.target.astype(np.int64)
    trainer = og.Trainer(program, options={"threads": 1})
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        losses.append(np.float32(trainer.step({"image": images[rows], "target": labels[rows]})["loss"]))
    return losses


def test_c_trains_with_the_same_bits(root: Path, digits_cnn: Path, tmp_path: Path) -> None:
    binary, runtime = compiled(root, tmp_path), library()
    program = written(digits_cnn, tmp_path)
    arguments = [str(runtime), str(tmp_path / "program"), str(tmp_path), str(BATCH), str(STEPS)]
    done = subprocess.run([str(binary), *arguments], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    got = [np.float32(line) for line in done.stdout.split()]
    assert got == losses_in_python(program)
    assert got[-1] < 0.5 * got[0]


@pytest.mark.slow
def test_c_neither_leaks_nor_writes_beyond_its_memory(root: Path, digits_cnn: Path, tmp_path: Path) -> None:
    binary, runtime = compiled(root, tmp_path, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"), library()
    written(digits_cnn, tmp_path)
    arguments = [str(runtime), str(tmp_path / "program"), str(tmp_path), "64", "30"]  # starts again after 28 batches
    done = subprocess.run([str(binary), *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "five arguments are needed"),
        (["nowhere.so", ".", ".", "1", "1"], "nowhere.so"),
        (["LIBRARY", "nowhere", ".", "1", "1"], "nowhere/initial.onnx"),
        (["LIBRARY", "PROGRAM", ".", "1", "1"], "./image.bin: cannot be read"),
        (["LIBRARY", "PROGRAM", "DATA", "5000", "1"], "image.bin: holds less than one batch"),
    ],
)
@pytest.mark.slow
def test_c_says_what_is_wrong(root: Path, digits_cnn: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    binary = compiled(root, tmp_path)
    written(digits_cnn, tmp_path)
    names = {"LIBRARY": str(library()), "PROGRAM": str(tmp_path / "program"), "DATA": str(tmp_path)}
    command = [str(binary), *(names.get(a, a) for a in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, cwd=root)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.slow
def test_cpp_trains_with_the_same_bits(root: Path, digits_cnn: Path, tmp_path: Path) -> None:
    """With ONNX Runtime's header in `ORT_INCLUDE` or in a folder of the system."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("There is no C++ compiler.")
    folders = [Path(folder) for folder in (os.environ.get("ORT_INCLUDE"), *HEADERS) if folder]
    include = next((folder for folder in folders if (folder / "onnxruntime_cxx_api.h").exists()), None)
    if include is None:
        pytest.skip("There is no onnxruntime_cxx_api.h: set ORT_INCLUDE.")
    (tmp_path / "libonnxruntime.so.1").symlink_to(library())  # its name inside
    binary = tmp_path / "train"
    source = str(root / "examples" / "native" / "train.cpp")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-isystem", str(include)]
    linked = ["libonnxruntime.so.1", f"-Wl,-rpath,{tmp_path}", "-o", str(binary)]
    done = subprocess.run(
        [compiler, *flags, source, *linked], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    program = written(digits_cnn, tmp_path)
    arguments = [str(tmp_path / "program"), str(tmp_path), str(BATCH), str(STEPS)]
    done = subprocess.run([str(binary), *arguments], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert [np.float32(line) for line in done.stdout.split()] == losses_in_python(program)
    done = subprocess.run([str(binary), *arguments[:2], "5000", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "image.bin holds less than one batch\n")


def test_the_c_program_is_short(root: Path) -> None:
    assert len((root / "examples" / "native" / "train.c").read_text(encoding="utf-8").splitlines()) < 100


def test_the_page_states_the_order(root: Path) -> None:
    """`docs/run_elsewhere.md` lists the roles of every graph as the manifest does."""
    page = (root / "docs" / "run_elsewhere.md").read_text(encoding="utf-8")
    for part, (inputs, outputs) in ROLES.items():
        row = f"| `{part}` | {', '.join(inputs) or 'none'} | {', '.join(outputs)} |"
        assert row in page
