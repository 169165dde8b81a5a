"""A function that runs once: in threads, from inside itself, and after a failure."""

from __future__ import annotations

import threading

import pytest

from onnx_convgrad.base.run_once import once


def test_other_threads_wait_until_it_is_done() -> None:
    begun, may_end, calls, seen = threading.Event(), threading.Event(), [], []

    def work() -> None:
        begun.set()
        may_end.wait(10)
        calls.append(1)

    first = once(work)

    def call() -> None:
        first()
        seen.append(len(calls))

    threads = [threading.Thread(target=call) for _ in range(3)]
    threads[0].start()
    begun.wait(10)
    for thread in threads[1:]:
        thread.start()
    assert seen == []
    may_end.set()
    for thread in threads:
        thread.join()
    assert (calls, seen) == ([1], [1, 1, 1])


def test_a_call_from_inside_returns_at_once() -> None:
    calls: list[str] = []

    def work() -> None:
        calls.append("outer")
        first()

    first = once(work)
    first()
    assert calls == ["outer"]


def test_a_failure_is_raised_and_not_repeated() -> None:
    def work() -> None:
        calls.append(1)
        raise ValueError("no")

    calls: list[int] = []
    first = once(work)
    with pytest.raises(ValueError, match="no"):
        first()
    first()
    assert calls == [1]
