"""Run an iterator ahead in a thread."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext, suppress
from queue import Empty, Queue
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds to wait for a source that is still making an item when the iterator is closed."""


def prefetched(source: Iterator[T], depth: int) -> Iterator[T]:
    """Iterate over `source`, with up to `depth` items made ahead in a thread; 0 makes each on demand.

    An exception of the source is raised here, after the items before it. When the iterator is closed or garbage
    collected, the source is closed in its thread and the thread ends.
    """
    if depth < 1:
        yield from source
        return
    ready: Queue[tuple[bool, Any]] = Queue(depth)  # whether it is an item, and it; at the end the exception, if any
    abandoned = threading.Event()

    def work() -> None:
        end: BaseException | None = None
        try:
            with closing(source) if isinstance(source, Generator) else nullcontext():
                for item in source:
                    ready.put((True, item))
                    if abandoned.is_set():
                        return
        except BaseException as problem:  # noqa: BLE001 - raised again in the consumer
            end = problem
        if not abandoned.is_set():
            ready.put((False, end))

    thread = threading.Thread(target=work, name="onnx_convgrad-prefetch", daemon=True)
    thread.start()
    try:
        while (found := ready.get())[0]:
            yield found[1]
        if found[1] is not None:
            raise found[1]
    finally:
        abandoned.set()
        with suppress(Empty):  # a thread that waits to put an item goes on, and sees that it should end
            while True:
                ready.get_nowait()
        if thread is not threading.current_thread():  # where a garbage collection closes the iterator
            thread.join(_PATIENCE)
