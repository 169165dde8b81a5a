"""Numbers that a caller gives, refused by name where they make no sense."""

from __future__ import annotations

import math
from operator import index
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np

from onnx_convgrad.errors import ArgumentError

__all__ = ["factors", "positive", "share", "whole"]


def positive(number: Any, name: str, *, zero: bool = True) -> None:
    """Refuse what is not a finite number of at least 0, or above it."""
    if not isinstance(number, SupportsFloat):
        raise ArgumentError(f"{name} must be a number, not {number!r}.")
    if not 0 <= float(number) < math.inf or not (zero or number):
        raise ArgumentError(f"{name} must be {'at least' if zero else 'above'} 0, not {number!r}.")


def share(number: Any, name: str, *, one: bool = True) -> None:
    """Refuse what is not a number from 0 to 1, or below 1."""
    positive(number, name)
    if not (number <= 1 if one else number < 1):
        raise ArgumentError(f"{name} must be {'between 0 and 1' if one else 'at least 0 and below 1'}, not {number!r}.")


def factors(given: Any, name: str) -> np.ndarray:
    """Finite numbers, in float64."""
    try:
        numbers = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        numbers = np.full(1, np.nan)
    if not np.isfinite(numbers).all():
        raise ArgumentError(f"{name} must be finite numbers, not {given!r}.")
    return numbers


def whole(number: Any, name: str, least: int = 1) -> int:
    """A count, of any integer type; refuse others, and those below `least`."""
    if not isinstance(number, SupportsIndex):
        raise ArgumentError(f"{name} must be a whole number, not {number!r}.")
    if index(number) < least:
        raise ArgumentError(f"{name} must be at least {least}, not {number!r}.")
    return index(number)
