"""Run an iterator ahead in a thread."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from queue import Empty, Queue
from typing import TypeVar

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds to wait for a source that is still making an item when the iterator is closed."""


class _End:
    """Marks the end of the items, with the exception that ended the source, if any."""

    def __init__(self, problem: BaseException | None = None) -> None:
        self.problem = problem


def prefetched(source: Iterator[T], depth: int) -> Iterator[T]:
    """Iterate over `source`, with up to `depth` items made ahead in a thread; 0 makes each on demand.

    An exception of the source is raised here, after the items before it. When the iterator is closed or garbage
    collected, the source is closed in its thread and the thread ends.
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
        except BaseException as problem:  # noqa: BLE001 - raised again in the consumer
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
    """Empty the queue, so that a thread that waits to put an item continues and sees that it should end."""
    while True:
        try:
            queue.get_nowait()
        except Empty:
            return
