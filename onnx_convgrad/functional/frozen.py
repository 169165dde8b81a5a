"""Turn the settings of a call into hashable keys, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnx_convgrad.errors import ArgumentError


class _Pairs(tuple[tuple[str, Any], ...]):
    """A hashable mapping."""

    __slots__ = ()


class _Inexact(float):
    """A floating number as a key that differs from the integer of the same value."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inexact) and float(self) == float(other)

    __hash__ = float.__hash__


_PLAIN = {type(None), int, bool, str}


def frozen(value: Any) -> Any:
    """Return the value with lists as tuples, uninterpreted; raise `ArgumentError` for sets and other unhashable types."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is np.ndarray:
        return frozen(value.tolist())
    if isinstance(value, Mapping):
        return _Pairs((key, frozen(value[key])) for key in sorted(value))
    if isinstance(value, (float, np.floating)):
        return _Inexact(value)
    if isinstance(value, (list, tuple)):
        return tuple([v if type(v) in _PLAIN else frozen(v) for v in value])
    if kind.__hash__ is None:
        raise ArgumentError(f"{value!r} is neither a number, a name nor a sequence of them.")
    return value


def thawed(value: Any) -> Any:
    """Return the value with mappings instead of pairs."""
    if isinstance(value, _Pairs):
        return dict(value)
    return tuple(map(thawed, value)) if isinstance(value, tuple) else value
