"""Batches of private training: each sample is in each update with the same probability, by itself (Poisson sampling).

The accounting of privacy rests on that (Abadi et al. 2016, arXiv:1607.00133; Mironov, Talwar, Zhang 2019,
arXiv:1908.10530). As in Opacus, the probability is one divided by the number of updates of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from onnx_convgrad.data.batches import Batches, Loader
from onnx_convgrad.data.datasets import Rows, seed_sequence
from onnx_convgrad.data.sequences import Sequences
from onnx_convgrad.errors import ArgumentError


class PoissonLoader(Loader):
    """A loader that draws its batches, of sizes that vary around the batch size. Made by `of`.

    Attributes:
        parts: Number of batches that each update is divided into; some may be empty mappings.
    """

    parts: int

    @classmethod
    def of(cls, source: Batches, parts: int) -> Self:
        """Draw the samples of a loader at random.

        Raises:
            ArgumentError: The data are an iterable of batches, the program takes batches of a fixed size, or samples are
                mixed.
        """
        if not isinstance(source, Loader):
            raise ArgumentError(
                "Private training draws its batches itself, or its epsilon would be wrong; the data are batches already.",
                hint="Give arrays by name, a file or a folder; or call step with batches and an accountant of your own.",
            )
        if source.inputs.batch_size() is not None:
            source.inputs.refuse_fixed_batch(
                f"Private training draws batches of any size, and the program takes batches of {source.batch_size}."
            )
        if source.lengths is not None:
            raise ArgumentError(
                "Private training draws each sample by itself, so that batches cannot have one length.",
                hint="Leave group_by_length out.",
            )
        if isinstance(source.dataset, Sequences):
            raise ArgumentError(
                "Private training draws each sample by itself, and parts of a sequence follow one another.",
                hint="Give whole sequences: lists of arrays by name.",
            )
        if source.dataset.mixing.drawn:
            raise ArgumentError(
                "Private training cannot mix samples (mixup, cutmix): each would count several times.",
                hint="Leave them out of augment.",
            )
        loader = cls.__new__(cls)
        loader.__dict__.update(source.__dict__, parts=parts)
        return loader

    def __len__(self) -> int:
        return -(-len(self.dataset) // (self.batch_size * self.parts)) * self.parts

    @property
    def rate(self) -> float:
        """The probability that a sample is in an update."""
        return self.parts / len(self)

    def describe(self) -> dict[str, Any]:
        """A description of the data for checkpoints."""
        return {**super().describe(), "poisson": self.parts}

    def _rows(self, epoch: int, start: int) -> Iterator[Rows]:
        for number in range(start, len(self)):
            update, part = divmod(number, self.parts)
            rng = np.random.Generator(np.random.PCG64(seed_sequence(self.seed, epoch, update)))
            rows = np.array_split(np.flatnonzero(rng.random(len(self.dataset)) < self.rate), self.parts)[part]
            yield rows if self.own is None else rows[self.own(len(rows))]
