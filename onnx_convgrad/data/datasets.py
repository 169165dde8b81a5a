"""Data sets with random access: arrays in memory, memory-mapped `.npz` and `.npy` files, and parts of a set."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.base.boundary import CallersCode
from onnx_convgrad.base.numbers import positive, whole
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.data.array_files import read_npy, read_npz
from onnx_convgrad.data.inputs import USUAL_TARGETS, ProgramInputs, as_array
from onnx_convgrad.data.mixing import Mixing
from onnx_convgrad.data.ragged import Derived, Padding, Ragged, is_ragged
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.programs.manifest import Manifest

Rows = slice | np.ndarray
"""A range of samples, or their numbers."""


class Dataset(ABC):
    """Samples that can be read in any order.

    Attributes:
        slow: Whether samples should be read ahead in a thread.
        classes: Names of the classes by label, if known.
        preprocessing: The way from its images to numbers, if it is known.
        assumed: Whether that is a guess, because neither the model's file nor an option says it.
        mixing: The mixing of the samples of a batch to train on.
    """

    slow = False
    classes: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    assumed = False
    mixing: Mixing = Mixing()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        """Read samples: name -> array.

        Args:
            rows: A range of samples, or their numbers.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe kind and sizes as JSON values."""

    def bound(self, manifest: Manifest) -> Dataset:  # noqa: ARG002 - most sets do not depend on the program
        """The set for a program, whose inputs decide, for example, the size of images.

        Args:
            manifest: The description of the program.
        """
        return self

    def masking(self, name: str, array: str) -> Dataset | None:  # noqa: ARG002 - most sets have no sequences
        """The set with a further array, the mask of sequences; `None` if there are none of this name.

        Args:
            name: Name of the mask.
            array: Name of the sequences.
        """
        return None

    @property
    def source(self) -> Dataset:
        """The set that a part was split from; any other set itself."""
        return self

    @property
    def broken(self) -> Mapping[str, str]:
        """File -> what is wrong with it, for those that were left out or replaced so far."""
        return {}

    def augmented(self, seed: int, epoch: int) -> Dataset:
        """The set to train on in an epoch, with random changes that depend on the arguments and the samples alone.

        Args:
            seed: The seed of the run.
            epoch: Number of the epoch, counted from 0.
        """
        if not self.mixing:
            return self
        changed = copy(self)
        changed.mixing = self.mixing.drawing(seed, epoch)
        return changed

    def class_numbers(self) -> np.ndarray | None:
        """The class of each sample, where samples belong to classes and that is known without reading them."""
        return None

    def sequence_lengths(self) -> np.ndarray | None:
        """The length of each sample `[samples]`, where samples are sequences of different lengths."""
        return None

    def of_one_length(self) -> Dataset:
        """The set with all sequences padded to the longest, not to that of a batch: then results can be concatenated."""
        return self

    def split(self, share: float, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Split into two random disjoint parts, the second one with `share` of the samples, and about of each class.

        Args:
            share: Share of the samples in the second part, above 0 and below 1.
            seed: Seed of the random order.

        Raises:
            ArgumentError: A part would be empty.
        """
        positive(share, "share")
        size = round(len(self) * share) if 0 < share < 1 else 0
        if not 0 < size < len(self):
            raise ArgumentError(
                f"A share of {share} of {len(self)} samples leaves one part empty.",
                hint="Give another share, or more samples; or a file or folder of its own to evaluate on.",
            )
        order, labels = permutation(len(self), seed), self.class_numbers()
        if labels is not None:  # evenly spaced samples of all in the order of their classes
            order = order[np.argsort(labels[order], kind="stable")]
            held = ((np.arange(size) + 0.5) * len(self) / size).astype(np.int64)
            order = np.concatenate([order[held], np.delete(order, held)])
        return Part(self, np.sort(order[size:])), Part(self, np.sort(order[:size]))


def seed_sequence(*seeds: int) -> np.random.SeedSequence:
    """Combine seeds; raises `ArgumentError` for a negative one."""
    return np.random.SeedSequence([whole(seed, "seed", 0) for seed in seeds])


def permutation(count: int, *seeds: int) -> np.ndarray:
    """A random order of `count` samples that depends on the seeds alone, not on numpy's global state."""
    return np.random.Generator(np.random.PCG64(seed_sequence(*seeds))).permutation(count)


class Arrays(Dataset):
    """Arrays by name, with the samples along axis 0.

    A list of arrays or lists is one of sequences, which may differ in length: those of a batch are padded at their end to
    the longest one, or to the size that the input has. Data are padded with 0, and labels of classes with the one that the
    loss ignores. Inputs of the program that take lengths or masks get them: `<input>_lengths` and `<input>_mask`;
    `lengths`, `mask` and `attention_mask` of the only sequences among the data; `target_input_lengths` of CTC, where the
    graph says how many frames a length makes.

    Args:
        arrays: Name -> array, tensor, or the path of a `.npy` file, which is memory-mapped; or a list of sequences.
        augment: Mix the samples of every batch to train on: `"mixup"`, `"cutmix"`, or both.
        padding: Array of sequences -> number that pads it, if it is another one.
        lengths: Input -> array of sequences whose lengths it takes, if names do not settle it.
        masks: Input -> array of sequences whose mask it takes: 1 for entries of the sequence, and 0 for padding.
    """

    def __init__(
        self,
        arrays: Mapping[str, ArrayLike | os.PathLike[str] | Sequence[ArrayLike]],
        *,
        augment: Sequence[str] | str = (),
        padding: Mapping[str, float] | None = None,
        lengths: Mapping[str, str] | None = None,
        masks: Mapping[str, str] | None = None,
    ) -> None:
        self.mixing = Mixing.named(augment)
        if not isinstance(arrays, Mapping):
            raise ArgumentError(
                f"Arrays takes a mapping from names to arrays, not {type(arrays).__name__}.",
                hint="For example Arrays({'x': x, 'y': y}).",
            )
        self.arrays: dict[str, Any] = {str(name): opened_array(value, name) for name, value in arrays.items()}
        if not self.arrays:
            raise ArgumentError("The data hold no arrays.", hint="Give arrays by name, or a file that holds some.")
        for name, array in self.arrays.items():
            if array.ndim == 0:
                raise ArgumentError(
                    f"The array {name!r} is a single number, without an axis of samples.",
                    hint="Give one number for each sample, as in np.full(count, number).",
                )
        self.padding = Padding(padding or {}, lengths or {}, masks or {})
        self.padding.check(self.arrays)
        self.axes: dict[str, int] = {}
        self.derived: dict[str, Derived] = {}
        if not set.intersection(*(set(array.shape) for array in self.arrays.values())):
            len(self)  # no axis can be that of the samples, whatever the program says
        self.slow = any(isinstance(array, np.memmap) for array in self.arrays.values())

    def __len__(self) -> int:
        """Number of samples; raises `ArgumentError` if the arrays have different numbers of them."""
        (first, reference), *rest = self.arrays.items()
        count = reference.shape[self._axis(first)]
        for name, array in rest:
            axis = self._axis(name)
            if array.shape[axis] != count:
                where = "the first axis" if not axis else f"axis {axis} of {name!r}"
                raise ArgumentError(
                    f"The array {first!r} has {count} samples, but {name!r} has {array.shape[axis]}.",
                    hint=f"Their shapes are {reference.shape} and {array.shape}; samples lie along {where}.",
                )
        if not count:
            raise ArgumentError("The arrays hold no samples.", hint="Give arrays with at least one sample.")
        return int(count)

    def _axis(self, name: str) -> int:
        """The axis of the samples in an array; sequences are a list of samples."""
        return 0 if isinstance(self.arrays[name], Ragged) else self.axes.get(name, 0)

    @property
    def names(self) -> list[str]:
        """Names of the arrays of a batch."""
        return [*self.arrays, *self.derived]

    def bound(self, manifest: Manifest) -> Dataset:
        """The set for a program, some of whose inputs may have the samples along another axis than the first."""
        ragged = any(isinstance(array, Ragged) for array in self.arrays.values())
        if not manifest.batch_axes and not ragged:
            return self
        bound = copy(self)
        if ragged:
            bound.arrays, bound.derived = self.padding.fitted(self.arrays, manifest)
        try:
            matches = ProgramInputs(manifest).match(bound.names)
        except ArgumentError:  # the loader says what is missing
            matches = {name: name for name in bound.names}
        axes = {matches[name]: axis for name, axis in manifest.batch_axes.items() if name in matches}
        bound.axes = {
            name: axis for name, axis in axes.items() if name in bound.derived or bound.arrays[name].ndim > axis
        }
        return bound

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        taken: dict[str, np.ndarray] = {}
        for name, array in self.arrays.items():
            axis = self.axes.get(name, 0)
            ragged = isinstance(array, Ragged)
            taken[name] = _moved(array[rows], axis) if ragged else array[(*[slice(None)] * axis, rows)]
        for name, derived in self.derived.items():
            taken[name] = _moved(derived(self.arrays[derived.of], rows), self.axes.get(name, 0))
        return taken

    def masking(self, name: str, array: str) -> Dataset | None:
        if not isinstance(self.arrays.get(array), Ragged):
            return None
        masked = copy(self)
        masked.padding = replace(self.padding, masks={**self.padding.masks, name: array})
        return masked

    def sequence_lengths(self) -> np.ndarray | None:
        first = next((array for array in self.arrays.values() if isinstance(array, Ragged)), None)
        return None if first is None else first.lengths

    def of_one_length(self) -> Arrays:
        alike = copy(self)
        alike.arrays = {
            n: replace(a, size=a.size or int(a.lengths.max(initial=0))) if isinstance(a, Ragged) else a
            for n, a in self.arrays.items()
        }
        return alike

    def class_numbers(self) -> np.ndarray | None:
        arrays = [array for name, array in self.arrays.items() if name.lower() in USUAL_TARGETS]
        whole = len(arrays) == 1 and arrays[0].dtype.kind in "biu" and arrays[0].ndim == 1
        return np.asarray(arrays[0]) if whole else None

    def describe(self) -> dict[str, Any]:
        listed = {name: [str(array.dtype), list(array.shape[1:])] for name, array in self.arrays.items()}
        mixed = {"augment": list(self.mixing.names)} if self.mixing else {}
        return {"kind": "arrays", "samples": len(self), "arrays": listed, **mixed}


def _moved(array: np.ndarray, axis: int) -> np.ndarray:
    """Samples of sequences along the axis that an input has them; one number for each has no other."""
    return np.moveaxis(array, 0, axis) if array.ndim > 1 else array


class Part(Dataset):
    """A subset of a set: the samples with the numbers `rows`.

    Args:
        dataset: The set.
        rows: Numbers of the samples.
    """

    def __init__(self, dataset: Dataset, rows: np.ndarray) -> None:
        self.dataset, self.rows = dataset, rows
        self.slow, self.classes, self.preprocessing = dataset.slow, dataset.classes, dataset.preprocessing
        self.mixing = dataset.mixing

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        with CallersCode(self.dataset):
            return self.dataset.take(self.rows[rows])

    def bound(self, manifest: Manifest) -> Dataset:
        return Part(self.dataset.bound(manifest), self.rows)

    @property
    def source(self) -> Dataset:
        return self.dataset.source

    @property
    def broken(self) -> Mapping[str, str]:
        return self.dataset.broken

    def class_numbers(self) -> np.ndarray | None:
        whole = self.dataset.class_numbers()
        return None if whole is None else whole[self.rows]

    def masking(self, name: str, array: str) -> Dataset | None:
        masked = self.dataset.masking(name, array)
        return None if masked is None else Part(masked, self.rows)

    def sequence_lengths(self) -> np.ndarray | None:
        whole = self.dataset.sequence_lengths()
        return None if whole is None else whole[self.rows]

    def of_one_length(self) -> Dataset:
        return Part(self.dataset.of_one_length(), self.rows)

    def augmented(self, seed: int, epoch: int) -> Dataset:
        return Part(self.dataset.augmented(seed, epoch), self.rows)

    def describe(self) -> dict[str, Any]:
        return {**self.dataset.describe(), "samples": len(self), "of": len(self.dataset)}


# -- files -------------------------------------------------------------------------------------------------------------


def read_arrays(path: str | os.PathLike[str]) -> Arrays:
    """Open the arrays of an `.npz` file, of a `.npy` file, or of the `.npy` files in a folder, named like the files.

    `.npy` files and the members of an uncompressed `.npz` are memory-mapped; compressed members are read into memory.

    Args:
        path: The file or folder.

    Raises:
        ArgumentError: A file is missing or does not hold plain arrays.
    """
    path = as_path(path, "The path of data")
    if path.is_dir():
        files = sorted(path.glob("*.npy"))
        if not files:
            raise ArgumentError(
                f"The folder {str(path)!r} holds neither .npy files nor a folder of images per class.",
                hint="Save arrays there with numpy.save, or put images into one folder per class.",
            )
        return Arrays({file.stem: file for file in files})
    if path.suffix.lower() == ".npy":
        return Arrays({path.stem: path})
    if path.suffix.lower() != ".npz":
        raise ArgumentError(
            f"{str(path)!r} is not a data file of a known type.",
            hint="Give .npz or .npy files, images or a folder of them, or one table of images and texts (.csv, .tsv, .txt).",
        )
    return Arrays(read_npz(path))


def named_arrays(entries: Iterable[str | os.PathLike[str]]) -> dict[str, Any]:
    """The arrays of several files by name; `NAME=PATH` names that of an `.npy` file.

    Raises:
        ArgumentError: Two arrays have one name, or a file is missing or does not hold plain arrays.
    """
    arrays: dict[str, Any] = {}
    for entry in entries:
        name, _, path = os.fspath(entry).rpartition("=")
        named = bool(name) and not Path(entry).exists()
        more: dict[str, Any] = {name: path} if named else dict(read_arrays(entry).arrays)
        doubled = [key for key in more if key in arrays]
        if doubled:
            raise ArgumentError(f"There is more than one array {doubled[0]!r}.", hint="Give each a name: NAME=PATH.")
        arrays |= more
    return arrays


def opened_array(value: Any, name: str) -> np.ndarray | Ragged:
    """An array, that of a file, or sequences."""
    if isinstance(value, Ragged):
        return value
    if is_ragged(value):
        return Ragged.of(value, name)
    if not isinstance(value, (str, os.PathLike)):
        return as_array(value)
    return read_npy(as_path(value, "The path of an array"))
