"""Numbers that a caller gives, refused by name where they make no sense."""

from __future__ import annotations

import math
from operator import index
from typing import Any, SupportsFloat, SupportsIndex

from onnx_convgrad.errors import ArgumentError

__all__ = ["positive", "whole"]


def positive(number: Any, name: str, *, zero: bool = True) -> None:
    """Refuse what is not a finite number of at least 0, or above it."""
    if not isinstance(number, SupportsFloat):
        raise ArgumentError(f"{name} must be a number, not {number!r}.")
    if not 0 <= float(number) < math.inf or not (zero or number):
        raise ArgumentError(f"{name} must be {'at least' if zero else 'above'} 0, not {number!r}.")


def whole(number: Any, name: str, least: int = 1) -> int:
    """A count, of any integer type; refuse others, and those below `least`."""
    if not isinstance(number, SupportsIndex):
        raise ArgumentError(f"{name} must be a whole number, not {number!r}.")
    if index(number) < least:
        raise ArgumentError(f"{name} must be at least {least}, not {number!r}.")
    return index(number)
