"""The simulation of `benchmarks.scale` against one of every message and every bucket."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.scale import BACKWARD, LATENCY, Engine, engines, main, plan

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "sums.json"
SIZE, SPEED = 1e8, 1.25e9


def ring(ranks: int, message: float) -> float:
    """Seconds until the last rank has the sum: each sends a piece on as soon as it has received the one before."""
    ready = [0.0] * ranks
    for _ in range(2 * (ranks - 1)):  # pieces are added up on one way around, and copied on a second one
        sent = [time + message for time in ready]
        ready = [max(sent[rank - 1], sent[rank]) for rank in range(ranks)]
    return max(ready)


def halving(ranks: int, engine: Engine) -> float:
    """Seconds of a sum of ranks that exchange half, a quarter, ... of the bytes, and then the other way round."""
    parts = [SIZE / 2**i for i in range(1, round(math.log2(ranks)) + 1)]
    return 2 * sum(part * (1 / SPEED + engine.per_byte) + LATENCY for part in parts)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_sum(ranks: int) -> None:
    around = Engine(call=0.0, per_byte=1e-10, piece=math.inf, ring=True)
    message = SIZE / ranks * (1 / SPEED + around.per_byte) + LATENCY
    assert around.sum(ranks, SIZE, SPEED) == pytest.approx(ring(ranks, message), rel=1e-9)
    halves = Engine(call=0.0, per_byte=1e-10, piece=math.inf, ring=False)
    assert halves.sum(ranks, SIZE, SPEED) == pytest.approx(halving(ranks, halves), rel=1e-9)


def test_overlap_hides_what_fits_into_the_backward_pass() -> None:
    engine = Engine(call=0.0, per_byte=0.0, piece=math.inf, ring=True)
    whole, last = engine.sum(2, SIZE, SPEED), engine.sum(2, SIZE / 25, SPEED)
    assert engine.overlapped(2, SIZE, SPEED, 10.0) == pytest.approx(10.0 + last)
    first = 0.01 * (1 - BACKWARD * 24 / 25)
    assert engine.overlapped(2, SIZE, SPEED, 0.01) == pytest.approx(first + 25 * last)
    assert whole < first + 25 * last < 0.01 + whole


def test_stored_sums_are_reproduced() -> None:
    rows = json.loads(STORED.read_text())["rows"]
    for name, engine in engines(rows).items():
        found = {row["bytes"]: row["seconds"] for row in rows if row["engine"] == name}
        for size in (min(found), max(found)):
            assert engine.sum(2, size) == pytest.approx(found[size], rel=0.02)
        assert len(list(plan(engine))) == 16
        assert engine.nested(8, SIZE, SPEED) == engine.sum(8, SIZE)


def test_the_program_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--from", str(STORED), "--plot", str(tmp_path / "ranks.png")])
    assert "100 M parameters" in capsys.readouterr().out
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")
