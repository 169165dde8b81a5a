"""Batches for a training program: shuffled, cast, made ahead, and the same again for the same seed and epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from onnx_convgrad.base.numbers import whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.data.datasets import Arrays, Dataset, derived_seed, permutation, read_arrays
from onnx_convgrad.training.data.fitting import Batch, Fitting
from onnx_convgrad.training.data.images import ImageFolder, is_image_folder
from onnx_convgrad.training.data.prefetch import prefetched
from onnx_convgrad.training.program.manifest import Manifest

__all__ = ["Batches", "Loader", "Stream", "as_batches", "as_dataset"]

BATCH_SIZE = 32
"""Samples in a batch, where neither the caller nor the program says."""


@runtime_checkable
class Batches(Protocol):
    """What training takes its data from. May have a length: the number of batches of an epoch."""

    def epoch_iterator(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on; the same for the same arguments."""

    def describe(self) -> dict[str, Any]:
        """What tells these data from others, as JSON values."""


class Loader:
    """Batches of a data set.

    Args:
        dataset: The samples.
        manifest: Of the program that the batches are for.
        batch_size: Samples in a batch; by default what the program takes, or 32 where it takes any number.
        shuffle: Whether each epoch has an order of its own, drawn from `seed` and the number of the epoch.
        drop_last: Leave out a last batch that is smaller; by default only where the program takes no smaller one.
        prefetch: Batches to make ahead in a thread; by default 2 where the data come from files, else 0.
        names: Input of the program -> name of its array, where they cannot be told.

    Raises:
        ArgumentError: An input has no array, or the arrays do not fit the inputs.
    """

    def __init__(
        self,
        dataset: Dataset,
        manifest: Manifest,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool | None = None,
        prefetch: int | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.fitting = Fitting(manifest, names)
        self.dataset = dataset.bound(manifest)
        fixed = self.fitting.batch_size()
        self.batch_size = (fixed or BATCH_SIZE) if batch_size is None else whole(batch_size, "batch_size")
        if fixed not in (None, self.batch_size):
            raise ArgumentError(
                f"The program takes batches of {fixed}, not of {self.batch_size}.",
                hint=f"Build it with a free first size: input_shapes, or --input-shape {manifest.data[0].name}:N,... .",
            )
        self.shuffle, self.seed = shuffle, seed
        self.drop_last = fixed is not None if drop_last is None else drop_last
        if not len(self):
            raise ArgumentError(
                f"{len(self.dataset)} samples make no batch of {self.batch_size}, and smaller ones are left out."
            )
        self.prefetch = (2 if self.dataset.slow else 0) if prefetch is None else prefetch
        self._batch(slice(0, min(self.batch_size, len(self.dataset))))  # what does not fit is refused before any work

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def epoch_iterator(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on; those before it are not read."""
        return prefetched(self._batches(epoch, start), self.prefetch)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint stores to recognise the data."""
        own = {"batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed, "drop_last": self.drop_last}
        return {**self.dataset.describe(), **own}

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        count, size = len(self.dataset), self.batch_size
        order = permutation(count, self.seed, epoch) if self.shuffle else None
        for first in range(start * size, len(self) * size, size):
            rows = slice(first, min(first + size, count))
            yield self._batch(rows if order is None else order[rows])

    def _batch(self, rows: Any) -> Batch:
        return self.fitting(self.dataset.take(rows))


class Stream:
    """Batches of any iterable: of mappings by name, or of tuples, first the data, then the targets.

    Args:
        source: Iterated anew in each epoch, such as a list or a PyTorch `DataLoader`; or a function of the epoch that
            returns what to iterate, for orders that can be repeated. A sampler's `set_epoch` is called, and a
            `DataLoader`'s own `generator` is seeded with `seed` and the epoch.
        manifest: Of the program that the batches are for.
        seed: For such a generator.
        prefetch: Batches to take ahead in a thread.
        names: Input of the program -> name of its array, where they cannot be told.
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[int], Iterable[Any]],
        manifest: Manifest,
        *,
        seed: int = 0,
        prefetch: int = 0,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.source, self.seed, self.prefetch = source, seed, prefetch
        self.fitting = Fitting(manifest, names)
        self._spent = False

    def __len__(self) -> int:
        """Number of batches; raises TypeError where the source does not know it."""
        source: Any = self.source
        return len(source)

    def epoch_iterator(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch; those before `start` are taken from the source and passed over."""
        return prefetched(self._batches(epoch, start), self.prefetch)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint stores to recognise the data."""
        source: Any = self.source
        sizes = {"batches": len(source)} if hasattr(source, "__len__") else {}
        batch = getattr(source, "batch_size", None)
        return {
            "kind": "iterable",
            "type": getattr(source, "__qualname__", type(source).__qualname__),
            **sizes,
            **({"batch_size": batch} if isinstance(batch, int) else {}),
            "seed": self.seed,
        }

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        for batch in islice(self._opened(epoch), start, None):
            yield self.fitting(batch)

    def _opened(self, epoch: int) -> Iterator[Any]:
        source = self.source
        if not isinstance(source, Iterable):
            return iter(source(epoch))
        if isinstance(source, Iterator):
            if self._spent:
                raise ArgumentError(
                    f"The data are a {type(source).__name__}, which gives its batches only once: "
                    "there is nothing left for another epoch.",
                    hint="Give what can be iterated again, or a function of the epoch that returns an iterator.",
                )
            self._spent = True
        for part, method, number in (
            ("sampler", "set_epoch", epoch),
            ("generator", "manual_seed", derived_seed(self.seed, epoch)),
        ):
            call = getattr(getattr(source, part, None), method, None)
            if call is not None:
                call(number)
        return iter(source)


def as_dataset(source: Any) -> Dataset | None:
    """The data set that `source` means: a set, arrays by name, or the path of one; `None` for anything else."""
    if isinstance(source, Dataset):
        return source
    if isinstance(source, Mapping):
        return Arrays(source)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        return ImageFolder(path) if is_image_folder(path) else read_arrays(path)
    return None


def as_batches(
    source: Any,
    manifest: Manifest,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool | None = None,
    prefetch: int | None = None,
    names: Mapping[str, str] | None = None,
) -> Batches:
    """Batches of whatever holds data.

    Args:
        source: Arrays by name; the path of an `.npz` or `.npy` file or of a folder with images per class; a `Dataset`; an
            iterable of batches, such as a PyTorch `DataLoader`, or a function of the epoch that returns one, for which
            `batch_size`, `shuffle` and `drop_last` mean nothing; or `Batches`, which are returned as they are.
        manifest: Of the program that the batches are for.
        batch_size: Samples in a batch, as for `Loader`.
        shuffle: Whether each epoch has an order of its own.
        seed: Of that order.
        drop_last: Whether a smaller last batch is left out.
        prefetch: Batches to make ahead in a thread.
        names: Input of the program -> name of its array, where they cannot be told.

    Raises:
        ArgumentError: The data cannot be read, or do not fit the program.
    """
    if isinstance(source, Batches):
        return source
    dataset = as_dataset(source)
    if dataset is not None:
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        return Loader(dataset, manifest, prefetch=prefetch, names=names, **options)
    if isinstance(source, Iterable) or callable(source):
        return Stream(source, manifest, seed=seed, prefetch=prefetch or 0, names=names)
    raise ArgumentError(
        f"{source!r} holds no data.",
        hint="Give arrays by name, a file, a folder of images, or an iterable of batches.",
    )
