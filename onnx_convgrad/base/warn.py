"""Issue warnings that point at the caller's line, from any depth inside the package."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from onnx_convgrad.errors import shown

_PACKAGE = str(Path(__file__).parents[1]) + os.sep  # a package whose name only begins alike is the caller's
_RULES = str(Path(__file__).resolve().parents[2] / "rules") + os.sep
"""The rules of an uninstalled checkout, in which `onnx_convgrad/rules` is a link."""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the innermost line outside this package and onnx_ir."""
    level, frame = 1, sys._getframe()  # noqa: SLF001 - Python 3.12 has `skip_file_prefixes` instead
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(shown(text), category, stacklevel=level)


def _is_internal(filename: str) -> bool:
    return filename.startswith((_PACKAGE, _RULES)) or "onnx_ir" in Path(filename).parts
