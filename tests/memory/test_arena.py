"""The model of ONNX Runtime's allocator."""

from __future__ import annotations

import numpy as np

from onnx_convgrad.memory.arena import Arena


def test_a_chunk_that_was_given_back_is_used_again() -> None:
    arena = Arena()
    first = arena.allocate(1000)
    arena.allocate(1000)
    arena.release(first)
    assert arena.allocate(900) == first
    assert arena.resident == 2000


def test_neighbours_that_are_free_become_one_chunk() -> None:
    arena = Arena()
    places = [arena.allocate(256) for _ in range(4)]
    for place in places[1:3]:
        arena.release(place)
    assert arena.allocate(512) == places[1]


def test_a_chunk_of_less_than_twice_the_size_is_given_out_whole() -> None:
    arena = Arena()
    place = arena.allocate(1024)
    fence = arena.allocate(256)
    arena.release(place)
    assert arena.allocate(768) == place
    assert arena.allocate(256) > fence


def test_what_was_never_written_occupies_nothing() -> None:
    arena = Arena()
    arena.allocate(300_000)
    assert arena.resident == 300_000
    arena.allocate(3_000_000)  # a region of 4 MiB
    assert arena.resident == 3_300_000


def test_chunks_in_use_never_overlap() -> None:
    draw, arena = np.random.default_rng(0), Arena()
    used: dict[int, int] = {}
    for _ in range(2000):
        if used and draw.random() < 0.5:
            place = list(used)[int(draw.integers(len(used)))]
            arena.release(place)
            del used[place]
        else:
            size = int(draw.integers(1, 300_000))
            place = arena.allocate(size)
            assert all(place + size <= other or other + length <= place for other, length in used.items())
            used[place] = size
    assert arena.resident >= sum(used.values())
