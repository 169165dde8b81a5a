"""Import packages that only some features need, and say how they are installed."""

from __future__ import annotations

import importlib
from typing import Any

from onnx_convgrad.errors import ExecutionError

PACKAGES = {
    "PIL": "pillow",
    "art": "adversarial-robustness-toolbox",
    "dp_accounting": "dp-accounting",
    "flwr": "flwr",
    "foolbox": "foolbox",
    "jax": "jax",
    "jiwer": "jiwer",
    "matplotlib": "matplotlib",
    "mlflow": "mlflow",
    "mpi4py": "mpi4py mpich",
    "onnxruntime": "onnxruntime",
    "onnxruntime-gpu": "onnxruntime-gpu[cuda,cudnn]",
    "pycocotools": "pycocotools",
    "safetensors": "safetensors",
    "tensorboardX": "tensorboardX",
    "torch": "torch",
    "wandb": "wandb",
}
"""Module, or the package that brings another build of it -> what pip installs. The extras in `pyproject.toml` have the same
packages with their versions."""


def install(module: str) -> str:
    """The command that installs a module of `PACKAGES`, with quotes where shells such as zsh need them."""
    quoted = (f'"{package}"' if "[" in package else package for package in PACKAGES[module].split())
    return installing(" ".join(quoted))


def installing(packages: str) -> str:
    """The command that installs packages, given as pip takes them."""
    return f"`python -m pip install {packages}`"


def imported(module: str, need: str, instead: str = "") -> Any:
    """Import a module whose package is not always there.

    Args:
        module: Its name; the package is in `PACKAGES`.
        need: Who needs what, as in "Checkpoints need safetensors".
        instead: What else helps, as in "name an .npz file".

    Raises:
        ExecutionError: It is not installed, or cannot be imported.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        missing = problem.name in (module, package)
        reason = "is not installed" if missing else f"cannot be imported: {problem}"
        hint = f"Install it with {install(package)}{f', or {instead}' if instead else ''}."
        raise ExecutionError(f"{need}, which {reason}.", hint=hint) from None
