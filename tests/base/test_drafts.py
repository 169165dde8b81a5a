"""Drafts: files that appear complete, folders that are exchanged, leftovers of killed processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_convgrad.base import drafts
from onnx_convgrad.base.drafts import (
    draft_folder,
    draft_of,
    recover_folder,
    remove_leftovers,
    replace_folder,
    write_text,
)

HOLD = """
import sys, time
from pathlib import Path
from onnx_convgrad.base.drafts import draft_folder
with draft_folder(Path(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_a_file_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail() -> None:
        with draft_of(path, flush=True) as draft:
            draft.write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with draft_of(path, flush=True) as draft:
        draft.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_the_target_of_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


def test_leftovers_of_killed_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    path, other = tmp_path / "model[1].onnx", tmp_path / ".mine.part"
    other.mkdir()
    for path_ in (path, tmp_path / "b"):
        command = [sys.executable, "-c", HOLD, str(path_)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if path_ == path:
            (left,) = (p for p in tmp_path.iterdir() if p != other)
            (left / "half").write_text("x")
            with draft_folder(path):
                assert left.exists()  # its process lives
        process.kill()
        process.communicate()
    with draft_folder(path) as mine:
        assert not left.exists() and mine.exists()
    assert len(list(tmp_path.iterdir())) == 2  # another name's, and a folder that is not ours
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(drafts, "_exchanged", lambda *_: False)
    new, old = tmp_path / "new", tmp_path / "folder"
    for name in ("1", "2"):
        new.mkdir(exist_ok=True)
        (new / "file").write_text(name)
        replace_folder(new, old)
        assert (old / "file").read_text() == name
    assert (new / "file").read_text() == "1"


@pytest.mark.parametrize("kill", [1, 2, 3])
def test_a_kill_between_the_renames_loses_nothing(tmp_path: Path, kill: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an exchange, as on other systems: the old folder or the new one is there afterwards."""
    monkeypatch.setattr(drafts, "_exchanged", lambda *_: False)
    new, old, calls = tmp_path / "new", tmp_path / "folder", []
    for folder in (new, old):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    replace = os.replace

    def killed(a: Path, b: Path) -> None:
        calls.append(a)
        if len(calls) == kill:
            raise KeyboardInterrupt
        replace(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_folder(new, old)
    recover_folder(old)
    assert (old / "file").read_text() == ("folder" if kill < 3 else "new")


def test_it_works_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    (tmp_path / ".a.12345678.part").mkdir()
    write_text(tmp_path / "a", "text")
    assert {p.name for p in tmp_path.iterdir()} == {"a", ".a.12345678.part"}  # it might be in use


def test_an_error_of_writing_names_the_output(tmp_path: Path) -> None:
    for output in (tmp_path / "a.txt", tmp_path / "b.txt"):
        with pytest.raises(OSError, match="full") as caught, draft_of(output) as draft:
            raise OSError(28, "full", None if output.name == "a.txt" else str(draft))
        assert caught.value.filename == str(output)
    with pytest.raises(OSError, match="missing") as caught, draft_of(tmp_path / "c.txt"):
        raise OSError(2, "missing", "other.txt")
    assert caught.value.filename == "other.txt"
    assert not list(tmp_path.iterdir())
