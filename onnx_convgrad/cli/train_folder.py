"""The folder of a training run: where it is, what is in it, its options as TOML, and the command that continues it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from onnx_convgrad.base.paths import check_regular, read_text, unnamed
from onnx_convgrad.cli.train_config import Config, checked_options, dashed, is_inside, refuse_outside, share_of, spelled
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.run_folder import CHECKPOINTS, CLASSES, CONFIG, PROGRAM

_PATHS = ("model", "teacher", "labels", "out", "plot", "log", "tensorboard")
"""Options that are paths."""

_LONGEST = 2**20
"""Most bytes of a file with options; one of this length has a thousand times too many."""


def read_config(path: Path) -> dict[str, Any]:
    """Read the options in a TOML file, with paths made absolute."""
    check_regular(path)
    try:
        content = tomllib.loads(read_text(path, _LONGEST))
    except ArgumentError:
        raise
    except (OSError, ValueError, RecursionError) as problem:
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else f"{problem}".rstrip(".")
        raise ArgumentError(
            f"{str(path)!r} could not be read as TOML: {reason}.",
            hint="A line is NAME = VALUE, with texts in double quotes.",
        ) from problem
    return absolute(checked_options(content, path.name), path.absolute().parent)


def absolute(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make paths absolute, which otherwise depend on the folder where the program runs."""
    return with_paths(values, lambda path: os.path.normpath(folder / Path(path).expanduser()))


def with_paths(values: Mapping[str, Any], changed: Callable[[str], str]) -> dict[str, Any]:
    """Replace the paths in options by what a function makes of each."""

    def of_data(entry: str) -> str:  # PATH or NAME=PATH; a share has none
        name, equals, path = entry.rpartition("=")
        return entry if share_of(entry) is not None else f"{name}{equals}{changed(path)}"

    def of_lowering(entry: str) -> str:
        return changed(entry) if entry.endswith(".json") else entry

    def of_value(entry: str) -> str:  # NAME=@PATH
        name, at, path = entry.partition("=@")
        return f"{name}{at}{changed(path)}" if at else entry

    fixed = {name: value for name, value in values.items() if value is not None}
    fixed |= {name: changed(str(fixed[name])) for name in _PATHS if name in fixed}
    several = {"data": of_data, "validation": of_data, "lowering": of_lowering, "input_value": of_value}
    return {**values, **fixed, **{name: tuple(map(of, fixed[name])) for name, of in several.items() if name in fixed}}


def draft_name(name: str) -> str:
    """The name under which the options are written at first."""
    return f".{name}.part"


@contextlib.contextmanager
def written_config(config: Config, path: Path) -> Iterator[None]:
    """Write all options that have a value; the file alone repeats the run. It gets its name after the block."""
    plain = {dashed(f.name): getattr(config, f.name) for f in fields(config)}
    tables = {key: value for key, value in plain.items() if isinstance(value, Mapping) and value}
    lines = [f"{key} = {_toml(value)}" for key, value in plain.items()
             if value is not None and value != () and not isinstance(value, Mapping)]  # fmt: skip
    for key, table in tables.items():
        lines += ["", f"[{key}]", *(f"{_quoted(name)} = {_toml(value)}" for name, value in table.items())]
    draft = path.with_name(draft_name(path.name))
    draft.unlink(missing_ok=True)  # it may be a link to something else
    draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
    yield
    draft.replace(path)


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_quoted(k)} = {_toml(v)}' for k, v in value.items())}}}"
    return _quoted(value) if isinstance(value, str) else f"{value}".lower()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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
