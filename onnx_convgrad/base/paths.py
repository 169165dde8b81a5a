"""Check paths that a caller or a file gives, before anything is opened."""

from __future__ import annotations

import difflib
import os
import re
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


_WINDOWS = re.compile(r"([A-Za-z]):[\\/]")


def where_instead(path: Path) -> str:
    """What may have been meant by the path of a file that does not exist."""
    found = _WINDOWS.match(str(path))
    if found and os.name != "nt":
        rest = str(path)[found.end() :].replace("\\", "/")
        return f"That is a path of Windows, which WSL calls {f'/mnt/{found[1].lower()}/{rest}'!r}."
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except (OSError, ValueError):
        return f"There is no folder {str(path.parent)!r}, either; paths start from {str(Path.cwd())!r}."
    near = difflib.get_close_matches(path.name, names, 1, 0.7)
    return (
        f"Did you mean {str(path.with_name(near[0]))!r}?" if near else f"Relative paths start from {str(Path.cwd())!r}."
    )


def check_regular(path: Path) -> None:
    """Raise `ArgumentError` unless `path` is a regular file or a link to one: a device or a pipe may never end."""
    if not os.path.lexists(path):
        raise ArgumentError(f"There is no file {str(path)!r}.", hint=where_instead(path))
    if not os.path.isfile(path):  # noqa: PTH113 - `Path.is_file` raises OSError for some names
        kind = "a folder" if os.path.isdir(path) else "not a regular file"  # noqa: PTH112
        raise ArgumentError(f"{str(path)!r} is {kind}.", hint="Name a file with data.")
