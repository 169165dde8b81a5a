"""Check numbers that a caller passes; the errors name the argument."""

from __future__ import annotations

import math
from operator import index
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np

from onnx_convgrad.errors import ArgumentError


def positive(number: Any, name: str, *, zero: bool = True) -> None:
    """Raise `ArgumentError` unless `number` is finite and at least 0, or above 0 without `zero`."""
    if not isinstance(number, SupportsFloat):
        raise ArgumentError(f"{name} must be a number, not {number!r}.")
    if not 0 <= float(number) < math.inf or not (zero or number):
        raise ArgumentError(f"{name} must be {'at least' if zero else 'above'} 0, not {number!r}.")


def share(number: Any, name: str, *, one: bool = True) -> None:
    """Raise `ArgumentError` unless `number` is between 0 and 1, or below 1 without `one`."""
    positive(number, name)
    if not (number <= 1 if one else number < 1):
        raise ArgumentError(f"{name} must be {'between 0 and 1' if one else 'at least 0 and below 1'}, not {number!r}.")


def factors(values: Any, name: str) -> np.ndarray:
    """Return finite numbers as a float64 array, or raise `ArgumentError`."""
    try:
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        numbers = np.full(1, np.nan)
    if not np.isfinite(numbers).all():
        raise ArgumentError(f"{name} must be finite numbers, not {values!r}.")
    return numbers


def whole(number: Any, name: str, least: int = 1) -> int:
    """Return an integer of any type as an `int`; raise `ArgumentError` for other types and below `least`."""
    if not isinstance(number, SupportsIndex):
        raise ArgumentError(f"{name} must be a whole number, not {number!r}.")
    if index(number) < least:
        raise ArgumentError(f"{name} must be at least {least}, not {number!r}.")
    return index(number)
