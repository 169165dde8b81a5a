"""Let Python search for unreachable cycles more rarely, or not at all, while a graph is built."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 20_000
"""New objects between two searches. Python's own 700 make a third of a build a search: most objects of a graph stay."""

_lock = threading.Lock()
_builds = 0
_before = (0, 0, 0)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Search for unreachable cycles after 20,000 new objects, not 700, in this block; such blocks may overlap in threads."""
    global _builds, _before  # noqa: PLW0603 - the thresholds belong to the process
    with _lock:
        if not _builds:
            _before = gc.get_threshold()
            if 0 < _before[0] < _OBJECTS:
                gc.set_threshold(_OBJECTS, *_before[1:])
        _builds += 1
    try:
        yield
    finally:
        with _lock:
            _builds -= 1
            if not _builds:
                gc.set_threshold(*_before)


@contextmanager
def no_collections() -> Iterator[None]:
    """Search for no cycles in this block: large graphs that are in use would be searched again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
