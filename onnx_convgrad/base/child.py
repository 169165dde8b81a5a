"""Start Python processes that import what this one imports, and nothing from the current folder.

`python -c` and `python -m` look for modules in the current folder first, where a downloaded model may lie beside a file
`onnxruntime.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_START = "import sys; sys.path[:] = {path!r}\n{program}"
_SAFE = "PYTHONSAFEPATH"


def python_command(program: str, *arguments: str) -> list[str]:
    """The command that runs the text of a program in a process of its own, with the import path of this one.

    It is isolated from the environment: no variable makes it read its standard input as a program, or import more.
    """
    path = [entry for entry in sys.path if os.path.isabs(entry)]  # noqa: PTH117 - "" is the current folder
    return [sys.executable, "-I", "-c", _START.format(path=path, program=program), *arguments]


@contextlib.contextmanager
def safe_children() -> Iterator[None]:
    """A block in which Python processes that the standard library starts, such as workers, leave the current folder out."""
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE]
        else:
            os.environ[_SAFE] = before
