"""The errors of a rank that waits in vain."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnx_convgrad.errors import ExecutionError, first_few

TIMEOUT = 1800.0
"""Seconds to wait for other ranks: one may build a program or write a large checkpoint in the meantime."""


def missing_ranks(heard: Collection[int], size: int) -> list[int]:
    """The ranks that were not heard of."""
    return [rank for rank in range(size) if rank not in heard]


def timed_out(missing: Sequence[int], rank: int, size: int, seconds: float, what: str) -> ExecutionError:
    """The error of a rank that has waited for `seconds`; the `missing` ranks are named, if they are known."""
    several = len(missing) != 1
    named = f"rank{'s' * several} {first_few([str(r) for r in missing])}" if missing else "some rank"
    return ExecutionError(
        f"Rank {rank} of {size} has waited {seconds:g} seconds for {named} in {what} over all ranks.",
        hint="See what the missing process does; a longer timeout is given by --rank-timeout, in Python by "
        "distributed=onnx_convgrad.distributed.Mpi(timeout=...) or Torch(timeout=...).",
    )
