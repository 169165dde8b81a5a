"""Work that is done in the first of all calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

__all__ = ["once"]


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Do the work of `function` in the first call; other threads wait for it, and calls from within it return at once."""
    lock = threading.RLock()
    begun = done = False

    @functools.wraps(function)
    def first() -> None:
        nonlocal begun, done
        if done:
            return
        with lock:
            if not begun:
                begun = True
                function()
                done = True

    return first
