"""Say what begins and what each step has changed, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

Listener = Callable[[str], None]
"""Called with a line of text that says what begins."""

Watch = Callable[[str, str, "ir.Graph"], None]
"""Called with the name of a step, what it does in one sentence, and the graph after it."""


@dataclass(slots=True)
class _Audience:
    """Who listens, and the last line that was announced."""

    listener: Listener
    line: str = ""


_AUDIENCE: ContextVar[_Audience | None] = ContextVar("audience", default=None)
_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


def announce(line: str) -> None:
    """Tell the function that listens, if there is one, what begins."""
    audience = _AUDIENCE.get()
    if audience is not None:
        audience.line = line
        audience.listener(line)


def note_step(name: str, does: str, graph: ir.Graph) -> None:
    """Tell the function that watches, if there is one, that a step has changed a graph; `does` may be its docstring."""
    watch = _WATCH.get()
    if watch is not None:
        watch(name, does.strip().partition("\n")[0], graph)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Call `listener` with what is announced in this context; `None` for nobody."""
    token = _AUDIENCE.set(None if listener is None else _Audience(listener))
    try:
        yield
    finally:
        _AUDIENCE.reset(token)


@contextmanager
def details() -> Iterator[None]:
    """Keep silent in this context if it is a part of something that was announced."""
    audience = _AUDIENCE.get()
    if audience is None or audience.line:
        with listening(None):
            yield
    else:
        try:
            yield
        finally:
            audience.line = ""


@contextmanager
def watched_steps(watch: Watch | None) -> Iterator[None]:
    """Call `watch` after each pass and stage that runs in this context; `None` for nobody."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)
