"""Check names that a caller passes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from onnx_convgrad.errors import ArgumentError


def as_names(names: object, what: str) -> list[str]:
    """Return one name, or several, as a list; raise `ArgumentError` for anything else."""
    if isinstance(names, str):
        return [names]
    try:
        several: list[Any] = list(names) if isinstance(names, Iterable) else [names]
    except TypeError:  # an array without axes
        several = [names]
    for name in several:
        if not isinstance(name, str):
            raise ArgumentError(f"{what} takes a name or several, not {names!r}.")
    return several


_SHOWN = 80
"""The most names that an error lists; a network has thousands."""


def check_names(names: Sequence[str], options: Sequence[str], what: str) -> None:
    """Raise `ArgumentError` with near matches for unknown names."""
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"A name of {what.rstrip(':')} must be text, not {name!r}.")
        if name not in options:
            near = difflib.get_close_matches(name, options, n=3)
            shown, rest = ", ".join(options[:_SHOWN]) or "none", len(options) - _SHOWN
            listed = f"There are: {shown}{f' and {rest} more' if rest > 0 else ''}."
            hint = f"Did you mean {', '.join(map(repr, near))}?" if near else listed
            raise ArgumentError(f"Unknown {what} {name!r}.", hint=hint)


def matching(globs: str | Iterable[str], names: Sequence[str], what: str) -> set[str]:
    """The names that match any glob; raises `ArgumentError` for a glob without a match."""
    matches: set[str] = set()
    for glob in as_names(globs, what.rstrip(":")):
        matched = {name for name in names if name == glob} or {name for name in names if fnmatchcase(name, glob)}
        if not matched:
            check_names([glob], names, what)
        matches |= matched
    return matches
