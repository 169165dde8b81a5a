"""A communicator over torch.distributed: gloo on CPUs, NCCL on GPUs, with torchrun's restarts."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from onnx_convgrad.base.numbers import positive
from onnx_convgrad.base.optional import imported
from onnx_convgrad.distributed.communicator import GRACE, TIMEOUT, Communicator, missing_ranks, timed_out
from onnx_convgrad.distributed.launchers import restarts
from onnx_convgrad.errors import ExecutionError


class Torch(Communicator):
    """All processes that `torchrun` has started, or the process group that exists already.

    Arrays are added up whole: gloo gains nothing from pieces.

    Args:
        timeout: Seconds to wait for the other processes. Of a group that exists already, its own timeout counts.
        overlap: Whether sums of gradients begin during the backward pass, see `Communicator`.

    Raises:
        ExecutionError: PyTorch is missing, or the other ranks cannot be reached.
    """

    bucket = None

    def __init__(self, timeout: float = TIMEOUT, *, overlap: bool = False) -> None:
        positive(timeout, "timeout", zero=False)
        self.timeout, self.overlap, self._torch = float(timeout), overlap, _library()
        self._store: Any = None
        self._group = self._torch.distributed
        if not self._group.is_initialized():
            self._open()
        self.rank, self.size = int(self._group.get_rank()), int(self._group.get_world_size())

    def all_reduce(self, array: Any) -> None:
        """Add up an array, or a tensor of PyTorch on a GPU.

        Raises:
            ExecutionError: A rank has ended, or has not arrived within the timeout; the message names it if it is known.
        """
        if isinstance(array, np.ndarray):
            self._run("a sum", lambda: self._group.all_reduce(self._torch.from_numpy(array)))
        else:
            self._run("a sum", lambda: self._group.all_reduce(array))
            if array.is_cuda:
                self._torch.cuda.synchronize(array.device)  # ONNX Runtime works on a stream of its own

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Copy an array from one rank; errors as for `all_reduce`."""
        self._run("a copy", lambda: self._group.broadcast(self._torch.from_numpy(array), root))

    def abort(self, status: int) -> None:
        """Do nothing: torchrun ends or restarts all processes when one of them ends."""

    def on_device(self, kind: str, number: int) -> Callable[[int, np.dtype[Any]], Any] | None:
        """The maker of flat tensors of zeros on a GPU, which `all_reduce` adds up there by NCCL.

        Args:
            kind: `"cuda"` or `"cpu"`.
            number: The number of the device.

        Returns:
            A function of the number of entries and their dtype, which makes a tensor; `None` where there is no NCCL.
        """
        torch = self._torch
        if kind != "cuda" or not torch.cuda.is_available() or "nccl" not in self._group.get_backend_config():
            return None
        device = torch.device(kind, number)
        torch.cuda.set_device(device)  # NCCL takes the GPU of the process
        return lambda size, dtype: torch.zeros(size, dtype=getattr(torch, dtype.name), device=device)

    def _open(self) -> None:
        """Open a process group: gloo for arrays, and NCCL for tensors on GPUs where PyTorch has it.

        torchrun keeps one store over all restarts, with addresses of processes that have ended: each attempt has its own
        prefix.
        """
        environment = os.environ
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            limit = timedelta(seconds=self.timeout)
            address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
            store = self._group.TCPStore(address, port, size, rank == 0 and not shared, timeout=limit)
            self._store = self._group.PrefixStore(f"onnx_convgrad/{restarts()}", store)
            gpus = self._torch.cuda.is_available() and self._group.is_nccl_available()
            kinds = "cpu:gloo,cuda:nccl" if gpus else "gloo"
            self._group.init_process_group(kinds, store=self._store, rank=rank, world_size=size, timeout=limit)
        except KeyError as problem:
            raise ExecutionError(
                f"torch.distributed needs the environment variable {problem.args[0]}.",
                hint="Start the program with `torchrun --nproc-per-node 2 ...`.",
            ) from None
        except (RuntimeError, ValueError) as problem:
            raise ExecutionError(
                f"The ranks of torch.distributed cannot be connected: {problem}",
                hint="Check that all machines reach MASTER_ADDR, and set GLOO_SOCKET_IFNAME to the network interface.",
            ) from problem
        atexit.register(self._close)

    def _close(self) -> None:
        if self._group.is_initialized():
            self._group.destroy_process_group()

    def _run(self, what: str, call: Callable[[], object]) -> None:
        start = time.monotonic()
        try:
            call()
        except RuntimeError as problem:
            waited = time.monotonic() - start
            if waited < 0.9 * self.timeout and "Timed out" not in f"{problem}":
                raise ExecutionError(
                    f"Rank {self.rank} of {self.size} has lost another rank in {what} over all ranks: {problem}",
                    hint="The message of the rank that has ended first says why.",
                ) from problem
            raise timed_out(self._missing(), self.rank, self.size, waited, what) from problem

    def _missing(self) -> list[int]:
        """The ranks that do not say in the store that they wait, too."""
        if self._store is None:
            return []
        heard = {self.rank}
        self._store.set(f"waits/{self.rank}", "1")
        end = time.monotonic() + GRACE
        while len(heard) < self.size and time.monotonic() < end:
            others = (r for r in range(self.size) if r not in heard)
            heard |= {r for r in others if self._store.check([f"waits/{r}"])}
            time.sleep(0.05)
        return missing_ranks(heard, self.size)


def _library() -> Any:
    imported("torch.distributed", "Ranks over torch.distributed need PyTorch")
    import torch

    if not torch.distributed.is_available():
        raise ExecutionError("This PyTorch was built without torch.distributed.", hint="Install another build of it.")
    return torch
