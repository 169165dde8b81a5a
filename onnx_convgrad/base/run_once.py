"""Run a function once, thread-safely."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Run `function` in the first call only; other threads wait for it, and calls from inside it return at once."""
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
