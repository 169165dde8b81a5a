"""Write files so that they appear complete or not at all, and leave nothing behind forever.

A file is written in a temporary folder beside it, `.<name>.<random>.part`, and renamed. The folder is locked while its
process lives, so the next one that writes the same file knows which folders were left by a kill, and removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_SUFFIX = ".part"
_RANDOM = "?" * 8  # what `tempfile` puts into a name
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of renameat2


@contextlib.contextmanager
def draft_folder(output: Path) -> Iterator[Path]:
    """Make a temporary folder beside `output` for the block; remove those that killed processes left for the same name."""
    remove_leftovers(output.parent, glob.escape(output.name))
    folder, lock = _locked(output)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def draft_of(output: Path, *, flush: bool = False) -> Iterator[Path]:
    """A path for the block to write to; then the file there takes the place of `output`, or of the target of a link.

    With `flush` it is on the disk before, so that not even a power cut leaves half of it. An error of the block while it
    writes, such as that of a full disk, names the output.
    """
    if output.is_symlink():
        output = output.resolve()
    with draft_folder(output) as folder:
        draft = folder / output.name
        try:
            yield draft
        except OSError as problem:
            if problem.filename in (None, str(draft)):
                problem.filename = str(output)
            raise
        if flush:
            _flush(draft)
        draft.replace(output)
        if flush and os.name == "posix":  # Windows cannot open folders and does not need it
            _flush(output.absolute().parent)


def write_text(output: Path, text: str) -> None:
    """Write a text file as it is, in UTF-8."""
    with draft_of(output) as draft:
        draft.write_text(text, encoding="utf-8", newline="")


def write_arrays(output: Path, arrays: Mapping[str, Any]) -> None:
    """Write an `.npz`; `np.savez` refuses some names."""
    import numpy as np

    with draft_of(output) as draft, zipfile.ZipFile(draft, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def replace_folder(draft: Path, output: Path) -> None:
    """Let a folder take the place of another one, which ends up at `draft`; a kill leaves the old one or the new one.

    Where the system cannot exchange two folders, a kill can leave the old one under another name: see `recover_folder`.
    """
    if not output.exists():
        draft.replace(output)
    elif not _exchanged(draft, output):
        aside = _aside(output)
        shutil.rmtree(aside, ignore_errors=True)
        output.replace(aside)
        draft.replace(output)
        aside.replace(draft)


def recover_folder(output: Path) -> None:
    """Put a folder back that `replace_folder` had moved aside when its process was killed."""
    if not output.exists() and _aside(output).is_dir():
        _aside(output).replace(output)


def remove_leftovers(folder: Path, names: str = "*") -> None:
    """Remove the temporary folders that killed processes left in `folder`; `names` is a glob over what they wrote."""
    for left in folder.glob(f".{names}.{_RANDOM}{_SUFFIX}"):
        if left.is_symlink() or not left.is_dir():
            continue
        with contextlib.suppress(OSError):  # in use, or not ours
            lock = _lock(left, wait=False)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def _locked(output: Path) -> tuple[Path, int | None]:
    """Make a temporary folder and lock it; another process may remove it in between, taking it for a leftover."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=_SUFFIX, dir=output.absolute().parent))
        with contextlib.suppress(FileNotFoundError):
            lock = _lock(folder, wait=True)
            if lock is None or folder.exists():
                return folder, lock
            os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Lock a folder until its process ends; `None` where the system has no such locks. Raises OSError if it is locked."""
    try:
        import fcntl
    except ImportError:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as problem:
        without = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EBADF)  # network file systems that have no locks
        if wait and problem.errno in without:
            return handle
        os.close(handle)
        raise
    return handle


def _exchanged(a: Path, b: Path) -> bool:
    """Exchange two folders in one step; return False if the system cannot."""
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return call is not None and call(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0


def _aside(output: Path) -> Path:
    return output.with_name(f".{output.name}.old")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
