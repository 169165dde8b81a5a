"""Check paths that a caller or a file gives, before anything is opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onnx_convgrad.errors import ArgumentError


def as_path(path: Any, what: str = "The path") -> Path:
    """Return a path; raise `ArgumentError` for anything else, and for text that no file can be named."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"{what} must be a path, not {path!r}.")
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        name = b"\0"
    if b"\0" in name or not name:
        raise ArgumentError(f"{what} is {os.fspath(path)!r}, which cannot be the name of a file.")
    return Path(os.fsdecode(path))


def check_regular(path: Path) -> None:
    """Raise `ArgumentError` unless `path` is a regular file or a link to one: a device or a pipe may never end."""
    if not os.path.lexists(path):
        raise ArgumentError(f"There is no file {str(path)!r}.")
    if not os.path.isfile(path):  # noqa: PTH113 - `Path.is_file` raises OSError for some names
        kind = "a folder" if os.path.isdir(path) else "not a regular file"  # noqa: PTH112
        raise ArgumentError(f"{str(path)!r} is {kind}.", hint="Name a file with data.")
