"""The interface of an engine that ties processes together: two numbers and three methods."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np


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
