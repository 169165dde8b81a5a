"""Data sets with random access: arrays in memory and in `.npz` and `.npy` files, memory-mapped, and parts of a set."""

from __future__ import annotations

import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.base.numbers import whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.data.fitting import as_array
from onnx_convgrad.training.program.manifest import Manifest

__all__ = ["Arrays", "Dataset", "Part", "read_arrays"]

Rows = slice | np.ndarray
"""Which samples: a range, or their numbers."""


class Dataset(ABC):
    """Samples that can be read in any order."""

    slow = False
    """Whether reading takes long enough for a thread to do it ahead."""

    classes: tuple[str, ...] = ()
    """Names of the classes that labels are the numbers of, where they are known."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        """Name -> array of these samples."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Kind and sizes, as JSON values."""

    def bound(self, manifest: Manifest) -> Dataset:  # noqa: ARG002 - most need nothing from it
        """The set with what the program's inputs decide, such as the size of pictures."""
        return self

    def split(self, share: float, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Two random parts without a common sample, the second one with `share` of the samples.

        Raises:
            ArgumentError: A part would be empty.
        """
        held = round(len(self) * share) if 0 < share < 1 else 0
        if not 0 < held < len(self):
            raise ArgumentError(f"A share of {share} of {len(self)} samples leaves one part empty.")
        order = permutation(len(self), seed)
        return Part(self, np.sort(order[held:])), Part(self, np.sort(order[:held]))


def check_seed(*seeds: int) -> None:
    """Raise `ArgumentError` for a seed that is negative, or no whole number."""
    for seed in seeds:
        whole(seed, "seed", 0)


def permutation(count: int, *seeds: int) -> np.ndarray:
    """An order of `count` samples that depends on the seeds alone, not on numpy's global state."""
    check_seed(*seeds)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds))).permutation(count)


def derived_seed(*seeds: int) -> int:
    """One 63-bit seed made of several."""
    check_seed(*seeds)
    return int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0] >> np.uint64(1))


class Arrays(Dataset):
    """Arrays by name, with the samples along the first axis of each.

    Args:
        arrays: Name -> array, tensor, or the path of a `.npy` file, which is memory-mapped.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = {str(name): _opened(value) for name, value in arrays.items()}
        if not self.arrays:
            raise ArgumentError("There are no arrays to train on.")
        for name, array in self.arrays.items():
            if array.ndim == 0:
                raise ArgumentError(f"The array {name!r} is a single number, without an axis of samples.")
        (first, reference), *rest = self.arrays.items()
        for name, array in rest:
            if len(array) != len(reference):
                raise ArgumentError(
                    f"The array {first!r} has {len(reference)} samples, but {name!r} has {len(array)}.",
                    hint=f"Their shapes are {reference.shape} and {array.shape}; samples lie along the first axis.",
                )
        if not len(reference):
            raise ArgumentError("The arrays hold no samples.")
        self.slow = any(isinstance(array, np.memmap) for array in self.arrays.values())

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        return {name: array[rows] for name, array in self.arrays.items()}

    def describe(self) -> dict[str, Any]:
        listed = {name: [str(array.dtype), list(array.shape[1:])] for name, array in self.arrays.items()}
        return {"kind": "arrays", "samples": len(self), "arrays": listed}


class Part(Dataset):
    """Some samples of a set, by their numbers."""

    def __init__(self, whole: Dataset, rows: np.ndarray) -> None:
        self.whole, self.rows = whole, rows
        self.slow, self.classes = whole.slow, whole.classes

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        return self.whole.take(self.rows[rows])

    def bound(self, manifest: Manifest) -> Dataset:
        return Part(self.whole.bound(manifest), self.rows)

    def describe(self) -> dict[str, Any]:
        return {**self.whole.describe(), "samples": len(self), "of": len(self.whole)}


# -- files -------------------------------------------------------------------------------------------------------------


def read_arrays(path: str | os.PathLike[str]) -> Arrays:
    """The arrays of an `.npz` file, of one `.npy` file, or of the `.npy` files in a folder, by their names.

    `.npy` files are memory-mapped, and so are the members of an `.npz` that `np.savez` wrote; those of
    `np.savez_compressed` are read into memory.

    Raises:
        ArgumentError: There is no such file, or it does not hold plain arrays.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.npy"))
        if not files:
            raise ArgumentError(f"The folder {str(path)!r} holds neither .npy files nor a folder of images per class.")
        return Arrays({file.stem: file for file in files})
    if path.suffix.lower() == ".npy":
        return Arrays({path.stem: path})
    if path.suffix.lower() != ".npz":
        raise ArgumentError(
            f"{str(path)!r} is not data that can be read.", hint="Give an .npz or .npy file, or a folder of images."
        )
    return Arrays(_read_npz(path))


def _opened(value: Any) -> np.ndarray:
    if not isinstance(value, (str, os.PathLike)):
        return as_array(value)
    path = Path(value)
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as problem:
        raise _unreadable(path, problem) from problem
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"{str(path)!r} holds several arrays, not one.", hint="Give it without a name.")
    return array


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
            return {
                info.filename.removesuffix(".npy"): _member(archive, info, raw, path) for info in archive.infolist()
            }
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as problem:
        raise _unreadable(path, problem) from problem


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, raw: Any, path: Path) -> np.ndarray:
    """One array of an `.npz`: mapped from the file where it is stored as it is, else read."""
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(file)
        header = file.tell()
        stored = info.compress_type == zipfile.ZIP_STORED and not dtype.hasobject and 0 not in shape and shape
        if not stored:
            file.seek(0)
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
    raw.seek(info.header_offset + 26)  # the lengths of the name and of the extra field, which the data follow
    name, extra = np.frombuffer(raw.read(4), "<u2")
    start = info.header_offset + 30 + int(name) + int(extra) + header
    return np.memmap(path, dtype, "r", start, shape, "F" if by_columns else "C")


def _unreadable(path: Path, problem: Exception) -> ArgumentError:
    if isinstance(problem, FileNotFoundError):
        return ArgumentError(f"There is no file {str(path)!r}.")
    said = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
    return ArgumentError(f"{str(path)!r} could not be read as arrays: {said.rstrip('.')}.")
