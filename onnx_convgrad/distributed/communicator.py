"""The interface of an engine that ties processes together, and the error of one that waits for another in vain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from onnx_convgrad.errors import ExecutionError, first_few

TIMEOUT = 1800.0
"""Seconds to wait for other ranks: one may build a program or write a large checkpoint in the meantime."""


@runtime_checkable
class Communicator(Protocol):
    """Ties the ranks of a run together; any object with these members will do.

    Every rank makes the same calls in the same order. A call that needs a rank which has ended, or which does not arrive
    in time, raises an error instead of waiting forever.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes.

    An attribute `bucket`, if there is one, is the largest number of bytes that one call of `all_reduce` should take; larger
    arrays are given in pieces. Without it, or with `None`, they are given whole.

    If an attribute `overlap` is true, another thread calls `all_reduce` for gradients while this one computes, one call at
    a time.
    """

    rank: int
    size: int

    def all_reduce(self, array: np.ndarray) -> None:
        """Replace an array by its sum over all ranks, in place, with the same bits on every rank.

        Args:
            array: Contiguous, of one axis, of the dtype float32, float64, int64 or uint8, and of the same size on every
                rank.
        """

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Replace an array by that of one rank, in place.

        Args:
            array: As for `all_reduce`.
            root: The rank whose array is copied.
        """

    def abort(self, status: int) -> None:
        """End the processes of all ranks, because this one has failed.

        It may return if the end of this process ends the others.

        Args:
            status: Exit status of this process.
        """


GRACE = 3.0
"""Seconds in which the waiting ranks tell each other that they wait, before they name those that are missing."""


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
