"""Checkpoint files: arrays with JSON beside them, complete or not there at all, damage noticed, no pickle.

A checkpoint is one safetensors file; the JSON is in its header, with a digest of everything. One file, since one rename is
what a file system does at once: written beside its place under another name, flushed to the disk, then renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.errors import CheckpointError, ExecutionError

__all__ = ["FORMAT", "VERSION", "Checkpoint", "newest", "numbered", "numbered_name", "prune", "read", "write"]

FORMAT = "onnx_convgrad.checkpoint"
"""Key of the JSON in the file's header."""

VERSION = 1
"""Raised when a reader of the old form would misread the new one."""

_DIGEST = "onnx_convgrad.digest"
_NUMBERED = re.compile(r"step-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a file holds.

    Attributes:
        tensors: Arrays by name.
        info: JSON values.
    """

    tensors: Mapping[str, np.ndarray]
    info: Mapping[str, Any]


def library() -> Any:
    """The `safetensors` package; raises `ExecutionError` when it is not installed."""
    try:
        import safetensors.numpy
    except ImportError:
        raise ExecutionError(
            "safetensors, which checkpoints are written with, is not installed.",
            hint="Install it with `pip install onnx-convgrad[train]`.",
        ) from None
    return safetensors


# -- one file ----------------------------------------------------------------------------------------------------------


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; a file that is there is replaced once everything is on the disk.

    Raises:
        CheckpointError: It cannot be written.
        ExecutionError: safetensors is not installed.
    """
    safetensors = library()
    text = json.dumps({"version": VERSION, **checkpoint.info})
    arrays = {name: np.asarray(array, order="C") for name, array in checkpoint.tensors.items()}
    header = {FORMAT: text, _DIGEST: _digest(text, arrays)}
    draft = path.with_name(f".{path.name}.part")  # always the same name: what a killed run left is overwritten
    try:
        safetensors.numpy.save_file(arrays, draft, header)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
        _flush_folder(path.absolute().parent)
    except (OSError, safetensors.SafetensorError) as problem:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise CheckpointError(f"The checkpoint {str(path)!r} could not be written: {problem}.") from problem


def read(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: There is none, or it is damaged, of something else, or of a later version.
        ExecutionError: safetensors is not installed.
    """
    safetensors = library()
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {str(path)!r}.")
    try:
        with safetensors.safe_open(path, "numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, safetensors.SafetensorError) as problem:
        raise CheckpointError(
            f"{str(path)!r} is truncated, damaged or no safetensors file ({str(problem).rstrip('.')})."
        ) from problem
    if FORMAT not in header:
        raise CheckpointError(f"{str(path)!r} is a safetensors file, but not a checkpoint of a training run.")
    text = header[FORMAT]
    if header.get(_DIGEST) != _digest(text, arrays):
        raise CheckpointError(
            f"{str(path)!r} is damaged: its content does not have the digest that it was written with."
        )
    info = json.loads(text)
    if info["version"] != VERSION:
        raise CheckpointError(f"{str(path)!r} has version {info['version']}; this release reads version {VERSION}.")
    return Checkpoint(arrays, info)


def _digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        total.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _flush_folder(folder: Path) -> None:
    """Make a rename last; Windows does not open folders, and needs no such thing."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- a folder of them --------------------------------------------------------------------------------------------------


def numbered_name(steps: int) -> str:
    """Name of the checkpoint after so many steps."""
    return f"step-{steps:08d}.safetensors"


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """The numbered checkpoints of a folder by number of steps, the newest last."""
    found = ((_NUMBERED.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def newest(folder: Path, usable: Callable[[Path, Checkpoint], None]) -> tuple[Path, Checkpoint, list[CheckpointError]]:
    """The newest checkpoint that can be read and that `usable` does not refuse, and why newer ones were not taken.

    Raises:
        CheckpointError: There is none; with the reason for each.
    """
    problems = []
    for _, path in reversed(numbered(folder)):
        try:
            checkpoint = read(path)
            usable(path, checkpoint)
        except CheckpointError as problem:
            problems.append(problem)
        else:
            return path, checkpoint, problems
    if not problems:
        raise CheckpointError(f"The folder {str(folder)!r} holds no checkpoint.")
    reasons = " ".join(problem.message for problem in problems)
    raise CheckpointError(f"No checkpoint in {str(folder)!r} can be used. {reasons}")


def prune(folder: Path, keep: int, steps: int) -> None:
    """Delete all but the last `keep` of the numbered checkpoints up to `steps`."""
    for _, path in [entry for entry in numbered(folder) if entry[0] <= steps][:-keep]:
        path.unlink(missing_ok=True)
