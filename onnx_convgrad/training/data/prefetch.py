"""Batches made in a thread, a few ahead of the one that trains on them."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from queue import Empty, Queue
from typing import TypeVar

__all__ = ["prefetched"]

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds that a source in the midst of an item is waited for when nobody wants the item any more."""


class _End:
    """Comes after the last item, with the exception that ended the source, if any."""

    def __init__(self, problem: BaseException | None = None) -> None:
        self.problem = problem


def prefetched(source: Iterator[T], depth: int) -> Iterator[T]:
    """The items of `source`, of which up to `depth` are made ahead in a thread; 0 makes each when it is asked for.

    An exception of the source is raised here, after the items before it. When the iterator is closed, or dropped, the
    source is closed in its thread and the thread ends.
    """
    if depth < 1:
        yield from source
        return
    ready: Queue[T | _End] = Queue(depth)
    abandoned = threading.Event()

    def work() -> None:
        end = _End()
        try:
            with closing(source) if isinstance(source, Generator) else nullcontext():
                for item in source:
                    ready.put(item)
                    if abandoned.is_set():
                        return
        except BaseException as problem:  # noqa: BLE001 - raised again where the items are wanted
            end = _End(problem)
        if not abandoned.is_set():
            ready.put(end)

    thread = threading.Thread(target=work, name="onnx_convgrad-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.problem is not None:
            raise item.problem
    finally:
        abandoned.set()
        _drain(ready)
        thread.join(_PATIENCE)


def _drain(queue: Queue[T]) -> None:
    """Make room, so that a thread that waits to put its item goes on and sees that it is not wanted."""
    while True:
        try:
            queue.get_nowait()
        except Empty:
            return
