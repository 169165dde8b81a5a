"""Make batches for a training program: shuffled and cast, reproducible by seed and epoch, optionally prefetched.

Args:
    epoch: Number of the epoch, counted from 0, which decides the order.
    start: Number of the first batch that is wanted.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.base.boundary import CallersCode, from_caller, typed_errors
from onnx_convgrad.base.numbers import flag, whole
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.data.checks import check_batch, check_labels
from onnx_convgrad.data.columns import Columns, is_columns
from onnx_convgrad.data.datasets import Arrays, Dataset, Part, Rows, permutation, read_arrays, seed_sequence
from onnx_convgrad.data.images import ImageFolder, is_image_folder
from onnx_convgrad.data.inputs import STATE_ROWS, Batch, BatchLike, ProgramInputs, as_array
from onnx_convgrad.data.prefetch import prefetched
from onnx_convgrad.data.sample_weights import ClassWeight, weights_of_samples
from onnx_convgrad.data.sequences import Sequences
from onnx_convgrad.data.texts import TextImages, is_table
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.losses.sample_weight import SAMPLE_WEIGHT
from onnx_convgrad.programs.manifest import Manifest

_PROBED = 8
"""Samples that `Loader.probe` looks at."""

_GROUPED = 50
"""Batches among which sequences are sorted by length, as the Trainer of transformers does."""

BATCH_SIZE = 32
"""Default number of samples in a batch."""


@runtime_checkable
class Batches(Protocol):
    """The data of a training run. May have a length: the number of batches of an epoch."""

    def epoch_iterator(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on; the same for the same arguments."""

    def describe(self) -> dict[str, Any]:
        """A description that distinguishes these data from others, as JSON values; checkpoints contain it."""


DataLike: TypeAlias = (
    Dataset
    | Batches
    | Mapping[str, ArrayLike | os.PathLike[str]]
    | str
    | os.PathLike[str]
    | Iterable[BatchLike]
    | Callable[[int], Iterable[BatchLike]]
)
"""Anything that `as_batches` takes."""


def shard_of(count: int, rank: int, size: int) -> slice:
    """The samples of one of `size` ranks, out of `count`: as even as possible, the first ranks have more."""
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


class Loader:
    """Batches of a data set.

    Args:
        dataset: The samples.
        manifest: Manifest of the program that takes the batches.
        batch_size: Samples in a batch; by default the fixed size of the program, or else 32.
        shuffle: Whether each epoch has a new order, drawn from `seed` and the number of the epoch.
        seed: Seed of the order.
        drop_last: Leave out a smaller last batch; by default only if the program has a fixed batch size.
        prefetch: Number of batches to make ahead in a thread; by default 2 if the data come from files, else 0.
        names: Input of the program -> name of its array, for inputs that cannot be matched automatically.
        augment: Whether samples are changed at random, as their set says; `Trainer.fit` does so with the data to train on.
        sample_weight: Weight of each sample in a loss with `sample_weight=True`. An array of this name in the data does the
            same; both are multiplied.
        class_weight: Weights of samples by their class: `"balanced"`, with which all classes count equally (see
            `class_weights`), or a mapping from classes to weights, where others weigh 1.
        group_by_length: Put sequences of about one length into a batch, so that less is padded. With `shuffle`, the order is
            still drawn: sequences are sorted by length within every 50 batches, whose order is then drawn again.

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
        augment: bool = False,
        sample_weight: ArrayLike | None = None,
        class_weight: ClassWeight | None = None,
        group_by_length: bool = False,
    ) -> None:
        self.dataset, self.augment = dataset.bound(manifest), flag(augment, "augment")
        self.inputs = ProgramInputs(manifest, names)
        self.inputs.preprocessing = self.dataset.preprocessing or self.inputs.preprocessing
        self.manifest = manifest
        self.weights = weights_of_samples(self.dataset, manifest, sample_weight, class_weight)
        self.lengths = self.dataset.sequence_lengths() if flag(group_by_length, "group_by_length") else None
        if group_by_length and self.lengths is None:
            raise ArgumentError(
                "group_by_length is for sequences of different lengths, and the data have none.",
                hint="Give them as lists of arrays, or leave it out.",
            )
        self._check_all_labels()
        fixed = self.inputs.batch_size()
        self.batch_size = (fixed or BATCH_SIZE) if batch_size is None else whole(batch_size, "batch_size")
        if fixed not in (None, self.batch_size):
            self.inputs.refuse_fixed_batch(f"The program takes batches of {fixed}, not of {self.batch_size}.")
        self.shuffle, self.seed = flag(shuffle, "shuffle"), whole(seed, "seed", 0)
        self.drop_last = fixed is not None if drop_last is None else flag(drop_last, "drop_last")
        if not len(self):
            kind, count = "samples", len(self.dataset)
            if isinstance(self.dataset, Sequences):
                kind, count = "sequences", self.dataset.count
            raise ArgumentError(
                f"{count} {kind} make no batch of {self.batch_size}, and smaller ones are left out.",
                hint=f"Give more {kind}."
                if fixed is not None
                else f"Give more {kind}, or a batch size of at most {count} (batch_size=, --batch-size).",
            )
        self.prefetch = (2 if self.dataset.slow else 0) if prefetch is None else whole(prefetch, "prefetch", 0)
        if self.augment:
            self.dataset.mixing.check(manifest)
        self.own: Callable[[int], slice] | None = None
        first = slice(0, min(self.batch_size, len(self.dataset)))
        self._batch(first, self.dataset)  # reports arrays that do not fit at once

    def __len__(self) -> int:
        if isinstance(self.dataset, Sequences):  # another order may make a few more or less
            return sum(1 for _ in self._rows(0, 0))
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def epoch_iterator(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on; earlier ones are not read."""
        return prefetched(self._batches(epoch, start), self.prefetch)

    def describe(self) -> dict[str, Any]:
        """A description of the data for checkpoints."""
        options = ("batch_size", "shuffle", "seed", "drop_last")
        return {**self.dataset.describe(), **{name: getattr(self, name) for name in options}}

    def rows(self, epoch: int, number: int) -> Rows:
        """The numbers of the samples in one batch of an epoch, in the set that a part was split from.

        Args:
            epoch: Number of the epoch, counted from 0.
            number: Number of the batch.
        """
        return self._numbers(next(self._rows(epoch, number)))

    def shard(self, rank: int, size: int) -> Loader:
        """The loader of one of several ranks: its shard of every batch, or an empty mapping where it has none.

        Args:
            rank: Number of the rank, from 0.
            size: Number of ranks.

        Raises:
            ArgumentError: The program takes batches of a fixed size.
        """
        if isinstance(self.dataset, Sequences):
            raise ArgumentError(
                f"Streams of sequences run on one rank, not on {size}.",
                hint="Train in one process; or let each rank cut its own sequences, and call step with its parts.",
            )
        fixed = self.inputs.batch_size()
        if fixed is not None:
            self.inputs.refuse_fixed_batch(
                f"The program takes batches of {fixed}, which {size} ranks cannot divide among themselves."
            )
        loader = copy.copy(self)
        loader.own = partial(shard_of, rank=rank, size=size)
        return loader

    def probe(self) -> int:
        """A checksum of the first samples, which differs between data of the same kind and size."""
        with CallersCode(self.dataset):
            arrays = self.dataset.take(slice(0, min(_PROBED, len(self.dataset))))
        total = 0
        for name in sorted(arrays):
            total = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), total)
        return total

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        dataset = self.dataset.augmented(self.seed, epoch) if self.augment else self.dataset
        for rows, before in self._placed(epoch, start):
            batch = self._batch(rows, dataset)
            if self.manifest.states and batch:
                batch[STATE_ROWS] = before
            yield batch

    def _placed(self, epoch: int, start: int) -> Iterator[tuple[Rows, np.ndarray]]:
        """The samples of each batch, with their rows in the batch before: -1, except for parts that continue a stream."""
        if isinstance(self.dataset, Sequences):
            yield from islice(self._streams(self.dataset, epoch), start, None)
            return
        for rows in self._rows(epoch, start):
            yield rows, np.full(rows.stop - rows.start if isinstance(rows, slice) else len(rows), -1)

    def _streams(self, dataset: Sequences, epoch: int) -> Iterator[tuple[Rows, np.ndarray]]:
        order = permutation(dataset.count, self.seed, epoch) if self.shuffle else np.arange(dataset.count)
        for rows, before in dataset.streams(self.batch_size, order):
            if len(rows) < self.batch_size and self.drop_last:
                return
            yield rows, before

    def _rows(self, epoch: int, start: int) -> Iterator[Rows]:
        if isinstance(self.dataset, Sequences):
            yield from (rows for rows, _ in islice(self._streams(self.dataset, epoch), start, None))
            return
        samples, size = len(self.dataset), self.batch_size
        order = permutation(samples, self.seed, epoch) if self.shuffle else None
        if self.lengths is not None:
            order = by_length(self.lengths, size, order, (self.seed, epoch))
        for first in range(start * size, len(self) * size, size):
            rows = slice(first, min(first + size, samples))
            if self.own is not None:
                own = self.own(rows.stop - rows.start)
                rows = slice(first + own.start, first + own.stop)
            yield rows if order is None else order[rows]

    def _batch(self, rows: Rows, dataset: Dataset) -> Batch:
        if not (rows.stop - rows.start if isinstance(rows, slice) else len(rows)):
            return {}
        with CallersCode(dataset):
            arrays = dataset.take(rows)
        if self.weights is not None:
            name = self.inputs.names.get(self.manifest.sample_weight or "", SAMPLE_WEIGHT)
            arrays = {**arrays, name: self.weights[rows] * as_array(arrays.get(name, 1))}
        batch = check_batch(self.inputs(arrays), self.manifest, lambda i: _number(self._numbers(rows), i))
        if not dataset.mixing.drawn:
            return batch
        return dataset.mixing(batch, self.manifest, first_of(rows))

    def _numbers(self, rows: Rows) -> Rows:
        """The numbers of samples in the set that a part was split from."""
        return self.dataset.rows[rows] if isinstance(self.dataset, Part) else rows

    def _check_all_labels(self) -> None:
        """Refuse labels out of range in arrays before the first step."""
        whole = self.dataset.source
        if isinstance(whole, Arrays) and self.manifest.classes:
            for port, name in self.inputs.match(whole.names).items():
                array = whole.arrays.get(name)
                if port in self.manifest.classes and isinstance(array, np.ndarray) and array.dtype.kind in "iu":
                    check_labels(name, array, *self.manifest.classes[port], lambda i: _number(slice(0), i))


def by_length(lengths: np.ndarray, size: int, drawn: np.ndarray | None, seeds: tuple[int, ...]) -> np.ndarray:
    """An order of samples with batches of `size` of about one length; sorted, unless an order was `drawn`."""
    if drawn is None:
        return np.argsort(lengths, kind="stable")
    parts = np.split(drawn, range(_GROUPED * size, len(drawn), _GROUPED * size))
    order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in parts])
    full = len(order) // size
    batches = order[: full * size].reshape(full, size)[permutation(full, *seeds, _GROUPED)]
    return np.concatenate([batches.reshape(-1), order[full * size :]])


def first_of(rows: Rows) -> int:
    """The number of the first sample."""
    return int((rows.start or 0) if isinstance(rows, slice) else rows[0])


def _number(rows: Rows, i: int) -> str:
    return f"sample {(rows.start or 0) + i if isinstance(rows, slice) else rows[i]}, counted from 0"


class Stream:
    """Batches of any iterable. Other arguments as for `Loader`.

    Args:
        source: An iterable of batches, such as a list, a PyTorch `DataLoader` or a `tf.data.Dataset`, iterated in each
            epoch; or a function from the epoch to an iterable, for orders that can be repeated. A sampler's `set_epoch` is
            called, and the `generator` of a `DataLoader` is seeded with `seed` and the epoch.
        seed: Seed of such a generator.
        prefetch: Number of batches to take ahead in a thread.
    """

    def __init__(
        self,
        source: Iterable[BatchLike] | Callable[[int], Iterable[BatchLike]],
        manifest: Manifest,
        *,
        seed: int = 0,
        prefetch: int = 0,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.source, self.seed, self.prefetch = source, whole(seed, "seed", 0), whole(prefetch, "prefetch", 0)
        self.inputs, self.manifest = ProgramInputs(manifest, names), manifest
        self._rest: Iterator[Batch] | None = None

    def __len__(self) -> int:
        """Number of batches; raises TypeError if the source has no length."""
        source: Any = self.source
        return len(source)

    @property
    def goes_on(self) -> bool:
        """Whether the next epoch goes on where the last one has left an iterator."""
        return self._rest is not None

    def epoch_iterator(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch; those before `start` are read from the source and skipped.

        An iterator goes on where the epoch before has left it.

        Raises:
            ArgumentError: The epochs before have taken all batches of an iterator.
        """
        if self._rest is not None:
            return self._going_on(self._rest)
        reader = copy.copy(self)  # held by the reading thread, so that this stream can be dropped
        batches = prefetched(reader._batches(epoch, start), self.prefetch)  # noqa: SLF001 - a stream, too
        if isinstance(self.source, Iterator):
            self._rest = batches
        return batches

    def describe(self) -> dict[str, Any]:
        """A description of the data for checkpoints."""
        source: Any = self.source
        sizes = {}
        with suppress(TypeError):  # of an endless one, or one whose length is not known
            sizes["batches"] = len(source)
        batch = getattr(source, "batch_size", None)
        return {
            "kind": "iterable",
            "type": getattr(source, "__qualname__", type(source).__qualname__),
            **sizes,
            **({"batch_size": batch} if isinstance(batch, int) else {}),
            "seed": self.seed,
        }

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        batches = from_caller(self.source, lambda: islice(self._opened(epoch), start, None))
        for number, batch in enumerate(batches, start + 1):
            yield check_batch(self.inputs(batch), self.manifest, partial(_of_stream, number))

    def _going_on(self, rest: Iterator[Batch]) -> Iterator[Batch]:
        """The batches that an iterator has left: `rest`, of which one is read at once."""
        first = next(rest, None)
        if first is None:
            raise ArgumentError(
                f"The data are a {type(self.source).__name__}, which gives its batches only once: "
                "there is nothing left for another epoch.",
                hint="Give a list or another reiterable object, or a function from the epoch to an iterator.",
            )
        return chain([first], rest)

    def _opened(self, epoch: int) -> Iterator[BatchLike]:
        source = self.source
        if not isinstance(source, Iterable):
            return called(source, epoch)
        seed = int(seed_sequence(self.seed, epoch).generate_state(1, np.uint64)[0] >> np.uint64(1))  # 63 bits
        for part, method, number in (("sampler", "set_epoch", epoch), ("generator", "manual_seed", seed)):
            call = getattr(getattr(source, part, None), method, None)
            if call is not None:
                call(number)
        return iter(source)


def _of_stream(batch: int, i: int) -> str:
    return f"sample {i} of batch {batch}; samples count from 0, batches from 1"


def as_dataset(source: DataLike) -> Dataset | None:
    """Convert a data set, also one of Hugging Face's, arrays by name, or a path to a data set; `None` for anything else.

    Args:
        source: A data set, arrays by name, or a path.
    """
    if isinstance(source, Dataset):
        return source
    if isinstance(source, Mapping):
        return Arrays(source)
    if isinstance(source, (str, os.PathLike)):
        path = as_path(source, "The path of data")
        if is_table(path):
            return TextImages(path)
        return ImageFolder(path) if is_image_folder(path) else read_arrays(path)
    return Columns(source) if is_columns(source) else None


def split_off(source: DataLike, share: float, manifest: Manifest, seed: int) -> tuple[Dataset, Dataset]:
    """Split data into a part to train on and one, with this share of each class, to evaluate on; see `Dataset.split`.

    Raises:
        ArgumentError: The data are batches already, or a part would be empty.
    """
    dataset = as_dataset(source)
    if dataset is None:
        raise ArgumentError(
            f"validation={share} holds out samples, and the data are batches already: {type(source).__name__}.",
            hint="Give arrays by name, a file, a folder or a data set, or the data to evaluate on.",
        )
    return dataset.bound(manifest).split(share, seed)


def data_only(source: Any, epoch: int, count: int, several: Collection[int] | None = None) -> Iterator[BatchLike]:
    """The batches of an iterable, or of a function from the epoch, without the labels in those that are sequences.

    The data come first in a sequence: `count` arrays. One with labels has one of the numbers `several`, or by default any.
    """
    for batch in from_caller(source, lambda: iter(source) if hasattr(source, "__iter__") else called(source, epoch)):
        has_targets = isinstance(batch, (list, tuple)) and (several is None or len(batch) in several)
        yield batch[:count] if has_targets else batch


def called(source: Callable[[int], Any], epoch: int) -> Iterator[BatchLike]:
    """The batches that a function returns for an epoch."""
    opened = source(epoch)
    if not isinstance(opened, Iterable):
        raise ArgumentError(
            f"The function for the data returned {opened!r}, not batches.",
            hint="Return an iterable of batches for each epoch, such as a list of {'x': x, 'y': y}.",
        )
    return iter(opened)


@typed_errors
def as_batches(
    source: DataLike,
    manifest: Manifest,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool | None = None,
    prefetch: int | None = None,
    names: Mapping[str, str] | None = None,
    augment: bool = False,
    sample_weight: ArrayLike | None = None,
    class_weight: ClassWeight | None = None,
    group_by_length: bool = False,
) -> Batches:
    """Convert any source of data to batches.

    `source` is a `Dataset`, a `datasets.Dataset` of Hugging Face, arrays by name, or the path of an `.npz` or `.npy` file or
    of a folder with images per class, read by a `Loader`; an iterable of batches, such as a PyTorch `DataLoader` or a
    `tf.data.Dataset`, or a function from the epoch to one, read by a `Stream`; or `Batches`, which are returned unchanged.
    Other arguments as for `Loader`.

    Args:
        source: The data, as above.

    Raises:
        ArgumentError: The data cannot be read, or do not fit the program.
    """
    dataset = None if isinstance(source, Batches) else as_dataset(source)
    if dataset is None and not (sample_weight is None and class_weight is None):
        raise ArgumentError(
            f"sample_weight and class_weight are for arrays, files and data sets, not for {type(source).__name__}.",
            hint=f"Give each batch an array {SAMPLE_WEIGHT!r}.",
        )
    if dataset is None and flag(group_by_length, "group_by_length"):
        raise ArgumentError(
            f"group_by_length is for lists of sequences, and the data are batches already: {type(source).__name__}.",
            hint="Leave it out.",
        )
    if isinstance(source, Batches):
        return source
    flag(shuffle, "shuffle")
    if dataset is not None:
        return Loader(dataset, manifest, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last,
                      prefetch=prefetch, names=names, augment=augment, sample_weight=sample_weight,
                      class_weight=class_weight, group_by_length=group_by_length)  # fmt: skip
    single = isinstance(source, np.ndarray) and source.ndim == 0
    if (isinstance(source, Iterable) or callable(source)) and not single:
        return Stream(source, manifest, seed=seed, prefetch=prefetch or 0, names=names)
    raise ArgumentError(
        f"{source!r} is not a source of data.",
        hint="Give arrays by name, a file, a folder of images, or an iterable of batches.",
    )
