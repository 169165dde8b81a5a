"""Check numbers that a caller passes; the errors name the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.errors import ArgumentError


def positive(number: Any, name: str, *, zero: bool = True) -> None:
    """Raise `ArgumentError` unless `number` is finite and at least 0, or above 0 without `zero`."""
    try:
        value = None if isinstance(number, (str, bytes)) else float(number)
    except (TypeError, ValueError):
        value = None
    except OverflowError:
        value = math.inf
    if value is None:
        raise ArgumentError(f"{name} must be a number, not {number!r}.")
    if not 0 <= value < math.inf or not (zero or value):
        raise ArgumentError(f"{name} must be {'at least' if zero else 'above'} 0, not {number!r:.60}.")


def share(number: Any, name: str, *, zero: bool = True, one: bool = True) -> None:
    """Raise `ArgumentError` unless `number` is from 0 to 1; without `zero` it must be above 0, without `one` below 1."""
    positive(number, name, zero=zero)
    if not (number <= 1 if one else number < 1):
        raise ArgumentError(f"{name} must be {'between 0 and 1' if one else 'at least 0 and below 1'}, not {number!r}.")


def factors(values: Any, name: str) -> np.ndarray:
    """Return finite numbers as a float64 array, or raise `ArgumentError`."""
    try:
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        numbers = np.full(1, np.nan)
    if not np.isfinite(numbers).all():
        raise ArgumentError(f"{name} must be finite numbers, not {values!r}.")
    return numbers


def whole(number: Any, name: str, least: int = 1) -> int:
    """Return an integer of any type as an `int`; raise `ArgumentError` for other types and below `least`."""
    try:
        value = index(number)
    except TypeError:
        raise ArgumentError(f"{name} must be a whole number, not {number!r}.") from None
    if value < least:
        raise ArgumentError(f"{name} must be at least {least}, not {number!r:.60}.")
    if value >= 2**63:
        raise ArgumentError(f"{name} must be below 2**63, not {number!r:.60}.")
    return value


def flag(value: Any, name: str) -> bool:
    """Return a truth value as a `bool`; raise `ArgumentError` for anything but True, False, 1 and 0."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ArgumentError(f"{name} must be True or False, not {value!r}.")


Check = Callable[[Any, str], object]
"""A check of an option: takes its value and its name, and raises `ArgumentError`."""

above_zero = partial(positive, zero=False)
below_one = partial(share, one=False)
natural = partial(whole, least=0)


def check_fields(owner: Any) -> None:
    """Check the fields of a dataclass by the tables `checks` of its class and bases; `None` passes where its type has it."""
    optional = {f.name for f in fields(owner) if "None" in str(f.type)}
    for kind in type(owner).__mro__:
        for name, check in vars(kind).get("checks", {}).items():
            value = getattr(owner, name)
            if value is not None or name not in optional:
                check(value, name)


LARGEST = {"float16": 65504.0}
"""Largest number of a narrow type, where float32 numbers may be beyond it."""


def limited(array: ArrayLike, dtype: str) -> np.ndarray:
    """Numbers in a narrower type, at most its largest one."""
    largest = LARGEST.get(dtype)
    return np.asarray(array if largest is None else np.clip(array, -largest, largest), dtype)
