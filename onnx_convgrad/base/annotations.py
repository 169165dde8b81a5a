"""Compare arguments with the annotations of their parameters, to name a wrong one where a call has failed."""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import NoneType, UnionType
from typing import Any, Literal, Union

import numpy as np

__all__ = ["wrong_argument"]

_MOST = 20
"""Most members of a sequence or mapping that are compared."""


def wrong_argument(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """A sentence about the first argument that is certainly not what its parameter is annotated with, or `None`.

    Annotations that cannot be evaluated, and kinds that are not known here, take any value.
    """
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in arguments or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value, annotation = arguments[parameter.name], parameter.annotation
        if annotation is parameter.empty or value is parameter.default:
            continue
        fitting, kind = True, None
        # a name that only type checkers import, or an object that refuses questions
        with contextlib.suppress(Exception):
            kind = eval(annotation, namespace) if isinstance(annotation, str) else annotation  # noqa: S307 - our own text
            fitting = _fits(value, kind)
        if not fitting:
            return f"{parameter.name} must be {_described(kind)}, not {_shown(value)}"
    return None


def _fits(value: Any, kind: Any) -> bool:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in members)
    if origin is Literal:
        return any(type(value) is type(member) and value == member for member in members)
    if kind in (None, NoneType):
        return value is None
    if kind in _PLAIN:
        return _PLAIN[kind](value)
    return _fits_class(value, origin or kind, members)


def _fits_class(value: Any, kind: Any, members: tuple[Any, ...]) -> bool:
    if kind is Callable:
        return callable(value)
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if isinstance(value, np.ndarray) and issubclass(kind, Iterable) and not issubclass(kind, (Mapping, np.ndarray)):
        return value.ndim > 0 and _all_fit(value, members)  # it serves as a sequence
    if not isinstance(value, kind):
        return False
    if isinstance(value, dict):
        return len(members) < 2 or (_all_fit(value, members) and _all_fit(value.values(), members[1:]))
    several = isinstance(value, (list, tuple, set, frozenset)) and (kind is not tuple or members[1:] == (...,))
    return not several or _all_fit(value, members)


def _all_fit(values: Any, members: tuple[Any, ...]) -> bool:
    return not members or all(_fits(value, members[0]) for value in islice(values, _MOST))


_PLAIN: dict[Any, Callable[[Any], bool]] = {
    Any: lambda _: True,
    object: lambda _: True,
    bool: lambda v: isinstance(v, (bool, np.bool_)) or (isinstance(v, int) and v in (0, 1)),
    int: lambda v: hasattr(v, "__index__") and (not isinstance(v, np.ndarray) or v.ndim == 0),
    float: lambda v: isinstance(v, (int, float, np.number)) or (isinstance(v, np.ndarray) and v.ndim == 0),
    str: lambda v: isinstance(v, str),
}

_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "None",
    Callable: "a function",
}


def _described(kind: Any) -> str:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_described(member) for member in members))
    if origin is Literal:
        return " or ".join(map(repr, members))
    if kind in _WORDS or origin in _WORDS:
        return _WORDS.get(kind) or _WORDS[origin]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"a sequence of {_described(members[0])}" if members else "a sequence"
    return f"of type {getattr(kind, '__qualname__', kind)}"


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} of shape {value.shape}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an object of the caller
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
