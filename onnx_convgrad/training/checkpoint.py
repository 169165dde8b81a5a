"""Save and restore trainers: arrays and JSON in one safetensors file, written atomically, without pickle.

The JSON is in the file's header, with a digest of the whole content that detects damage. A file is written under a
temporary name, flushed to the disk and renamed, so that it appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnx_convgrad.base.drafts import draft_of
from onnx_convgrad.base.forms import NATURAL, check_form, parse_json
from onnx_convgrad.base.optional import imported
from onnx_convgrad.base.paths import name_of, opened
from onnx_convgrad.base.warn import warn
from onnx_convgrad.data.inputs import fits
from onnx_convgrad.errors import CheckpointError, DivergenceError
from onnx_convgrad.metrics.progress import PROGRESS, Progress
from onnx_convgrad.programs.manifest import Manifest, Port
from onnx_convgrad.programs.optim.schedules import describe_schedule, first_rate
from onnx_convgrad.training.divergence import check_values
from onnx_convgrad.training.protocols import TrainerLike

FORMAT = "onnx_convgrad.checkpoint"
"""Key of the JSON in the file's header."""

VERSION = 1
"""Version of the format, incremented with incompatible changes."""

_FORM = {
    "progress": PROGRESS, "optimizer": str, "schedule": {"name": str, str: object}, "seed": NATURAL, str: object
}  # fmt: skip

_OF_CALLBACKS = "onnx_convgrad.callbacks/"
"""Start of the names of arrays that callbacks keep: then the callback's name, a slash, and the array's name."""

_OF_STREAMS = "onnx_convgrad.streams/"
"""Start of the names of states of streams: then the name of the input. Of several ranks, none are stored."""

_DIGEST = "onnx_convgrad.digest"
_OLDER = "Restore an older one: of a folder, the newest that is intact is taken."
_NUMBERED = re.compile(r"step-(\d+)\.safetensors")


class Checkpoint(NamedTuple):
    """The content of a checkpoint file: arrays by name, and JSON values."""

    tensors: Mapping[str, np.ndarray]
    info: Mapping[str, Any]


def library() -> Any:
    """Import the `safetensors` package; raises `ExecutionError` if it is not installed."""
    imported("safetensors.numpy", "Checkpoints need safetensors")
    import safetensors

    return safetensors


# -- one file ----------------------------------------------------------------------------------------------------------


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; an existing file is replaced once everything is on the disk.

    Raises:
        CheckpointError: It cannot be written.
        ExecutionError: safetensors is not installed.
    """
    safetensors = library()
    text = json.dumps({"version": VERSION, **checkpoint.info})
    arrays = {name: np.asarray(array, order="C") for name, array in checkpoint.tensors.items()}
    header = {FORMAT: text, _DIGEST: _digest(text, arrays)}
    try:
        with draft_of(
            path, flush=True
        ) as draft:  # safetensors has a draft of its own, which it puts into the same folder
            safetensors.numpy.save_file(arrays, draft, header)
    except (OSError, safetensors.SafetensorError) as problem:
        raise CheckpointError(
            f"The checkpoint {str(path)!r} could not be written: {problem}.",
            hint="Give another folder, where there is space and which may be written.",
        ) from problem


def read(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, not a checkpoint, or of a later version.
        ExecutionError: safetensors is not installed.
    """
    safetensors = library()
    if not path.is_file():
        raise CheckpointError(
            f"There is no checkpoint {str(path)!r}.",
            hint="Give a file that Trainer.save wrote, or the folder that holds it.",
        )
    try:
        with opened(path) as held, safetensors.safe_open(name_of(held, path), "numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except Exception as problem:  # whatever the library says of foreign bytes
        raise CheckpointError(
            f"{str(path)!r} is truncated, damaged or not a safetensors file ({str(problem).rstrip('.')}).", hint=_OLDER
        ) from problem
    if FORMAT not in header:
        raise CheckpointError(
            f"{str(path)!r} is a safetensors file, but not a checkpoint of a training run.",
            hint="Trainer.load takes arrays by name, such as those of this file.",
        )
    text = header[FORMAT]
    if header.get(_DIGEST) != _digest(text, arrays):
        raise CheckpointError(
            f"{str(path)!r} is damaged: its content does not match the digest in its header.", hint=_OLDER
        )
    try:
        info = parse_json(text, {"version": int, str: object})
        if info["version"] != VERSION:
            raise CheckpointError(
                f"{str(path)!r} has version {info['version']}; this release reads version {VERSION}.",
                hint="Restore it with the release of onnx_convgrad that saved it.",
            )
        if isinstance(info.get("progress"), dict):
            added: dict[str, Any] = {"learning_rate": None, "scheduled_from": 0, "collected": {}, "draws": []}
            info["progress"] = added | info["progress"]  # older files lack some of these
        check_form(info, _FORM)
    except ValueError as problem:
        raise CheckpointError(f"{str(path)!r} is damaged: in its header {problem}.", hint=_OLDER) from problem
    return Checkpoint(arrays, info)


def _digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        total.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


# -- a folder of them --------------------------------------------------------------------------------------------------


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """List the numbered checkpoints of a folder as (steps, path), the newest last."""
    matches = ((_NUMBERED.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def newest(folder: Path, check: Callable[[Path, Checkpoint], None]) -> tuple[Path, Checkpoint, list[CheckpointError]]:
    """Read the newest checkpoint that is intact and passes `check`; also return the errors of newer ones.

    Raises:
        CheckpointError: There is none; the message gives the reason for each file.
    """
    problems = []
    for _, path in reversed(numbered(folder)):
        try:
            checkpoint = read(path)
            check(path, checkpoint)
        except CheckpointError as problem:
            problems.append(problem)
        else:
            return path, checkpoint, problems
    if not problems:
        raise CheckpointError(
            f"The folder {str(folder)!r} holds no checkpoint.",
            hint="Give the folder that they were saved to, such as `checkpoints` in the folder of a run.",
        )
    reasons = " ".join(problem.message for problem in problems)
    raise CheckpointError(
        f"No checkpoint in {str(folder)!r} can be used. {reasons}",
        hint="Start anew, or restore a checkpoint of this program.",
    )


def prune(folder: Path, keep: int, steps: int) -> None:
    """Delete all but the last `keep` of the numbered checkpoints up to `steps`."""
    for _, path in [entry for entry in numbered(folder) if entry[0] <= steps][:-keep]:
        path.unlink(missing_ok=True)


# -- a trainer ---------------------------------------------------------------------------------------------------------


def save(trainer: TrainerLike, progress: Progress, path: Path) -> Path:
    """Write a checkpoint with this progress; see `Trainer.save`."""
    if path.is_dir():
        path /= f"step-{progress.steps:08d}.safetensors"
    info = {
        "progress": progress.to_json(),
        "optimizer": trainer.manifest.optimizer["name"],
        "schedule": describe_schedule(trainer.schedule),
        "seed": trainer.seed,
    }
    tensors = trainer.engine.to_save()
    check_values(tensors, trainer.engine, progress.steps)
    kept = progress.arrays.items()
    tensors |= {f"{_OF_CALLBACKS}{callback}/{n}": array for callback, arrays in kept for n, array in arrays.items()}
    if not trainer.ranks.several:
        tensors |= {f"{_OF_STREAMS}{name}": array for name, array in progress.states.items()}
    if trainer.ranks.leader:
        write(path, Checkpoint(tensors, info))
    return path


def restore(trainer: TrainerLike, path: Path) -> tuple[Path, Progress]:
    """Restore the values of a checkpoint, and return its progress; see `Trainer.restore`.

    Of several ranks, only the first reads it.
    """
    ranks = trainer.ranks
    path, state = _found(trainer, path) if ranks.leader else (path, Checkpoint({}, {}))
    name, info = ranks.of_leader([str(path), dict(state.info)])
    schedule = describe_schedule(trainer.schedule)
    if ranks.leader and info["schedule"] != schedule:
        warn(f"The learning rate now follows {schedule}; the checkpoint was made with {info['schedule']}.")
    own = _values(state)
    trainer.engine.restore(own, info["seed"])
    progress = Progress.from_json(info["progress"])
    progress.states = _stream_states(state, trainer.manifest)
    for key in (key for key in state.tensors if key.startswith(_OF_CALLBACKS)):
        callback, _, array = key.removeprefix(_OF_CALLBACKS).partition("/")
        progress.arrays.setdefault(callback, {})[array] = state.tensors[key]
    if first_rate(info["schedule"]) != first_rate(schedule):
        progress.scheduled_from = progress.epoch  # epochs at other rates say nothing about this schedule
    return Path(name), progress if ranks.leader else replace(progress, collected={})  # rank 0 has those of all


def _found(trainer: TrainerLike, path: Path) -> tuple[Path, Checkpoint]:
    """Read a checkpoint, or the newest usable one of a folder."""
    if path.is_dir():
        path, state, problems = newest(path, lambda p, c: _check(c, trainer, p))
        for problem in problems:
            warn(f"{problem.message} Continuing from {path.name}.")
    else:
        state = read(path)
        _check(state, trainer, path)
    return path, state


def _check(state: Checkpoint, trainer: TrainerLike, path: Path) -> None:
    """Refuse the checkpoint of another program, naming the first difference, or of a run that had diverged."""
    manifest = trainer.manifest
    stored = {name: _typed(array.dtype, array.shape) for name, array in _values(state).items()}
    wanted = {entry.name: _typed(entry.dtype, entry.shape) for entry in manifest.moving()}
    wanted |= {n: _typed(p.dtype, p.shape) for n, p in _frozen(state, trainer).items()}
    missing, unknown = [n for n in wanted if n not in stored], [n for n in stored if n not in wanted]
    changed = next((n for n in wanted if n in stored and wanted[n] != stored[n]), None)
    if state.info["optimizer"] != manifest.optimizer["name"]:
        reason = f"its optimizer is {state.info['optimizer']}, this program's is {manifest.optimizer['name']}"
    elif missing:
        reason = f"it has no {missing[0]!r}"
    elif unknown:
        reason = f"it has {unknown[0]!r}, which this program does not have"
    elif changed is not None:
        reason = f"{changed!r} is {stored[changed]} there and {wanted[changed]} here"
    else:
        try:
            check_values(_values(state), trainer.engine, state.info["progress"]["steps"])
        except DivergenceError as problem:
            raise CheckpointError(
                f"{str(path)!r} is of a run that had diverged: {problem.message}", hint=_OLDER
            ) from None
        return
    raise CheckpointError(
        f"{str(path)!r} is of another program: {reason}.",
        hint="Restore it into the program that it was saved with, or start anew.",
    )


def _stream_states(state: Checkpoint, manifest: Manifest) -> dict[str, np.ndarray]:
    """The states of streams that a checkpoint has, as far as the program takes them."""
    found = {}
    for port in (port for port in manifest.data if port.name in manifest.states):
        array = state.tensors.get(f"{_OF_STREAMS}{port.name}")
        if array is None:
            continue
        if str(array.dtype) != port.dtype or not fits(array.shape, array.shape if port.shape is None else port.shape):
            warn(
                f"The checkpoint has the state {port.name!r} as {_typed(array.dtype, array.shape)}, and the program takes "
                f"{_typed(port.dtype, port.shape)}: streams begin with zeros."
            )
            return {}
        found[port.name] = array
    return found


def _values(state: Checkpoint) -> dict[str, np.ndarray]:
    """The values of the program, without what callbacks and streams keep."""
    return {name: a for name, a in state.tensors.items() if not name.startswith((_OF_CALLBACKS, _OF_STREAMS))}


def _frozen(state: Checkpoint, trainer: TrainerLike) -> Mapping[str, Port]:
    """The frozen weights that a checkpoint has, because they had been replaced."""
    if not set(state.tensors) & set(trainer.manifest.frozen):
        return {}
    return {name: port for name, port in trainer.program.frozen().items() if name in state.tensors}


def _typed(dtype: np.dtype[Any] | str, shape: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape or ()))}]"
