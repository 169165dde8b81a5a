"""A trainer as a checkpoint, and back: all values, the progress, and what tells this program from another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import CheckpointError
from onnx_convgrad.training.optim.schedules import Schedule
from onnx_convgrad.training.program.manifest import Manifest
from onnx_convgrad.training.run import checkpoint
from onnx_convgrad.training.run.checkpoint import Checkpoint
from onnx_convgrad.training.run.progress import Progress

if TYPE_CHECKING:
    from onnx_convgrad.training.run.trainer import Trainer

__all__ = ["restore", "save"]


def save(trainer: Trainer, path: Path) -> Path:
    """See `Trainer.save`."""
    if path.is_dir():
        path /= checkpoint.numbered_name(trainer.progress.steps)
    if trainer.on_save is not None:
        trainer.on_save()
    entries = trainer.manifest.moving()
    info = {
        "progress": trainer.progress.to_json(),
        "optimizer": trainer.manifest.optimizer["name"],
        "schedule": _described(trainer),
        "seed": trainer.seed,
    }
    checkpoint.write(path, Checkpoint(trainer.engine.read(entry.name for entry in entries), info))
    return path


def restore(trainer: Trainer, path: Path) -> Path:
    """See `Trainer.restore`."""
    manifest = trainer.manifest
    if path.is_dir():
        path, found, problems = checkpoint.newest(path, lambda p, c: _check(c, manifest, p))
        for problem in problems:
            warn(f"{problem.message} Continuing from {path.name}.")
    else:
        found = checkpoint.read(path)
        _check(found, manifest, path)
    if found.info["schedule"] != _described(trainer):
        warn(
            f"The learning rate goes on by {_described(trainer)}; the checkpoint was made with {found.info['schedule']}."
        )
    trainer.engine.write(found.tensors)
    trainer.progress = Progress.from_json(found.info["progress"])
    trainer.seed, trainer.restored = found.info["seed"], True
    return path


def _described(trainer: Trainer) -> dict[str, Any]:
    schedule = trainer.schedule
    return schedule.options() if isinstance(schedule, Schedule) else {"name": getattr(schedule, "__qualname__", "?")}


def _check(found: Checkpoint, manifest: Manifest, path: Path) -> None:
    """Refuse the checkpoint of another program, with the first difference."""
    there = {name: (str(array.dtype), array.shape) for name, array in found.tensors.items()}
    here = {entry.name: (entry.dtype, entry.shape) for entry in manifest.moving()}
    lacking, unknown = [n for n in here if n not in there], [n for n in there if n not in here]
    changed = [n for n in here if n in there and here[n] != there[n]]
    reason = ""
    if found.info["optimizer"] != manifest.optimizer["name"]:
        reason = f"its optimizer is {found.info['optimizer']}, this program's is {manifest.optimizer['name']}"
    elif lacking or unknown:
        reason = f"it lacks {lacking[0]!r}" if lacking else f"it holds {unknown[0]!r}, which this program does not have"
    elif changed:
        name = changed[0]
        reason = f"{name!r} is {_typed(there[name])} there and {_typed(here[name])} here"
    if reason:
        raise CheckpointError(f"{str(path)!r} is of another program: {reason}.")


def _typed(entry: tuple[str, Any]) -> str:
    return f"{entry[0]}[{','.join(map(str, entry[1] or ()))}]"
