"""Lines of text that say what begins now, for whoever shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]
"""Called with a line of text."""

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


def announce(line: str) -> None:
    """Tell the function that listens, if there is one, what begins now."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(line)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Call `listener` with each line that is announced in this context; `None` lets nobody hear them."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
