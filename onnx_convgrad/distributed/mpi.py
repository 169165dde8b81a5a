"""A communicator over MPI, by mpi4py."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

import numpy as np

from onnx_convgrad.base.numbers import positive
from onnx_convgrad.base.optional import imported, install
from onnx_convgrad.distributed.communicator import GRACE, TIMEOUT, Communicator, missing_ranks, timed_out
from onnx_convgrad.errors import ExecutionError

_BUCKET = 2**22
"""Bytes of one reduction: MPICH adds up 100 MB in pieces of 4 MB in less than half the time that it takes for the whole."""

_TAG = 7


class Mpi(Communicator):
    """All processes that `mpiexec` has started.

    An exception that ends one of them ends all: the communicator sets `sys.excepthook`.

    Args:
        timeout: Seconds to wait for the other processes.
        communicator: A communicator of mpi4py; `MPI.COMM_WORLD` by default.
        overlap: Add up gradients of all processes during the backward pass. See `Communicator`.

    Raises:
        ExecutionError: mpi4py is missing or finds no MPI.
    """

    bucket = _BUCKET

    def __init__(self, timeout: float = TIMEOUT, communicator: Any = None, *, overlap: bool = False) -> None:
        positive(timeout, "timeout", zero=False)
        self.timeout, self.overlap, self._mpi = float(timeout), overlap, _library()
        self._all = (communicator or self._mpi.COMM_WORLD).Dup()
        self._notices = self._all.Dup()
        self.rank, self.size = int(self._all.rank), int(self._all.size)
        self._previous, sys.excepthook = sys.excepthook, self._failed

    def all_reduce(self, array: np.ndarray) -> None:
        """Add up an array; raise `ExecutionError` if a rank has not arrived within the timeout, and name it."""
        self._meet("a sum")
        self._all.Allreduce(self._mpi.IN_PLACE, array, self._mpi.SUM)

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Copy an array from one rank; errors as for `all_reduce`."""
        self._meet("a copy")
        self._all.Bcast(array, root)

    def abort(self, status: int) -> None:
        """End all processes of the job with this exit status."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._all.Abort(status)

    def _meet(self, what: str) -> None:
        """Wait until all ranks are here; MPI itself would wait forever for one that hangs."""
        arrived = self._all.Ibarrier()
        start, wait = time.monotonic(), 0.0
        while not arrived.Test():
            waited = time.monotonic() - start
            if waited > self.timeout:
                raise timed_out(self._missing(), self.rank, self.size, self.timeout, what)
            if waited > _SPIN:  # another rank may need this core
                wait = min(wait + 1e-5, 1e-3)
                time.sleep(wait)

    def _missing(self) -> list[int]:
        """The ranks that do not tell the others that they wait, too."""
        notice, heard = np.zeros(1, np.uint8), {self.rank}
        for other in range(self.size):
            if other != self.rank:
                self._notices.Isend(notice, other, _TAG)
        end = time.monotonic() + GRACE
        while len(heard) < self.size and time.monotonic() < end:
            status = self._mpi.Status()
            if self._notices.Iprobe(self._mpi.ANY_SOURCE, _TAG, status):
                self._notices.Recv(np.empty(1, np.uint8), status.Get_source(), _TAG)
                heard.add(status.Get_source())
            else:
                time.sleep(0.01)
        return missing_ranks(heard, self.size)

    def _failed(self, kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        """Print an exception that nothing has caught, and end all ranks."""
        sys.stderr.write(f"Rank {self.rank} of {self.size} has failed, which ends all:\n")
        self._previous(kind, problem, trace)
        self.abort(1)


_SPIN = 2e-4
"""Seconds of waiting without giving the core away."""


def _library() -> Any:
    try:
        return imported("mpi4py.MPI", "MPI needs mpi4py")
    except RuntimeError as problem:  # no library of MPI is found
        raise ExecutionError(
            f"mpi4py finds no library of MPI: {problem}.", hint=f"Install one with {install('mpi4py')}."
        ) from None
