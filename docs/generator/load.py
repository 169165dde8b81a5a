"""Import modules whose libraries need not be installed, to read their docstrings."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

LIBRARIES = {"onnx_convgrad.torch": "torch", "onnx_convgrad.jax": "jax"}
"""Module of the package -> library that it imports."""


class _Stub(ModuleType):
    """Stands for a library: capitalized attributes are empty classes, others are stubs again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Stub(f"{self.__name__}.{name}")


@cache
def load(name: str) -> ModuleType:
    """Import a module; if its library is not installed, a stub takes its place during the import.

    A module with a stub is left out of `sys.modules`, so that other imports of it still fail.
    """
    library = LIBRARIES.get(name)
    if library is None or find_spec(library):
        return importlib.import_module(name)
    sys.modules[library] = _Stub(library)
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[library]
        sys.modules.pop(name, None)
