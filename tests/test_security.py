"""The promises of SECURITY.md: each has its tests, and the package has no second way around the functions that keep them."""

from __future__ import annotations

import ast
import functools
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import every_command

PROMISES = {
    "A right answer or a typed error": "tests/fuzz/test_models.py tests/fuzz/test_training_files.py "
    "tests/fuzz/test_command_lines.py tests/fuzz/test_public_arguments.py",
    "Limits": "tests/frontend/test_gate.py tests/data/test_hostile_files.py",
    "Folders are borders": "tests/frontend/test_external_data.py tests/data/test_hostile_files.py "
    "tests/cli/test_train_folder.py tests/cli/test_train.py",
    "No code from files": "tests/data/test_hostile_files.py",
    "No code from the current folder": "tests/cli/test_current_folder.py",
    "No commands to the terminal": "tests/cli/test_hostile_text.py",
    "Nothing half-written": "tests/base/test_drafts.py tests/test_security.py tests/cli/test_files.py",
}
"""Promise -> files with its tests."""


def test_each_promise_has_its_tests(root: Path) -> None:
    text = (root / "SECURITY.md").read_text(encoding="utf-8").partition("## What is promised")[2].partition("\n## ")[0]
    assert re.findall(r"^- \*\*(.+?)\.\*\*", text, re.MULTILINE) == list(PROMISES)
    for files in PROMISES.values():
        assert all((root / file).is_file() for file in files.split())


# -- no second way -----------------------------------------------------------------------------------------------------


@functools.cache
def calls(root: Path) -> list[tuple[str, ast.Call, list[str]]]:
    """Every call in the package: its file, the call, and the functions of the `with` statements around it."""

    def visit(node: ast.AST, around: list[str], file: str) -> Iterator[tuple[str, ast.Call, list[str]]]:
        if isinstance(node, ast.Call):
            yield file, node, around
        for child in ast.iter_child_nodes(node):
            inner = around
            if isinstance(node, (ast.With, ast.AsyncWith)):
                inner = [*around, *(ast.unparse(item.context_expr) for item in node.items)]
            yield from visit(child, inner, file)

    files = [f for folder in ("onnx_convgrad", "rules") for f in sorted((root / folder).rglob("*.py"))]
    own = {file.resolve(): file.relative_to(root).as_posix() for file in files}  # `onnx_convgrad/rules` may be a link
    return [
        found for path, name in own.items() for found in visit(ast.parse(path.read_text(encoding="utf-8")), [], name)
    ]


def called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def places(root: Path, is_meant: Callable[[ast.Call], bool], within: str = r"(?!)") -> set[str]:
    """The files with such a call that is not in a `with` block of such a function."""
    return {
        file.removeprefix("onnx_convgrad/")
        for file, call, around in calls(root)
        if is_meant(call) and not any(re.match(within, text) for text in around)
    }


def writes(call: ast.Call) -> bool:
    """Whether a call may write a file in place."""
    name = called(call).rpartition(".")[2]
    mode = next((ast.unparse(a) for a in [*call.args, *(k.value for k in call.keywords if k.arg == "mode")]
                 if ast.unparse(a) in ("'w'", "'wb'", "'a'", "'ab'", "'x'", "'xb'", "'r+b'")), "")  # fmt: skip
    savers = ("savefig", "savez", "savez_compressed", "save_file", "tofile", "write_bytes", "copyfile", "copytree")
    module = called(call).rpartition(".")[0]
    return (
        name in savers
        or (name == "write_text" and bool(module))
        or (name == "save" and module in ("ir", "onnx", "np", "image"))
        or (name == "open" and bool(mode))
    )


def test_files_are_written_as_drafts(root: Path) -> None:
    found = places(root, writes, r"(draft_of|draft_folder|tempfile\.TemporaryDirectory)\(")
    assert found == {
        "bench/torch_side.py",  # a temporary folder of the process that asks
        "cli/app.py",  # the null device
        "cli/command.py",  # the help
        "cli/train_folder.py",  # a draft, which gets its name when the run is complete
        "metrics/tally.py",  # memory
    }


def test_text_is_printed_in_few_places(root: Path) -> None:
    found = places(
        root, lambda c: called(c) == "print" or re.fullmatch(r"sys\.std(out|err)\.write", called(c)) is not None
    )
    assert found == {
        "bench/torch_side.py",  # JSON, to the process that asks
        "cli/app.py",
        "cli/command.py",  # errors, which are of such text
        "cli/tables.py",
        "cli/train_ranks.py",  # errors
        "distributed/mpi.py",  # numbers
        "training/display.py",
    }


def test_files_are_opened_in_few_places(root: Path) -> None:
    """Others go through `base.paths`, which checks the very file that it opens."""
    readers = ("read_text", "read_bytes")

    def reads(call: ast.Call) -> bool:
        module, _, name = called(call).rpartition(".")
        return (
            (name in readers and bool(module))
            or called(call) in ("open", "np.load", "onnx.load", "zipfile.ZipFile", "Image.open", "io.open", "os.open")
            or (name == "open" and module in ("path", "file"))
        )

    assert places(root, reads, r"(draft_of|tempfile\.TemporaryDirectory|opened|_reading)\(") == {
        "base/arguments.py",  # modules of the package
        "base/drafts.py",  # folders, to lock them
        "base/other_names.py",  # modules of the package
        "base/paths.py",
        "bench/timing.py",  # a file of the system
        "cli/command.py",  # the null device
        "cli/view_data.py",  # a file of the package
        "frontend/diagnose.py",  # a model, for the checker
        "frontend/external_data.py",
        "frontend/files.py",
        "lowering/cost/calibration.py",  # files of the system and the store of the user
        "metrics/tally.py",  # memory
    }


def test_processes_are_started_in_few_places(root: Path) -> None:
    """They go through `base.child`."""
    started = re.compile(
        r"(subprocess|multiprocessing|os\.(exec|spawn|system|popen|posix_spawn|startfile)|ProcessPoolExec)"
    )
    found = places(root, lambda c: started.match(called(c)) is not None, r"safe_children\(")
    assert found == {"frontend/diagnose.py", "bench/torch_side.py", "evaluation/map_folder.py"}
    for file in ("frontend/diagnose.py", "bench/torch_side.py"):
        text = (root / "onnx_convgrad" / file).read_text(encoding="utf-8")
        assert "python_command(" in text and "[sys.executable" not in text


def test_nothing_evaluates_or_unpickles(root: Path) -> None:
    evil = "eval exec compile pickle.load pickle.loads torch.load yaml.load marshal.loads __import__".split()

    def pickles(call: ast.Call) -> bool:
        return any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in call.keywords)

    assert places(root, lambda call: called(call) in evil) == set()
    assert places(root, pickles) == set()


# -- nothing half-written ----------------------------------------------------------------------------------------------

FULL = """
import resource, sys
from onnx_convgrad.cli.app import main
resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, MOST))
main(sys.argv[1:])
"""
WRITERS = {
    "augment": ("augment model.onnx --wrt all -o out.onnx", "out.onnx"),
    "view": ("view model.onnx -o out.html", "out.html"),
    "explain": ("explain model.onnx --html out.html", "out.html"),
    "bench": ("bench model.onnx --budget 0.1 --no-torch --plot out.svg", "out.svg"),
    "lowerings": ("bench model.onnx --budget 0.1 --no-torch --save-lowerings out.json", "out.json"),
    "predict": ("predict model.onnx pictures -o out.csv", "out.csv"),
    "predict npz": ("predict model.onnx pictures -o out.npz", "out.npz"),
    "predict json": ("predict model.onnx pictures -o out.json", "out.json"),
    "evaluate": ("evaluate model.onnx pictures --plot out.svg", "out.svg"),
    "attribute": ("attribute picture.png --model model.onnx -o out.svg", "out.svg"),
    "attribute npz": ("attribute picture.png --model model.onnx -o out.npz", "out.npz"),
    "quantize": ("quantize model.onnx --data pictures --method nearest --plot out.svg -o q.onnx", "out.svg"),
    "train": (f"{every_command.TRAIN} --out run --plot out.svg -q", "out.svg"),
}
"""A command line, and what it writes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file(name: str, tmp_path: Path) -> None:
    line, output = WRITERS[name]
    every_command.furnish(tmp_path)
    environment = {**os.environ, "ONNX_CONVGRAD_CACHE": "", "MPLCONFIGDIR": str(tmp_path)}

    def run(limit: int) -> int:
        command = [sys.executable, "-c", FULL.replace("MOST", str(limit)), *line.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
        assert "Traceback" not in done.stderr
        return done.returncode

    old = b"the old content, which is not the new one"
    assert run(resource.RLIM_INFINITY) == 0
    size = (tmp_path / output).stat().st_size
    (tmp_path / output).write_bytes(old)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert run(size // 2) == 2
    assert (tmp_path / output).read_bytes() == old
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")]
