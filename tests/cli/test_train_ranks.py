"""The command `train` on several ranks: what an error does, and what is collected from all."""

from __future__ import annotations

import signal
import warnings
from typing import Any

import pytest

import onnx_convgrad as og
from onnx_convgrad.cli import train_ranks
from onnx_convgrad.cli.tables import Output
from onnx_convgrad.distributed.ranks import Ranks
from tests.support.thread_ranks import ThreadRank, on_ranks


class Alone:
    """A communicator of one of two ranks, whose other rank does nothing."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2
        self.ended: list[int] = []

    def all_reduce(self, array: Any) -> None: ...

    def broadcast(self, array: Any, root: int) -> None: ...

    def abort(self, status: int) -> None:
        self.ended.append(status)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("problem", "status", "text"),
    [
        (og.errors.DivergenceError("The loss is nan."), 3, "The loss is nan."),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
        (ZeroDivisionError("by zero"), 3, "onnx_convgrad failed unexpectedly (ZeroDivisionError: by zero)."),
    ],
)
def test_an_error_ends_all_ranks(
    rank: int,
    problem: BaseException,
    status: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    communicator = Alone(rank)
    monkeypatch.setattr(train_ranks, "connect", lambda *_: communicator)
    monkeypatch.setattr(train_ranks, "_PATIENCE", 0.0)
    with pytest.raises(SystemExit) as caught, train_ranks.together(None):
        raise problem
    assert caught.value.code == status
    assert communicator.ended == [status]
    assert capsys.readouterr().err.startswith(f"Error on rank {rank} of 2: {text}")


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_ranks, "connect", lambda *_: Alone(1))
    with train_ranks.together(5.0) as ranks:
        warnings.warn("a warning that rank 0 shows", UserWarning, stacklevel=1)  # an error if it were not ignored
        assert train_ranks.output_of(ranks, Output()).silent
    monkeypatch.setattr(train_ranks, "connect", lambda *_: None)
    with train_ranks.together(5.0) as ranks:
        assert not ranks.several
        assert not train_ranks.output_of(ranks, Output()).silent


def test_signals_and_entries_of_all_ranks() -> None:
    def work(own: ThreadRank) -> tuple[Any, ...]:
        ranks = Ranks(own)
        received = signal.SIGTERM if own.rank == 1 else None
        return (
            train_ranks.signal_of_all(ranks, received),
            train_ranks.signal_of_all(ranks, None),
            train_ranks.merged(ranks, {f"{own.rank}.png": "broken"}),
        )

    for result in on_ranks(2, work):
        assert result == (signal.SIGTERM, None, {"0.png": "broken", "1.png": "broken"})
