"""The folder of a training run: where it is, what is in it, and the command that continues it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_convgrad.base.paths import unnamed
from onnx_convgrad.cli.train_config import Config, is_inside, refuse_outside, spelled
from onnx_convgrad.cli.train_toml import draft_name, read_config
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.run_folder import CHECKPOINTS, CLASSES, CONFIG, PROGRAM


def new_folder(config: Config) -> Path:
    """The folder of a new run; raises `ArgumentError` if it holds something already."""
    if config.model is None:
        raise ArgumentError("There is no model to train.", hint="Name an ONNX file, or --resume the folder of a run.")
    folder = folder_of(config) if config.out else unnamed(folder_of(config), "--out")
    if (folder / CONFIG).exists():
        raise ArgumentError(
            f"{here(folder)!r} already holds a run.",
            hint=f"Continue it with `{resume_command(config, folder)}`, or give another --out.",
        )
    if folder.exists() and not started_only(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(f"{here(folder)!r} already exists and is not a run.", hint="Give another --out.")
    return folder


def check_outputs(config: Config, given: Mapping[str, Any], file: Path) -> None:
    """Refuse outputs outside the folder of the file that names them; those `given` on the command line may be anywhere."""
    folder = file.absolute().parent
    outputs = config.outside(folder)
    if not is_inside(folder_of(config), folder) and not {"out", "model"} & given.keys():
        outputs["out"] = str(folder_of(config))
    refuse_outside(file, {name: path for name, path in outputs.items() if name not in given}, "that file")


def folder_of(config: Config) -> Path:
    """The folder of a run."""
    model = Path(config.model or "")
    return Path(config.out) if config.out else model.with_name(f"{model.stem}.train")


def started_only(folder: Path) -> bool:
    """Whether a folder holds nothing but the start of a run that was killed before its first step."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    known = {draft_name(CONFIG), CHECKPOINTS, PROGRAM, CLASSES}
    return draft_name(CONFIG) in names and all(
        n in known or n.startswith((f".{PROGRAM}.", f".{CLASSES}.")) for n in names
    )


def stored_options(folder: Path) -> Config:
    """The options of the run in a folder; raises `ArgumentError` if there is none."""
    if started_only(folder):
        raise ArgumentError(
            f"The run in {str(folder)!r} was killed before its first step.",
            hint="Start it again, with the same command as before.",
        )
    if not (folder / CONFIG).is_file():
        raise ArgumentError(
            f"{str(folder)!r} is not the folder of a run: there is no {CONFIG}.",
            hint="Give the folder that `train` printed, which has this file.",
        )
    return Config.of(read_config(folder / CONFIG), CONFIG)


def checkpoints_in(folder: Path) -> Path:
    """The folder of its checkpoints."""
    return folder / CHECKPOINTS


def resume_command(config: Config, folder: Path) -> str:
    """The command that continues a run; it repeats the outputs outside of the folder, which `--resume` does not trust."""
    words = ["--resume", here(folder)]
    for name, path in config.outside(folder).items():
        words += [spelled(name), here(path)]
    return f"python -m onnx_convgrad train {shlex.join(words)}"


def here(path: Path | str) -> str:
    """Return a path relative to the current folder if it is inside."""
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def check_links(folder: Path) -> None:
    """Refuse the folder of a run with a link to a place outside, where resuming would write."""
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink() and not is_inside(path, folder):
                raise ArgumentError(
                    f"{str(path)!r} is a link to {os.path.realpath(path)!r}, outside the folder of the run.",
                    hint="Replace the link by what it links to.",
                )
