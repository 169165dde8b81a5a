"""The options of a training run: from a TOML file, from the command line, and back into the folder of the run."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from onnx_convgrad.base.names import check_names
from onnx_convgrad.errors import ArgumentError

__all__ = ["Config", "option", "read_config", "write_config"]

Names = tuple[str, ...]
Numbers = tuple[float, ...]
Table = Mapping[str, Any]


_CHANGEABLE = frozenset(
    (
        "data map lr schedule schedule_options warmup epochs metric patience "
        "checkpoint_every keep plot log tensorboard providers threads"
    ).split()
)
"""What may be another when a run is resumed."""

_COUNTS = ("epochs", "batch_size", "accumulate", "keep", "patience", "checkpoint_every", "threads", "resize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What `train` is asked for. A key in TOML, and an option, is the name with dashes; `None` means a default.

    Relative paths in a TOML file are relative to its folder.
    """

    model: str | None = None
    data: Names = ()
    validation: Names = ()
    map: Names = ()
    loss: Names = ()
    loss_options: Table = field(default_factory=dict)
    optimizer: str = "adamw"
    optimizer_options: Table = field(default_factory=dict)
    lr: float = 1e-3
    momentum: float | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    schedule: str = "constant"
    schedule_options: Table = field(default_factory=dict)
    warmup: int = 0
    epochs: int = 10
    batch_size: int | None = None
    accumulate: int = 1
    shuffle: bool = True
    wrt: Names = ()
    freeze: Names = ()
    freeze_statistics: bool = False
    precision: str = "float32"
    seed: int = 0
    metric: Names = ()
    patience: int | None = None
    out: str | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    plot: str | None = None
    log: str | None = None
    tensorboard: str | None = None
    providers: Names = ()
    threads: int | None = None
    target: str | None = None
    input_shape: Names = ()
    image_size: Names = ()
    resize: int | None = None
    mean: Numbers = ()
    std: Numbers = ()

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{option(name)} must be at least 1, not {value}.")
        for name in ("seed", "warmup"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{option(name)} must be at least 0, not {getattr(self, name)}.")

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Config:
        """Options by key.

        Args:
            given: Key -> value, with dashes or underscores; `None` counts as not given.
            where: Of what file or command, for messages.

        Raises:
            ArgumentError: An unknown key, or a value of the wrong kind.
        """
        return cls(**_checked(given, where))

    def changed(self, given: Mapping[str, Any], where: str) -> Config:
        """These options, with others in place of some; arguments and errors as for `of`."""
        return replace(self, **_checked(given, where))

    def continued(self, given: Mapping[str, Any], folder: Path) -> Config:
        """The options of a run that is resumed with others in place of some.

        Raises:
            ArgumentError: As for `of`, or one that the run's program or order of samples hangs on is changed.
        """
        following = self.changed(given, "the command line")
        for f in fields(self):
            before, after = getattr(self, f.name), getattr(following, f.name)
            if before != after and f.name not in _CHANGEABLE:
                raise ArgumentError(
                    f"{option(f.name)} cannot change while the run goes on: in {str(folder)!r} it is {_shown(before)}, "
                    f"not {_shown(after)}.",
                    hint="Begin a new run with another --out.",
                )
        return following


_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "str": ("text", (str,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "Names": ("text, or a list of texts", (str, int, float)),
    "Numbers": ("a number, or a list of numbers", (int, float)),
    "Table": ("a table", (dict,)),
}

_PATHS = ("model", "out", "plot", "log", "tensorboard")


def option(name: str) -> str:
    """The command-line option of a field."""
    return "MODEL" if name == "model" else f"--{_key(name)}"


def _key(name: str) -> str:
    return name.replace("_", "-")


def _checked(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    kinds = {f.name: str(f.type).removesuffix(" | None") for f in fields(Config)}
    values = {key.replace("-", "_"): value for key, value in given.items() if value is not None}
    unknown = [_key(name) for name in values if name not in kinds]
    check_names(unknown, [_key(name) for name in kinds], f"key in {where}:")
    return {name: _value(name, value, kinds[name], where) for name, value in values.items()}


def _value(name: str, value: Any, kind: str, where: str) -> Any:
    said, types = _KINDS[kind]
    entries = value if kind in ("Names", "Numbers") and isinstance(value, (list, tuple)) else [value]
    if name == "map" and isinstance(value, dict):
        entries = [f"{port}={array}" for port, array in value.items()]
    for entry in entries:
        if not isinstance(entry, types) or (isinstance(entry, bool) and kind != "bool"):
            raise ArgumentError(f"{_key(name)!r} in {where} must be {said}, not {entry!r}.")
    if kind in ("Names", "Numbers"):
        return tuple(str(entry) if kind == "Names" else float(entry) for entry in entries)
    return float(value) if kind == "float" else value


# -- files -------------------------------------------------------------------------------------------------------------


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, with paths made absolute.

    Raises:
        ArgumentError: It cannot be read, has an unknown key, or a value of the wrong kind.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ArgumentError(f"There is no file {str(path)!r}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ArgumentError(f"{str(path)!r} could not be read as TOML: {problem}.") from problem
    return absolute(_checked(found, path.name), path.absolute().parent)


def absolute(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The same with paths that do not depend on where the program runs."""
    fixed = dict(values)
    for name in _PATHS:
        if fixed.get(name) is not None:
            fixed[name] = _joined(folder, str(fixed[name]))
    for name in ("data", "validation"):
        if fixed.get(name) is not None:
            fixed[name] = tuple(_data_path(folder, entry) for entry in fixed[name])
    return fixed


def _joined(folder: Path, path: str) -> str:
    return os.path.normpath(folder / Path(path).expanduser())


def _data_path(folder: Path, entry: str) -> str:
    """`PATH`, or `NAME=PATH`, or a share."""
    if share_of(entry) is not None:
        return entry
    name, equals, path = entry.rpartition("=")
    return f"{name}{equals}{_joined(folder, path)}"


def share_of(entry: str) -> float | None:
    """The number that `--validation 0.1` is; `None` for a path."""
    try:
        return float(entry)
    except ValueError:
        return None


def write_config(config: Config, path: Path) -> None:
    """Write all options that are not at "nothing given", so that the file alone says the whole run; atomically."""
    plain = {_key(f.name): getattr(config, f.name) for f in fields(config)}
    tables = {key: value for key, value in plain.items() if isinstance(value, Mapping) and value}
    lines = [f"{key} = {_toml(value)}" for key, value in plain.items()
             if value is not None and value != () and not isinstance(value, Mapping)]  # fmt: skip
    for key, table in tables.items():
        lines += ["", f"[{key}]", *(f"{_quoted(name)} = {_toml(value)}" for name, value in table.items())]
    draft = path.with_name(f".{path.name}.part")
    draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
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


def _shown(value: Any) -> str:
    return (
        "not given"
        if value in (None, (), {})
        else ", ".join(map(str, value))
        if isinstance(value, tuple)
        else str(value)
    )
