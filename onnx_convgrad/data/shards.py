"""Give each of several ranks its shard of every batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import Any

import numpy as np

from onnx_convgrad.data.batches import Batches, Loader, shard_of
from onnx_convgrad.data.inputs import STATE_ROWS, Batch, BatchLike, Checked
from onnx_convgrad.errors import ArgumentError


def is_empty(batch: BatchLike) -> bool:
    """Whether a batch has no samples: no arrays, or only such of none."""
    if not isinstance(batch, Mapping):
        return False
    return all(np.ndim(array) and not len(array) for array in batch.values())  # type: ignore[arg-type]


class Shards:
    """The shard of one rank in the batches of any source, all of which are read.

    Args:
        source: Batches, which must be the same on every rank.
        rank: The number of the rank.
        size: The number of ranks.
    """

    def __init__(self, source: Batches, rank: int, size: int) -> None:
        self.source, self.rank, self.size = source, rank, size

    def __len__(self) -> int:
        """Number of batches; raises TypeError if the source has no length."""
        count = length_hint(self.source, -1)
        if count < 0:
            raise TypeError(f"{type(self.source).__name__} has no length")
        return count

    def epoch_iterator(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's shard of the batches of an epoch; an empty mapping where it has no samples."""
        return map(self._shard, self.source.epoch_iterator(epoch, start))

    def describe(self) -> dict[str, Any]:
        """The description of the source."""
        return self.source.describe()

    def _shard(self, batch: Batch) -> Batch:
        if (batch.get(STATE_ROWS, np.array(-1)) >= 0).any():
            raise ArgumentError(
                f"The array {STATE_ROWS!r} names rows of batches that several ranks divide among themselves.",
                hint="Leave it out, so that each row continues its stream; or let each rank call step with its own batches.",
            )
        count = next((len(array) for array in batch.values() if array.ndim), 1)
        rows = shard_of(count, self.rank, self.size)
        if rows.start == rows.stop:
            return {}
        arrays = {name: array[rows] if array.ndim else array for name, array in batch.items()}
        return Checked(arrays, batch.takes) if isinstance(batch, Checked) else arrays


def shards_of(source: Batches, rank: int, size: int) -> Batches:
    """The shard of one rank in every batch; of a `Loader`, only its samples are read.

    Raises:
        ArgumentError: The program takes a fixed number of samples, which cannot be divided.
    """
    if size == 1:
        return source
    return source.shard(rank, size) if isinstance(source, Loader) else Shards(source, rank, size)
