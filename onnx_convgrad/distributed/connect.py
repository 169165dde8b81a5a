"""Make a communicator of the argument `distributed`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from onnx_convgrad.base.names import check_names
from onnx_convgrad.distributed.communicator import TIMEOUT, Communicator
from onnx_convgrad.distributed.launchers import launched_by, started
from onnx_convgrad.distributed.mpi import Mpi
from onnx_convgrad.distributed.torch import Torch
from onnx_convgrad.errors import ArgumentError, ExecutionError

Distributed: TypeAlias = Literal["auto", "mpi", "torch"] | Communicator | None
"""An engine by name, a communicator, or `None` for one process; `"auto"` asks the environment what has started it."""


def connect(distributed: Distributed = "auto", timeout: float = TIMEOUT) -> Communicator | None:
    """Connect this process with the other ranks of its run.

    Args:
        distributed: `"mpi"` for processes of mpiexec, `"torch"` for those of torchrun, `"auto"` for whichever has started
            this one, a communicator of your own, or `None`.
        timeout: Seconds to wait for the other processes. A communicator of your own has its own.

    Returns:
        The communicator; `None` for a process by itself, that of `"auto"` without a launcher included.

    Raises:
        ArgumentError: It is none of these.
        ExecutionError: The engine is not installed, or the other ranks cannot be reached.
    """
    if distributed is None:
        return None
    if not isinstance(distributed, str):
        return _checked(distributed)
    check_names([distributed], ["auto", "mpi", "torch"], "distributed")
    kind = launched_by() if distributed == "auto" else distributed
    if kind is None:
        return None
    try:
        return Mpi(timeout) if kind == "mpi" else Torch(timeout)
    except ExecutionError as problem:
        if distributed != "auto":
            raise
        message = f"This process was started as one of {started()}. {problem.message}"
        raise ExecutionError(message, hint=problem.hint) from None


def _checked(communicator: object) -> Communicator:
    if not isinstance(communicator, Communicator):
        raise ArgumentError(
            f"distributed takes 'auto', 'mpi', 'torch', a communicator or None, not {communicator!r:.80}.",
            hint="A communicator has rank, size, all_reduce(array), broadcast(array, root) and abort(status): see "
            "onnx_convgrad.distributed.Communicator.",
        )
    rank, size = communicator.rank, communicator.size
    if not 0 <= rank < size:
        raise ArgumentError(f"The communicator has the rank {rank!r} of {size!r}; ranks are numbered from 0.")
    return communicator
