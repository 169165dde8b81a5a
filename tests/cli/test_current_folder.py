"""No command takes a file of the current folder, where a downloaded model may lie, for a module or a setting."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import every_command

TRAP = "with open({record!r}, 'a') as file: file.write(__name__ + ' ')\nraise ImportError('a trap')\n"


def imported(root: Path) -> set[str]:
    """The packages that some import in our files names, whether they are installed or not."""
    found: set[str] = set()
    for file in [*root.glob("onnx_convgrad/**/*.py"), *root.glob("rules/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return found | {re.split(r"\W", entry)[0] for entries in extras.values() for entry in entries}


def set_traps(folder: Path, record: Path, root: Path) -> set[str]:
    """Write a file for every module that any package may import, a plugin with rules, and a file of settings."""
    loaded = {name.partition(".")[0] for name in sys.modules}
    installed = set(importlib.metadata.packages_distributions())
    names = imported(root) | loaded | installed | set(sys.stdlib_module_names) | {"sitecustomize", "usercustomize"}
    names = {name for name in names if name.isidentifier()} - {"onnx_convgrad", "__main__"}
    for name in {*names, "trap_plugin", "trap_backend"}:
        (folder / f"{name}.py").write_text(TRAP.format(record=str(record)), encoding="utf-8")
    about = folder / "trap-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trap\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[onnx_convgrad.rules]\ntrap = trap_plugin\n", encoding="utf-8")
    (folder / "matplotlibrc").write_text("backend: module://trap_backend\ntext.usetex: True\n", encoding="utf-8")
    return names


@pytest.fixture
def trapped(tmp_path: Path, root: Path) -> Iterator[Path]:
    """A folder of models and traps; none of them has run at the end."""
    folder, record = tmp_path / "folder", tmp_path / "record"
    folder.mkdir()
    every_command.furnish(folder)
    names = set_traps(folder, record, root)
    assert {"onnxruntime", "PIL", "matplotlib", "safetensors", "tomllib", "torch", "mlflow", "multiprocessing"} <= names
    yield folder
    assert not record.exists(), record.read_text(encoding="utf-8")


def disarm(trapped: Path) -> None:
    """Remove the traps for modules that `python -m` imports before the first line of any package."""
    probe = trapped.parent / "probe" / "probe"
    probe.mkdir(parents=True)
    (probe / "__init__.py").write_text("import sys\nprint(*sys.modules)\n", encoding="utf-8")
    (probe / "__main__.py").touch()
    command = [sys.executable, "-m", "probe"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=probe.parent)
    for name in done.stdout.split():
        (trapped / f"{name}.py").unlink(missing_ok=True)


def start(trapped: Path, how: str, line: str, status: int = 0) -> None:
    """Run a command line in the folder with traps, by `python -m` or as pip's script does."""
    script = trapped.parent / "bin" / "onnx-convgrad"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "from onnx_convgrad.cli.app import main\nif __name__ == '__main__':\n    main()\n", encoding="utf-8"
    )
    begin = {"module": ["-m", "onnx_convgrad"], "script": [str(script)]}[how]
    package = str(Path(every_command.__file__).parents[2])
    environment = {**{k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}, "PYTHONPATH": package}
    command = [sys.executable, *begin, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=trapped, env=environment)
    assert done.returncode == status, f"{line}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("how", ["module", "script"])
def test_child_processes_leave_the_current_folder_out(trapped: Path, how: str) -> None:
    if how == "module":
        disarm(trapped)
    start(trapped, how, "augment invalid.onnx --wrt inputs", 2)  # asks ONNX Runtime in a process of its own
    start(trapped, how, every_command.LINES["map"])  # two workers


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_no_command_imports_from_the_current_folder(trapped: Path, part: int) -> None:
    """By `python -m`, for which Python puts the current folder first; the script of pip starts without it."""
    assert set(every_command.LINES) == every_command.NAMES, "add a line for each command"
    disarm(trapped)
    lines = list(every_command.LINES.values())
    half = lines.index(every_command.LINES["train"])  # whose run the lines behind it read
    for line in lines[half:] if part else lines[:half]:
        start(trapped, "module", line)


def test_the_traps_would_run(trapped: Path) -> None:
    """Python itself takes them: the tests above do not pass for another reason."""
    done = subprocess.run([sys.executable, "-c", "import onnxruntime"], capture_output=True, check=False, cwd=trapped)
    record = trapped.parent / "record"
    assert done.returncode and record.read_text(encoding="utf-8")
    record.unlink()
