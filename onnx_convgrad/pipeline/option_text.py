"""Parse the options of the command line and of TOML files into arguments of the transformations.

Imports nothing slow: the options of every command refer to these functions.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from onnx_convgrad.base.limits import Limits
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.paths import name_of, opened, read_text
from onnx_convgrad.errors import ArgumentError

_GROUPS = ("parameters", "inputs", "all")


def names(values: Sequence[str]) -> list[str]:
    """Names and globs, repeated or separated by commas."""
    return [name for value in values for name in map(str.strip, value.split(",")) if name]


def whole(values: Sequence[str]) -> str | list[str]:
    """`--wrt` of commands that take no ranges of channels."""
    chosen = wrt(values)
    if isinstance(chosen, dict):
        raise ArgumentError("This command takes no ranges of channels in --wrt.", hint="Name whole values.")
    return chosen


def wrt(values: Sequence[str]) -> str | list[str] | dict[str, slice]:
    """`--wrt`: groups, names and globs, any of which may have a range of output channels: `layer3.*=0:16`."""
    chosen = names(values)
    ranges = [re.fullmatch(r"(.+)=(-?\d*):(-?\d*)", name) for name in chosen]
    if any(ranges):
        parts: dict[str, slice] = {}
        for name, found in zip(chosen, ranges, strict=True):
            bounds = [int(text) if text else None for text in found.groups()[1:]] if found else [None]
            parts[found[1] if found else name] = slice(*bounds)
        return parts
    return chosen[0] if len(chosen) == 1 and chosen[0] in _GROUPS else chosen


def _numbers(option: str, values: str) -> list[float]:
    """Numbers separated by commas."""
    try:
        return [float(part) for part in values.split(",")]
    except ValueError:
        raise ArgumentError(
            f"{option} {values!r} is not a list of numbers.", hint="For example: 0.5,0.5,0.5."
        ) from None


mean, std = partial(_numbers, "--mean"), partial(_numbers, "--std")


def image_size(text: str) -> tuple[int, int]:
    """`--image-size`: `224`, or `224x320`."""
    sizes = [size.strip() for size in text.lower().replace("x", ",").split(",")]
    if not all(size.isdecimal() for size in sizes) or len(sizes) > 2:
        raise ArgumentError(f"--image-size {text!r} is not H or HxW.", hint="For example --image-size 224, or 224x320.")
    return int(sizes[0]), int(sizes[-1])


def per_sample(gradients: bool, squared_norms: bool) -> bool | str:
    """`--per-sample` and `--squared-norm`; the second implies the first."""
    return "squared_norm" if squared_norms else gradients


def recompute(values: Sequence[str]) -> str | list[str]:
    """`--recompute`: `auto`, or names and globs."""
    chosen = names(values)
    if "auto" in chosen and len(chosen) > 1:
        raise ArgumentError("--recompute auto cannot be combined with names.", hint="Give one of the two.")
    return "auto" if chosen == ["auto"] else chosen


def lowering(values: Sequence[str]) -> str | dict[str, str]:
    """`--lowering`: `auto`, `exact`, `fast`, or OP=NAME and files of such pairs, repeated; later override earlier ones."""
    chosen: dict[str, str] = {}
    for word in ("exact", "fast"):
        if word in values:
            if set(values) != {word}:
                raise ArgumentError(
                    f"--lowering {word} cannot be combined with other lowerings.", hint="Give one of the two."
                )
            return word
    for value in values:
        key, equals, name = value.rpartition("=")
        if not equals and value == "auto":
            continue
        if not equals and value.endswith(".json"):
            chosen |= _lowerings_in(Path(value))
            continue
        if not key.strip() or not name.strip():
            raise ArgumentError(
                f"--lowering {value!r} is neither 'auto', 'exact' nor 'fast', nor OP=NAME or a .json file.",
                hint="For example: ConvWeightGrad=im2col_gemm.",
            )
        chosen[key.strip()] = name.strip()
    return chosen or "auto"


def _lowerings_in(path: Path) -> dict[str, str]:
    """Read a file that `bench --save-lowerings` wrote."""
    try:
        content = json.loads(read_text(path, _LONGEST))
    except ArgumentError:
        raise
    except (OSError, ValueError, RecursionError) as problem:
        reason = f"{problem}" if not isinstance(problem, OSError) else problem.strerror
        if isinstance(problem, json.JSONDecodeError):
            reason = f"it is not JSON: {problem}"
        raise ArgumentError(
            f"--lowering {str(path)!r} cannot be read: {reason}.",
            hint="Give a file that `bench --save-lowerings` wrote.",
        ) from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content.values()):
        raise ArgumentError(
            f"--lowering {str(path)!r} is not a map from operators and nodes to lowerings.",
            hint="`bench MODEL --save-lowerings FILE` writes one.",
        )
    return content


_LONGEST = 2**24
"""Most bytes of a file with lowerings."""

_UNITS = {"": 1, "B": 1, "K": 10**3, "KB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}


def memory_budget(text: str) -> int | float | str:
    """`--memory-budget`: a size, a share such as `0.5`, or `min`."""
    if text.strip() == "min":
        return "min"
    return _size_or_share(text, "--memory-budget", "2GB, 0.5 or min")


def weight_size(text: str) -> int | float:
    """`--size`: a size, or a share such as `0.2`."""
    return _size_or_share(text, "--size", "2MB or 0.2")


def _size_or_share(text: str, option: str, examples: str) -> int | float:
    try:
        return float(text) if 0 < float(text) <= 1 else int(text)
    except ValueError:
        return size_in_bytes(text, option, examples)


def size_in_bytes(text: str, option: str = "--max-workspace", examples: str = "256MB") -> int:
    """A number of bytes, optionally with a unit: `64MB`, `1.5GB`."""
    digits = text.strip().rstrip("BbKkMmGg")
    unit = text.strip()[len(digits) :].upper()
    try:
        return int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ArgumentError(f"{option} {text!r} is not a size.", hint=f"For example: {examples}.") from None


def limits(values: Sequence[str]) -> Limits:
    """`--limit NAME=N`, repeated."""
    names = [field.name for field in fields(Limits)]
    chosen = pairs("--limit", values, f"{names[0]}=1000000")
    check_names(list(chosen), names, "limit")
    return Limits(**_whole("--limit", chosen, f"{names[0]}=1000000"))


def input_shapes(values: Sequence[str]) -> dict[str, list[int | str | None]]:
    """`--input-shape NAME:1,3,224,224`; a size may be a symbol, and `?` leaves it free."""
    shapes: dict[str, list[int | str | None]] = {}
    for value in values:
        name, colon, sizes = value.rpartition(":")
        if not colon or not name:
            raise ArgumentError(f"--input-shape {value!r} is not of the form NAME:1,3,224,224.")
        if name in shapes:
            raise ArgumentError(f"--input-shape gives the shape of {name!r} twice.", hint="Give it once.")
        shapes[name] = [_size(size.strip(), value) for size in sizes.split(",")] if sizes.strip() else []
    return shapes


def states(values: Sequence[str]) -> dict[str, str]:
    """`--states INPUT=OUTPUT`."""
    return pairs("--states", values, "state=stateN")


def part_length(values: Sequence[str]) -> int | dict[str, int]:
    """`--part-length N`, or ARRAY=N for each array."""
    return _part("--part-length", values)


def part_past(values: Sequence[str]) -> int | dict[str, int]:
    """`--part-past N`, or ARRAY=N for some arrays."""
    return _part("--part-past", values)


def _part(option: str, values: Sequence[str]) -> int | dict[str, int]:
    if len(values) == 1 and values[0].isdecimal():
        return int(values[0])
    return _whole(option, pairs(option, values, "x=512"), "x=512")


def _whole(option: str, chosen: Mapping[str, str], example: str) -> dict[str, int]:
    """The numbers of an option that takes whole ones."""
    wrong = next((value for value in chosen.values() if not value.isdecimal()), None)
    if wrong is not None:
        raise ArgumentError(f"{option}: {wrong!r} is not a whole number.", hint=f"For example {option} {example}.")
    return {name: int(value) for name, value in chosen.items()}


def pairs(option: str, values: Sequence[str], example: str) -> dict[str, str]:
    """The entries NAME=VALUE of an option, such as `example`; raises `ArgumentError` for another form, or a name twice."""
    chosen: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals and text):
            raise ArgumentError(
                f"{option} {value!r} is not of the form NAME=VALUE.", hint=f"For example {option} {example}."
            )
        if name in chosen:
            raise ArgumentError(f"{option} gives {name!r} twice.", hint="Give it once.")
        chosen[name] = text
    return chosen


def input_values(values: Sequence[str]) -> dict[str, Any]:
    """`--input-value NAME=VALUE`: a number, `true`, `false`, numbers separated by commas, or `@FILE.npy`."""
    bound: dict[str, Any] = {}
    for name, written in pairs("--input-value", values, "sr=16000").items():
        if written.startswith("@"):
            bound[name] = _array_in(Path(written[1:]))
            continue
        parts = [_constant(part.strip(), f"{name}={written}") for part in written.removesuffix(",").split(",")]
        bound[name] = parts if "," in written else parts[0]
    return bound


def _constant(text: str, option: str) -> bool | int | float:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise ArgumentError(
        f"--input-value {option!r}: {text!r} is neither a number, 'true', 'false' nor @FILE.npy.",
        hint="For example --input-value training=false.",
    )


def _array_in(path: Path) -> Any:
    """Read an `.npy` file."""
    import numpy as np

    try:
        with opened(path) as file:
            return np.array(np.lib.format.open_memmap(name_of(file, path), mode="r"))
    except ArgumentError:
        raise
    except (OSError, ValueError, EOFError) as problem:
        raise ArgumentError(
            f"--input-value {str(path)!r} is not a readable .npy file: {problem}.", hint="Write it with numpy.save."
        ) from None


def _size(text: str, option: str) -> int | str | None:
    if text == "?":
        return None
    if text.isdecimal():
        return int(text)
    if text.isidentifier():
        return text
    raise ArgumentError(
        f"--input-shape {option!r}: {text!r} is neither a size, a name nor '?'.",
        hint="For example --input-shape x:1,3,224,224, or x:N,3,H,W.",
    )


def table(option: str, values: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, repeated: a number, true or false, several of them separated by commas, TOML, or else text."""
    chosen = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise ArgumentError(
                f"{option} {value!r} is not of the form KEY=VALUE.", hint=f"For example {option} NAME=0.5."
            )
        if key.strip() in chosen:
            raise ArgumentError(f"{option} gives {key.strip()!r} twice.", hint="Give it once.")
        parts = [text] if _toml(text) is not None else text.split(",")
        read = [part.strip() if _toml(part) is None else _toml(part) for part in parts]
        chosen[key.strip()] = read[0] if len(read) == 1 else read
    return chosen


def _toml(text: str) -> Any:
    """A value of TOML; `None` if it is none."""
    import tomllib

    written = text.strip().lower() if text.strip() in ("True", "False") else text.strip()
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return None
