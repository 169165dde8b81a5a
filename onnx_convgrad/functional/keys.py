"""Arguments as keys of a table: what the caller gave, hashable, and back again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.runtime.providers import resolve_providers
from onnx_convgrad.runtime.session_options import SessionOptions

__all__ = ["Resolved", "frozen", "resolved", "thawed"]

Resolved = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
"""Execution providers with their options, as pairs."""


class _Pairs(tuple[tuple[str, Any], ...]):
    """A mapping, hashable."""

    __slots__ = ()


class _Inexact(float):
    """A floating number, which is another key than the integer that it equals."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inexact) and float(self) == float(other)

    __hash__ = float.__hash__


def frozen(value: Any) -> Any:
    """The value with lists as tuples; what it means is decided where it is read. Sets and the like are refused."""
    kind = type(value)
    if value is None or kind is int or kind is bool or kind is str:
        return value
    if kind is np.ndarray:
        return frozen(value.tolist())
    if isinstance(value, Mapping):
        return _Pairs((key, frozen(value[key])) for key in sorted(value))
    if isinstance(value, float):
        return _Inexact(value)
    if isinstance(value, (list, tuple)):
        return tuple([frozen(v) for v in value])
    if kind.__hash__ is None:
        raise ArgumentError(f"{value!r} is neither a number, a name nor a sequence of them.")
    return value


def thawed(value: Any) -> Any:
    """The value with mappings in it again."""
    if isinstance(value, _Pairs):
        return dict(value)
    return tuple(map(thawed, value)) if isinstance(value, tuple) else value


def resolved(providers: Any, options: SessionOptions) -> Resolved:
    """The providers, from what `frozen` made of them."""
    return tuple((name, tuple(sorted(own.items()))) for name, own in resolve_providers(thawed(providers), options))
