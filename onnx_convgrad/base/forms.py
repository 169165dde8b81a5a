"""Check what a file holds, such as JSON, against a description of its form.

A form is a type (`float` takes integers too, `object` anything), `None`, an `Is`, a tuple of alternatives, a list with the
form of every member (and `...` if there must be one), or a mapping from keys to forms, in which the key `str` stands for
all others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST = 2**63


@dataclass(frozen=True, slots=True)
class Is:
    """A form: a value that passes a test; `text` says what it must be."""

    text: str
    test: Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST


NATURAL = Is("a whole number, at least 0", lambda value: _whole(value) and value >= 0)
NUMBER = Is("a finite number", lambda value: (_whole(value) or isinstance(value, float)) and math.isfinite(value))
NAME = Is("a name", lambda value: isinstance(value, str) and bool(value))

_TYPES = {
    bool: Is("true or false", lambda value: isinstance(value, bool)),
    int: Is("a whole number of 64 bits", _whole),
    float: Is("a number", lambda value: _whole(value) or isinstance(value, float)),
    str: Is("text", lambda value: isinstance(value, str)),
    dict: Is("a map", lambda value: isinstance(value, dict)),
    list: Is("a list", lambda value: isinstance(value, list)),
    None: Is("null", lambda value: value is None),
    object: Is("anything", lambda _: True),
}


def parse_json(text: str | bytes, form: Any) -> Any:
    """Read JSON of a form; raises ValueError, which says what is wrong, also for what is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_form(value, form)
    return value


def finite(value: Any) -> Any:
    """A value as JSON has it: lists for tuples, and null for infinity and NaN, also inside of it."""
    if isinstance(value, Mapping):
        return {key: finite(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_form(value: Any, form: Any) -> None:
    """Raise ValueError, which says what is wrong and where, unless a value has a form."""
    for problem in _problems(value, form, ""):
        raise ValueError(problem)


def _problems(value: Any, form: Any, where: str) -> Iterator[str]:
    if isinstance(form, Mapping):
        yield from _problems_of_map(value, form, where)
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield _text(value, "a list", where)
            return
        if not value and len(form) > 1:
            yield _text(value, "a list with members", where)
        for i, member in enumerate(value):
            yield from _problems(member, form[0], f"{where}[{i}]")
    elif isinstance(form, tuple):
        found = [next(_problems(value, one, where), None) for one in form]
        if None not in found:
            yield next(problem for problem in reversed(found) if problem)
    else:
        wanted = form if isinstance(form, Is) else _TYPES[form]
        if not wanted.test(value):
            yield _text(value, wanted.text, where)


def _problems_of_map(value: Any, form: Mapping[Any, Any], where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _text(value, "a map", where)
        return
    dot = "." if where else ""
    for key in form:
        if key is not str and key not in value:
            yield f"there is no {f'{where}{dot}{key}'!r}"
    for key, member in value.items():
        if key not in form and str not in form:
            yield f"there is an unknown {f'{where}{dot}{key}'[:80]!r}"
        else:
            yield from _problems(member, form.get(key, form.get(str)), f"{where}{dot}{key}")


def _text(value: Any, wanted: str, where: str) -> str:
    shown = repr(value)
    return f"{where[:80]!r} must be {wanted}, not {shown if len(shown) <= 40 else f'{shown[:40]}...'}" if where else (
        f"it must be {wanted}"
    )  # fmt: skip
