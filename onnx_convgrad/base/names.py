"""Names that a caller gives: one or several, each of those that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from onnx_convgrad.errors import ArgumentError

__all__ = ["as_names", "check_names"]


def as_names(given: object, what: str) -> list[str]:
    """One name, or several, as a list; raises `ArgumentError` for anything else."""
    if isinstance(given, str):
        return [given]
    names: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"{what} takes a name or several, not {given!r}.")
    return names


_SHOWN = 80
"""Most names that an error lists: a network has thousands."""


def check_names(names: Sequence[str], options: Sequence[str], what: str) -> None:
    """Raise `ArgumentError` with near matches for unknown names."""
    for name in names:
        if name not in options:
            near = difflib.get_close_matches(name, options, n=3)
            shown, rest = ", ".join(options[:_SHOWN]) or "none", len(options) - _SHOWN
            listed = f"There are: {shown}{f' and {rest} more' if rest > 0 else ''}."
            hint = f"Did you mean {', '.join(map(repr, near))}?" if near else listed
            raise ArgumentError(f"Unknown {what} {name!r}.", hint=hint)
