"""Sums, copies and agreement of the ranks of a run, by a communicator; a process by itself does them alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnx_convgrad.distributed.communicator import Communicator
from onnx_convgrad.errors import ArgumentError

_SHOWN = 120
"""Most characters of a value in an error."""


class Ranks:
    """The ranks of a run.

    Args:
        communicator: The engine that ties them together; `None` for a single process.

    Attributes:
        rank: The number of this process.
        size: The number of processes.
        several: Whether there is more than one.
        leader: Whether this one writes files and prints: rank 0.
        overlap: Whether sums of gradients begin during the backward pass.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self.communicator = communicator
        self.rank, self.size = (0, 1) if communicator is None else (communicator.rank, communicator.size)
        self.several, self.leader = self.size > 1, self.rank == 0
        self.overlap = bool(getattr(communicator, "overlap", False))

    def all_reduce(self, array: Any) -> None:
        """Add up a contiguous array over all ranks, in place, in pieces that suit the engine; float16 in float32.

        Tensors on a GPU are given whole.
        """
        if self.communicator is None or not self.several or not math.prod(array.shape):
            return
        if not isinstance(array, np.ndarray):
            self.communicator.all_reduce(array)
            return
        flat = array.reshape(-1)
        if array.dtype.itemsize < 4 and array.dtype.kind not in "iu":
            wide = flat.astype(np.float32)
            self.all_reduce(wide)
            flat[...] = wide.astype(array.dtype)
            return
        bucket = getattr(self.communicator, "bucket", None)
        step = flat.size if bucket is None else max(int(bucket) // flat.itemsize, 1)
        for start in range(0, flat.size, step):
            self.communicator.all_reduce(flat[start : start + step])

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Replace a contiguous array by that of one rank, in place."""
        if self.communicator is not None and self.several and array.size:
            self.communicator.broadcast(array.reshape(-1).view(np.uint8), root)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over all ranks, in float64."""
        array = np.array(numbers, np.float64)
        self.all_reduce(array)
        return [float(number) for number in array]

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on some rank."""
        return self.sums([float(flag)])[0] > 0 if self.several else flag

    def meet(self) -> None:
        """Wait for the other ranks."""
        self.sums([0.0])

    def gather(self, content: bytes) -> list[bytes]:
        """The contents of all ranks, in their order."""
        if not self.several:
            return [content]
        sizes = np.zeros(self.size, np.int64)
        sizes[self.rank] = len(content)
        self.all_reduce(sizes)
        ends = np.cumsum(sizes)
        together = np.zeros(int(ends[-1]), np.uint8)
        together[ends[self.rank] - sizes[self.rank] : ends[self.rank]] = np.frombuffer(content, np.uint8)
        self.all_reduce(together)
        return [together[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]

    def of_leader(self, value: Any) -> Any:
        """The JSON value of rank 0."""
        text = self.gather(json.dumps(value).encode() if self.leader else b"")[0]
        return json.loads(text) if self.several else value

    def agree(self, facts: Mapping[str, Any], hint: str) -> None:
        """Make sure that all ranks state the same facts.

        Args:
            facts: Subject of a fact -> a JSON value.
            hint: The remedy.

        Raises:
            ArgumentError: On every rank: the first difference from rank 0, with the rank that has it.
        """
        if not self.several:
            return
        texts = {name: json.dumps(value, default=str, sort_keys=True) for name, value in facts.items()}
        stated = [json.loads(content) for content in self.gather(json.dumps(texts).encode())]
        for rank, own in enumerate(stated):
            for name in dict.fromkeys([*stated[0], *own]):
                here, there = (texts.get(name, "nothing") for texts in (own, stated[0]))
                if here != there:
                    raise ArgumentError(
                        f"Rank {rank} of {self.size} has another {name} than rank 0: {here:.{_SHOWN}}, not "
                        f"{there:.{_SHOWN}}.",
                        hint=hint,
                    )
