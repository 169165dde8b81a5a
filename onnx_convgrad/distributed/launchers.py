"""The launcher of this process: mpiexec, torchrun, or neither of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

Launcher = Literal["mpi", "torch"]

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets, as do Kubeflow and others that start PyTorch."""

_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables with the number of processes that mpiexec sets: MPICH and Intel MPI, Open MPI, MVAPICH."""

_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK")


def launched_by(environment: Mapping[str, str] | None = None) -> Launcher | None:
    """Return the launcher that has started this process as one of several: `"mpi"`, `"torch"`, or `None` if none has.

    Args:
        environment: Environment variables; by default those of this process.
    """
    environment = os.environ if environment is None else environment
    if all(name in environment for name in _TORCH):
        return "torch" if _number(environment, ("WORLD_SIZE",), 1) > 1 else None
    return "mpi" if _number(environment, _MPI, 1) > 1 else None


def started(environment: Mapping[str, str] = os.environ) -> int:
    """The number of processes that the launcher has started."""
    return _number(environment, ("WORLD_SIZE",) if launched_by(environment) == "torch" else _MPI, 1)


def local_size(default: int, environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks on this machine; `default` if the launcher does not tell."""
    return max(_number(environment, _LOCAL_SIZE, default), 1)


def local_rank(default: int, environment: Mapping[str, str] = os.environ) -> int:
    """The number of this rank among those on this machine; `default` if the launcher does not tell."""
    return _number(environment, _LOCAL_RANK, default)


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """The number of times that torchrun has restarted this job."""
    return _number(environment, ("TORCHELASTIC_RESTART_COUNT",), 0)


def _number(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return default
