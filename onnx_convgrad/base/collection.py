"""Let Python search for no unreachable cycles while a graph is built."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_builds = 0
_enabled = True


@contextmanager
def without_collections() -> Iterator[None]:
    """Search for no unreachable cycles in this block; such blocks may overlap in threads.

    Most objects of a graph stay until it is done, so that searching takes a sixth of a build and finds little: the memory
    of a build of 80,000 nodes is the same.
    """
    global _builds, _enabled  # noqa: PLW0603 - the collector belongs to the process
    with _lock:
        if not _builds:
            _enabled = gc.isenabled()
            gc.disable()
        _builds += 1
    try:
        yield
    finally:
        with _lock:
            _builds -= 1
            if not _builds and _enabled:
                gc.enable()
