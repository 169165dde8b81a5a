"""Read the options of a training run from a TOML file, and write them to the folder of the run."""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from onnx_convgrad.base.paths import check_regular, read_text
from onnx_convgrad.cli.train_config import Config, checked_options, dashed, share_of
from onnx_convgrad.errors import ArgumentError

_PATHS = ("model", "teacher", "labels", "out", "plot", "log", "tensorboard")
"""Options that are paths."""

_LONGEST = 2**20
"""Most bytes of a file with options; one of this length has a thousand times too many."""


def read_config(path: Path) -> dict[str, Any]:
    """Read the options in a TOML file, with paths made absolute.

    Raises:
        ArgumentError: It cannot be read, has an unknown key, or a value of the wrong kind.
    """
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
    return with_paths(values, partial(_joined, folder))


def with_paths(values: Mapping[str, Any], changed: Callable[[str], str]) -> dict[str, Any]:
    """Replace the paths in options by what a function makes of each."""
    fixed = dict(values)
    for name in _PATHS:
        if fixed.get(name) is not None:
            fixed[name] = changed(str(fixed[name]))
    for name in ("data", "validation"):
        if fixed.get(name) is not None:
            fixed[name] = tuple(_data_path(changed, entry) for entry in fixed[name])
    if fixed.get("lowering") is not None:
        fixed["lowering"] = tuple(changed(v) if v.endswith(".json") else v for v in fixed["lowering"])
    if fixed.get("input_value") is not None:
        fixed["input_value"] = tuple(_value_path(changed, entry) for entry in fixed["input_value"])
    return fixed


def _joined(folder: Path, path: str) -> str:
    return os.path.normpath(folder / Path(path).expanduser())


def _data_path(changed: Callable[[str], str], entry: str) -> str:
    """Change the path in `PATH` or `NAME=PATH`; a share is left alone."""
    if share_of(entry) is not None:
        return entry
    name, equals, path = entry.rpartition("=")
    return f"{name}{equals}{changed(path)}"


def _value_path(changed: Callable[[str], str], entry: str) -> str:
    """Change the path in `NAME=@PATH`."""
    name, at, path = entry.partition("=@")
    return f"{name}{at}{changed(path)}" if at else entry


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
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_quoted(k)} = {_toml(v)}' for k, v in value.items())}}}"
    return repr(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
