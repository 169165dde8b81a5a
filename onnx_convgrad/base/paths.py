"""Check paths that a caller or a file gives, and open files so that what is checked is what is read."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

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
    """A likely path in place of one that does not exist, as a sentence."""
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
        raise _irregular(path, kind)


def _irregular(path: Path, kind: str) -> ArgumentError:
    return ArgumentError(f"{str(path)!r} is {kind}.", hint="Name a file with data.")


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of a file that names others, and the folder that links may also lead to.

    That is the folder of the file itself where its name is a link: so content-addressed caches work.
    """

    path: Path
    linked: Path | None = None

    @classmethod
    def of_file(cls, file: Path) -> Folder:
        """The folder of a file."""
        return cls(file.parent, Path(os.path.realpath(file)).parent if file.is_symlink() else None)

    def absolute(self) -> Folder:
        """The folder whatever the working directory becomes."""
        return Folder(self.path.absolute(), self.linked)

    def holds(self, file: Path) -> bool:
        """Whether `file`, with all links resolved, is inside."""
        roots = [Path(os.path.realpath(self.path)), *([self.linked] if self.linked else [])]
        return any(file.is_relative_to(root) for root in roots)


def opened(path: Path, folder: Folder | None = None) -> BinaryIO:
    """Open a regular file to read; what takes its name after that has no effect.

    Args:
        path: The file.
        folder: The folder that it must be in once all links are followed; by default any.

    Raises:
        ArgumentError: It is missing, cannot be opened, is not a regular file, or is outside the folder.
    """
    try:
        file = _regular(path)
    except ArgumentError:
        raise
    except FileNotFoundError:
        raise ArgumentError(f"There is no file {str(path)!r}.", hint=where_instead(path)) from None
    except IsADirectoryError:
        raise _irregular(path, "a folder") from None
    except (OSError, ValueError) as problem:
        raise ArgumentError(f"{str(path)!r:.300} could not be read: {_reason(problem)}.") from None
    if folder is not None and not folder.holds(place_of(file, path)):
        file.close()
        raise ArgumentError(
            f"{str(path)!r} is a link that leads out of {str(folder.path)!r}.", hint="Copy the file there."
        )
    return file


def _regular(path: Path) -> BinaryIO:
    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115 - `Path.open` takes no opener
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _irregular(path, "not a regular file")
    return file


def without_waiting(path: str, flags: int) -> int:
    """Open a file, as an `opener`; without this, a pipe that nobody writes to is waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def place_of(file: BinaryIO, path: Path) -> Path:
    """The place of an open file, with all links resolved; `path` is the name that it was opened by.

    Raises:
        OSError: The name does not mean that file any more, and the system cannot tell the place by itself.
    """
    with contextlib.suppress(OSError):  # other systems than Linux
        return Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))  # noqa: PTH115 - it is not always a path
    real = Path(os.path.realpath(path))
    if not os.path.samestat(os.fstat(file.fileno()), real.lstat()):
        raise OSError("the file was replaced while it was opened")
    return real


def name_of(file: BinaryIO, path: Path) -> str:
    """A name by which a library opens the very file that is open, where the system has such names."""
    own = f"/proc/self/fd/{file.fileno()}"
    return own if os.path.exists(own) else str(path)  # noqa: PTH110


def read_text(path: Path, most: int) -> str:
    """Read a text in UTF-8, with or without a mark of byte order, of at most so many bytes.

    Raises:
        ArgumentError: It is not a regular file.
        ValueError: It is longer, or not in UTF-8.
        OSError: It is missing, or cannot be read.
    """
    with _regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it is longer than {most:,} bytes")
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def inside(folder: Folder, name: str) -> Path:
    """The file that a name in another file means: a file inside a folder, also once all links are followed.

    Raises:
        ValueError: It is not there, or leads elsewhere, or cannot be the name of a file; the reason completes a sentence.
    """
    if leads_out(name):
        raise ValueError("which is not inside its folder")
    path = folder.path / name
    try:
        real = Path(os.path.realpath(path, strict=True))
    except FileNotFoundError:
        raise ValueError("which is not a file in its folder") from None
    except (OSError, ValueError) as problem:
        raise ValueError(f"which cannot be read: {_reason(problem)}") from None
    if not folder.holds(real):
        raise ValueError(f"a link to {str(real)!r} outside its folder")
    if not real.is_file():
        raise ValueError("which is not a file in its folder")
    return path


def unnamed(path: Path, option: str) -> Path:
    """Return a place to write that nobody has named; it may not be a link that leads out of its folder.

    Raises:
        ArgumentError: It is; `option` names another place.
    """
    if path.is_symlink() and not Folder(path.parent).holds(Path(os.path.realpath(path))):
        raise ArgumentError(
            f"{str(path)!r}, where the result would be, is a link to {os.path.realpath(path)!r}.",
            hint=f"Name a place with {option}.",
        )
    return path


def leads_out(name: str) -> bool:
    """Whether a name leads out of the folder, or is absolute, on Linux or on Windows."""
    names = [PurePosixPath(name), PureWindowsPath(name)]
    return not name or "\0" in name or any(one.anchor or ".." in one.parts for one in names)


def _reason(problem: Exception) -> str:
    return getattr(problem, "strerror", None) or f"{problem}".rstrip(".")
