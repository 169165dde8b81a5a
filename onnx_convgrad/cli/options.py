"""Command-line text to the arguments of the transformations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from onnx_convgrad.errors import ArgumentError

__all__ = ["chosen_lowering", "input_shapes", "names", "numbers", "of_names", "recomputed", "size_in_bytes"]

_GROUPS = ("parameters", "inputs", "all")


def names(values: Sequence[str], default: str) -> str | list[str]:
    """`--wrt`: a group, or names and globs, repeated or separated by commas."""
    found = [name for value in values for name in map(str.strip, value.split(",")) if name]
    if not found:
        return default
    if len(found) == 1 and found[0] in _GROUPS:
        return found[0]
    mixed = [name for name in found if name in _GROUPS]
    if mixed:
        raise ArgumentError(
            f"--wrt {mixed[0]} is a group and cannot be combined with names.", hint="Use 'all', or name every value."
        )
    return found


def of_names(values: Sequence[str]) -> list[str] | None:
    """`--of`: names and globs; nothing means every floating output."""
    return [name for value in values for name in map(str.strip, value.split(",")) if name] or None


def numbers(option: str, text: str | None) -> list[float] | None:
    """Numbers separated by commas."""
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{option} {text!r} is not a list of numbers.", hint="For example: 0.5,0.5,0.5.") from None


def recomputed(values: Sequence[str]) -> str | list[str]:
    """`--recompute`: `auto`, or names and globs, repeated or separated by commas."""
    found = of_names(values) or []
    if "auto" not in found:
        return found
    if len(found) > 1:
        raise ArgumentError("--recompute auto chooses by itself and cannot be combined with names.")
    return "auto"


def chosen_lowering(values: Sequence[str]) -> str | dict[str, str]:
    """`--lowering`: `auto`, `exact`, or OP=NAME and files of such pairs, repeated; the last word counts."""
    chosen: dict[str, str] = {}
    if "exact" in values:
        if set(values) != {"exact"}:
            raise ArgumentError("--lowering exact chooses by itself and cannot be combined with others.")
        return "exact"
    for value in values:
        key, equals, name = value.rpartition("=")
        if not equals and value == "auto":
            continue
        if not equals and value.endswith(".json"):
            chosen |= _lowerings_in(Path(value))
            continue
        if not key.strip() or not name.strip():
            raise ArgumentError(
                f"--lowering {value!r} is neither 'auto' nor 'exact', nor OP=NAME or a .json file.",
                hint="For example: ConvWeightGrad=im2col_gemm.",
            )
        chosen[key.strip()] = name.strip()
    return chosen or "auto"


def _lowerings_in(path: Path) -> dict[str, str]:
    """What `bench --save-lowerings` wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else f"it is not JSON: {problem}"
        raise ArgumentError(f"--lowering {str(path)!r} cannot be read: {reason}.") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ArgumentError(
            f"--lowering {str(path)!r} is not a map from operators and nodes to lowerings.",
            hint="`bench MODEL --save-lowerings FILE` writes one.",
        )
    return found


_UNITS = {"": 1, "B": 1, "K": 10**3, "KB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}


def size_in_bytes(text: str | None) -> int | None:
    """`--max-workspace`: a number of bytes, or with a unit: `64MB`, `1.5GB`."""
    if text is None:
        return None
    digits = text.strip().rstrip("BbKkMmGg")
    unit = text.strip()[len(digits) :].upper()
    try:
        count = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ArgumentError(f"--max-workspace {text!r} is not a size.", hint="For example: 256MB.") from None
    return count


def input_shapes(values: Sequence[str]) -> dict[str, list[int | str | None]] | None:
    """`--input-shape NAME:1,3,224,224`; a size may be a symbol, and `?` leaves it free."""
    shapes: dict[str, list[int | str | None]] = {}
    for value in values:
        name, colon, sizes = value.rpartition(":")
        if not colon or not name:
            raise ArgumentError(f"--input-shape {value!r} is not of the form NAME:1,3,224,224.")
        if name in shapes:
            raise ArgumentError(f"--input-shape gives the shape of {name!r} twice.")
        shapes[name] = [_size(size.strip(), value) for size in sizes.split(",")] if sizes.strip() else []
    return shapes or None


def _size(text: str, option: str) -> int | str | None:
    if text == "?":
        return None
    if text.isdecimal():
        return int(text)
    if text.isidentifier():
        return text
    raise ArgumentError(f"--input-shape {option!r}: {text!r} is neither a size, a name nor '?'.")
