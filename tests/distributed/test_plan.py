"""The plan of `benchmarks.distributed` against a simulation of every message."""

from __future__ import annotations

import pytest

from benchmarks.distributed import LATENCY, RANKS, plan, ring


def simulated(ranks: int, size: float, speed: float) -> float:
    """When the last rank has the sum: each sends a piece to the next as soon as it has received the one before."""
    ready, message = [0.0] * ranks, size / ranks / speed + LATENCY
    for _ in range(2 * (ranks - 1)):  # pieces are added up on one way around, and copied on a second one
        sent = [time + message for time in ready]
        ready = [max(sent[rank - 1], sent[rank]) for rank in range(ranks)]
    return max(ready)


@pytest.mark.parametrize("ranks", RANKS[:4])
def test_a_ring(ranks: int) -> None:
    assert ring(ranks, 1e8, 1.25e9) == pytest.approx(simulated(ranks, 1e8, 1.25e9), rel=1e-9)


def test_the_table() -> None:
    rows = list(plan())
    assert [row[2] for row in rows[: len(RANKS)]] == [str(ranks) for ranks in RANKS]
    assert rows[0][:5] == ["ResNet-50", "10 Gbit/s", "2", "82", "0.7"]
    assert rows[2][5] == "123"
