"""Ranks that are threads of one process, for tests of what several ranks do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from onnx_convgrad.errors import ExecutionError

T = TypeVar("T")

_PATIENCE = 60.0
"""Seconds to wait for another thread."""


class Together:
    """The state that the threads share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.arrays: list[np.ndarray] = [np.empty(0)] * size


class ThreadRank:
    """A communicator of one thread."""

    def __init__(self, rank: int, together: Together, bucket: int | None = None, *, overlap: bool = False) -> None:
        self.rank, self.size, self.together, self.bucket = rank, together.size, together, bucket
        self.calls, self.overlap = 0, overlap

    def all_reduce(self, array: Any) -> None:
        """Add up an array, or a tensor of PyTorch."""
        array = np.asarray(array)
        assert array.ndim == 1
        assert array.flags.c_contiguous
        assert array.dtype in (np.float32, np.float64, np.int64, np.uint8)
        self.calls += 1
        self.together.arrays[self.rank] = array
        self._meet()
        with np.errstate(invalid="ignore"):  # with a loss scale, some steps overflow
            total = sum(self.together.arrays[1:], self.together.arrays[0])
        self._meet()
        array[:] = total

    def broadcast(self, array: np.ndarray, root: int) -> None:
        assert array.ndim == 1
        self.together.arrays[self.rank] = array
        self._meet()
        array[:] = self.together.arrays[root]
        self._meet()

    def abort(self, status: int) -> None:  # noqa: ARG002 - a thread has no exit status
        self.together.barrier.abort()

    def _meet(self) -> None:
        try:
            self.together.barrier.wait(_PATIENCE)
        except threading.BrokenBarrierError:
            raise ExecutionError("Another rank has failed.") from None


def on_ranks(
    size: int, work: Callable[[ThreadRank], T], bucket: int | None = None, *, overlap: bool = False
) -> list[T]:
    """Run `work` on so many ranks; return the results, or raise the error of the first rank that has failed by itself."""
    together = Together(size)
    results: dict[int, T] = {}
    problems: list[tuple[bool, int, BaseException]] = []

    def run(rank: int) -> None:
        own = ThreadRank(rank, together, bucket, overlap=overlap)
        try:
            results[rank] = work(own)
        except BaseException as problem:  # noqa: BLE001 - raised again below
            problems.append(("Another rank has failed" in f"{problem}", rank, problem))
            own.abort(1)

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE)
    if problems:
        raise min(problems, key=lambda p: p[:2])[2]
    return [results[rank] for rank in range(size)]
