"""Several processes train one model: communicators over MPI and torch.distributed, and what a launcher has started.

Each process is a *rank*, numbered from 0. Every rank computes the gradients of its share of a batch, and a communicator
adds them up.
"""

from __future__ import annotations

from onnx_convgrad.distributed.communicator import Communicator
from onnx_convgrad.distributed.connect import connect
from onnx_convgrad.distributed.launchers import launched_by
from onnx_convgrad.distributed.mpi import Mpi
from onnx_convgrad.distributed.torch import Torch

__all__ = ["Communicator", "Mpi", "Torch", "connect", "launched_by"]
