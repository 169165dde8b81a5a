"""Sums, copies and agreement of ranks, and the choice of an engine."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.distributed import connect, launched_by, launchers
from onnx_convgrad.distributed.communicator import missing_ranks, timed_out
from onnx_convgrad.distributed.ranks import Ranks
from tests.support.thread_ranks import ThreadRank, on_ranks


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64])
@pytest.mark.parametrize("bucket", [None, 1, 24])
def test_arrays_are_added_up_in_place(dtype: type[np.generic], bucket: int | None) -> None:
    def work(own: ThreadRank) -> tuple[np.ndarray, int]:
        array = np.arange(10, dtype=dtype).reshape(2, 5) * (own.rank + 1)
        Ranks(own).all_reduce(array)
        return array, own.calls

    for array, calls in on_ranks(3, work, bucket):
        np.testing.assert_array_equal(array, np.arange(10).reshape(2, 5) * 6)
        assert array.dtype == dtype
        itemsize = max(np.dtype(dtype).itemsize, 4)
        assert calls == (1 if bucket is None else -(-10 // max(bucket // itemsize, 1)))


def test_sums_flags_and_contents() -> None:
    def work(own: ThreadRank) -> tuple[Any, ...]:
        ranks = Ranks(own)
        array = np.full((2, 2), own.rank, np.int32)
        ranks.broadcast(array, 1)
        ranks.meet()
        contents = ranks.gather(b"x" * own.rank)
        return (
            ranks.sums([own.rank, 0.5]), ranks.any(own.rank == 2), ranks.any(False), array.tolist(), contents,
            ranks.of_leader({"rank": own.rank} if own.rank == 0 else None), ranks.leader,
        )  # fmt: skip

    results = on_ranks(3, work)
    assert [r[-1] for r in results] == [True, False, False]
    for result in results:
        assert result[:-1] == ([3.0, 1.5], True, False, [[1, 1], [1, 1]], [b"", b"x", b"xx"], {"rank": 0})


def test_one_process_by_itself() -> None:
    ranks = Ranks()
    array = np.ones(3, np.float32)
    ranks.all_reduce(array)
    ranks.broadcast(array)
    ranks.agree({"seed": 1}, "")
    assert array.tolist() == [1, 1, 1]
    assert ranks.sums([1, 2]) == [1.0, 2.0]
    assert ranks.gather(b"a") == [b"a"]
    assert ranks.of_leader([1]) == [1]
    assert not ranks.several
    assert ranks.leader
    assert ranks.any(True)


def test_ranks_that_differ_are_told() -> None:
    def work(own: ThreadRank) -> str:
        with pytest.raises(og.errors.ArgumentError) as caught:
            Ranks(own).agree({"seed": 3, "loss": "mse" if own.rank < 2 else "l1"}, "Use the same.")
        return str(caught.value)

    assert set(on_ranks(3, work)) == {'Rank 2 of 3 has another loss than rank 0: "l1", not "mse". Use the same.'}


def test_launchers() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}
    assert launched_by(torchrun) == "torch"
    assert launched_by({**torchrun, "WORLD_SIZE": "1"}) is None
    assert launched_by({"RANK": "1", "WORLD_SIZE": "2"}) is None
    assert launched_by({"PMI_SIZE": "4", "PMI_RANK": "0"}) == "mpi"
    assert launched_by({"OMPI_COMM_WORLD_SIZE": "4"}) == "mpi"
    assert launched_by({"PMI_SIZE": "1"}) is None
    assert launched_by({}) is None
    assert launchers.started(torchrun) == 2
    assert launchers.started({"PMI_SIZE": "4"}) == 4
    assert launchers.local_size(7, torchrun) == 2
    assert launchers.local_size(7, {}) == 7
    assert launchers.local_rank(3, {"MPI_LOCALRANKID": "1"}) == 1
    assert launchers.restarts({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2


def test_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect(None) is None
    assert connect("auto") is None
    own = ThreadRank(0, SimpleNamespace(size=1))  # type: ignore[arg-type]
    assert connect(own) is own
    with pytest.raises(og.errors.ArgumentError, match=r"distributed 'mpii'.*mpi"):
        connect("mpii")  # type: ignore[arg-type]
    with pytest.raises(og.errors.ArgumentError, match="has rank, size, all_reduce"):
        connect(object())  # type: ignore[arg-type]
    own.rank = 1
    with pytest.raises(og.errors.ArgumentError, match="rank 1 of 1"):
        connect(own)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(og.errors.ExecutionError, match="python -m pip install mpi4py mpich`") as caught:
        connect("mpi")
    assert "was started as" not in str(caught.value)
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(og.errors.ExecutionError, match=r"This process was started as one of 4\. MPI needs mpi4py"):
        connect("auto")
    with pytest.raises(og.errors.ExecutionError, match="torchrun --nproc-per-node"):
        connect("torch")
    with pytest.raises(og.errors.ArgumentError, match="timeout must be above 0"):
        connect("torch", timeout=0)


def test_the_error_of_waiting_names_the_missing() -> None:
    assert missing_ranks({0, 2}, 4) == [1, 3]
    assert "waited 5 seconds for ranks 1, 3 in a sum" in str(timed_out([1, 3], 0, 4, 5.0, "a sum"))
    assert "for rank 1 in" in str(timed_out([1], 0, 2, 5.0, "a sum"))
    assert "for some rank in" in str(timed_out([], 0, 2, 5.0, "a sum"))
