"""Import packages that only some features need."""

from __future__ import annotations

import importlib
from typing import Any

from onnx_convgrad.errors import ExecutionError

__all__ = ["imported"]


def imported(module: str, need: str, install: str) -> Any:
    """Import a package that is not always there.

    Args:
        module: Its name, or that of a module in it.
        need: Who needs what, as in "Checkpoints need safetensors".
        install: What pip installs.

    Raises:
        ExecutionError: It is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        missing = problem.name in (module, module.partition(".")[0])
        reason = "is not installed" if missing else f"cannot be imported: {problem}"
        raise ExecutionError(f"{need}, which {reason}.", hint=f"Install it with `pip install {install}`.") from None
