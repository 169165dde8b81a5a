"""Check names that a caller passes, and find what names and globs mean.

A pattern means what has exactly that name. If nothing has, it is a glob: `*` stands for any text, dots and slashes included,
`?` for one character, `[ab]` for one of several, and upper and lower case differ. `[[]` stands for a bracket.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from onnx_convgrad.errors import ArgumentError, first_few

T = TypeVar("T")

INSPECT = "`python -m onnx_convgrad inspect MODEL` lists the names."
"""The hint of errors about unknown names: the command that lists the values of a model."""


def as_names(names: object, what: str) -> list[str]:
    """Return one name, or several, as a list; raise `ArgumentError` for anything else, also for a mapping."""
    if isinstance(names, str):
        return [names]
    if isinstance(names, Mapping):
        raise ArgumentError(f"{what} takes a name or several, not {names!r}.")
    try:
        several: list[Any] = list(names) if isinstance(names, Iterable) else [names]
    except TypeError:  # an array without axes
        several = [names]
    for name in several:
        if not isinstance(name, str):
            raise ArgumentError(f"{what} takes a name or several, not {names!r}.")
    return several


# -- unknown names -----------------------------------------------------------------------------------------------------

_SHOWN = 80
"""The most names that an error lists; a network has thousands."""

_SHOWN_OF_MODEL = 10
"""The most names of values that an error lists, if it says where all are listed."""


def check_names(names: Sequence[str], options: Iterable[str], what: str, see: str = "") -> None:
    """Raise `ArgumentError` with near matches for unknown names; `see` says where all names are listed."""
    known = list(options)
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"A name of {what.rstrip(':')} must be text, not {name!r}.", hint=_listed(known, see))
        if name not in known:
            raise unknown(name, known, what, see)


def one_of(*options: str) -> Callable[[Any, str], None]:
    """The check of an option that is one of some names."""
    return lambda value, name: check_names([value], options, name)


def unknown(name: str, options: Sequence[str], what: str, see: str = "", globs: Sequence[str] = ()) -> ArgumentError:
    """The error for an unknown name: near matches among the options and `globs`, or else the options."""
    near = near_matches(name, [*options, *globs])
    hint = f"Did you mean {', '.join(map(repr, near))}? {see}".strip() if near else _listed(options, see)
    remark = ", a glob that matches nothing" if is_glob(name) else ""
    return ArgumentError(f"Unknown {what} {name!r}{remark}.", hint=hint)


def _listed(options: Sequence[str], see: str) -> str:
    """A sentence with the first options, and `see`."""
    most = _SHOWN_OF_MODEL if see else _SHOWN
    rest = len(options) - most
    return f"There are: {', '.join(options[:most]) or 'none'}{f' and {rest} more' if rest > 0 else ''}. {see}".strip()


_SHORTEST = 3
"""Shortest name for which names that contain it are suggested; a shorter one is part of too many."""


def near_matches(name: str, options: Iterable[str]) -> list[str]:
    """The options that a misspelt name may stand for, at most three: equal but for case and `_`, similar, or longer."""
    known, wanted = list(dict.fromkeys(options)), name.lower()
    equal = [option for option in known if option.lower().replace("_", "") == wanted.replace("_", "")]
    similar = difflib.get_close_matches(name, known, n=3)
    longer = [option for option in known if wanted in option.lower()] if len(name) >= _SHORTEST else []
    return list(dict.fromkeys([*equal, *similar, *longer]))[:3]


# -- globs -------------------------------------------------------------------------------------------------------------


def is_glob(pattern: str) -> bool:
    """Whether a pattern may match other names than itself."""
    return bool(re.search(r"[*?[]", pattern))


def matches(pattern: str, name: str) -> bool:
    """Whether a name is the pattern, or matches it as a glob."""
    return name == pattern or (is_glob(pattern) and fnmatchcase(name, pattern))


def literal(name: str) -> str:
    """The glob that matches one name alone."""
    return re.sub(r"([*?[])", r"[\1]", name)


def select(
    patterns: object, *tiers: Mapping[str, Iterable[T]], what: str, see: str = "", words: Sequence[str] = ()
) -> list[T]:
    """The members that names and globs select, each once.

    Args:
        patterns: A name or glob, or several.
        tiers: Name -> what it means. An exact name counts in every tier; a glob means all its matches in the first tier
            that has any.
        what: Completes the message "Unknown ... 'name'", such as `"value in wrt:"`.
        see: The place where all names are listed.
        words: Other words that the caller could have written, for near matches.

    Raises:
        ArgumentError: A pattern is not text, or selects nothing; with near matches.
    """
    chosen: dict[T, None] = {}
    for pattern in as_names(patterns, what.rpartition(" in ")[2].rstrip(":")):
        exact = [tier[pattern] for tier in tiers if pattern in tier][:1]
        globbed = ([members for name, members in tier.items() if matches(pattern, name)] for tier in tiers)
        found = exact or next(filter(None, globbed), [])
        if not found:
            names = list(dict.fromkeys(name for tier in tiers for name in tier))
            globs = [glob for glob in globs_of(names) if is_glob(pattern) or not glob.startswith("*")]
            raise unknown(pattern, names, what, see, [*words, *globs])
        chosen.update(dict.fromkeys(member for members in found for member in members))
    return list(chosen)


def select_able(
    patterns: object,
    names: Mapping[T, Sequence[str]],
    obstacle: Callable[[T], str],
    *,
    what: str,
    refusal: str,
    hint: str,
) -> list[T]:
    """The members that names and globs select and that have no obstacle; globs leave others out silently.

    Args:
        patterns: A name or glob, or several.
        names: Member -> the names by which it can be selected.
        obstacle: Says why a member cannot be selected; nothing if it can.
        what: As for `select`.
        refusal: Begins the message about members that cannot be selected.
        hint: Its remedy.

    Raises:
        ArgumentError: A pattern selects nothing, a member named in full has an obstacle, or all have one.
    """
    patterns = as_names(patterns, what.rpartition(" in ")[2].rstrip(":"))
    matched = set(select(patterns, {name: [name] for several in names.values() for name in several}, what=what))
    reasons = {member: obstacle(member) for member, own in names.items() if matched.intersection(own)}
    refused = {m: f"{next(iter(names[m]), '')!r}, because {reason}" for m, reason in reasons.items() if reason}
    named = [text for member, text in refused.items() if set(patterns).intersection(names[member])]
    if named or len(refused) == len(reasons):
        raise ArgumentError(f"{refusal} {first_few(named or list(refused.values()))}.", hint=hint)
    return [member for member in reasons if member not in refused]


def globs_of(names: Iterable[str]) -> list[str]:
    """Globs for the parts of a tree of names with dots and slashes: `layer4.*`, `layer4.0.*`, `*.bias`."""
    globs: dict[str, None] = {}
    for name in names:
        ends = [found.end() for found in re.finditer(r"[./]", name) if found.start()]
        globs.update(dict.fromkeys(f"{literal(name[:end])}*" for end in ends))
        if ends:
            globs[f"*{literal(name[ends[-1] - 1 :])}"] = None
    return list(globs)
