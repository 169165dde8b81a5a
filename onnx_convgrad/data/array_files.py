"""Files of arrays, `.npy` and `.npz`: memory-mapped where they are not compressed, and never unpickled."""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnx_convgrad.base.paths import opened
from onnx_convgrad.errors import ArgumentError, first_few


def read_npy(path: Path) -> np.ndarray:
    """The array of an `.npy` file; raises `ArgumentError` if it does not hold a plain array."""
    with _reading(path) as file:
        if file.read(2) == b"PK":
            raise ArgumentError(f"{str(path)!r} holds several arrays, not one.", hint="Pass the path of an .npz alone.")
        file.seek(0)
        shape, by_columns, dtype = _header(file, os.fstat(file.fileno()).st_size)
        if 0 in shape or not shape:
            file.seek(0)
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
        return np.memmap(file, dtype, "r", file.tell(), shape, "F" if by_columns else "C")


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file; raises `ArgumentError` if it does not hold plain arrays."""
    with _reading(path) as raw, zipfile.ZipFile(raw) as archive:
        members, size = archive.infolist(), os.fstat(raw.fileno()).st_size
        _check_members(members, size)
        arrays = {info.filename.removesuffix(".npy"): _member(archive, info, raw) for info in members}
        if len(arrays) < len(members):
            raise ValueError("two of its arrays have the same name")
        return arrays


def _check_members(members: Sequence[zipfile.ZipInfo], size: int) -> None:
    """Raise ValueError for an archive of `size` bytes that would not be read in reasonable memory."""
    for info in members:
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{info.filename!r} is compressed by another method than that of np.savez_compressed")
        if info.compress_size > size or (info.compress_type == zipfile.ZIP_STORED and info.file_size > size):
            raise ValueError(f"{info.filename!r} is cut off")
    packed = [info for info in members if info.compress_type != zipfile.ZIP_STORED]
    expanded = sum(info.file_size for info in packed)
    if expanded > max(_EXPANDED, _RATIO * size):
        raise ValueError(
            f"{first_few([repr(info.filename) for info in packed], 3)} {'has' if len(packed) == 1 else 'have'} "
            f"{size:,} bytes and expand{'s' * (len(packed) == 1)} to {expanded:,}; "
            "np.savez, which does not compress, writes arrays that are read piece by piece"
        )


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, raw: BinaryIO) -> np.ndarray:
    """One array of an `.npz`: memory-mapped if it is stored uncompressed, else read."""
    with archive.open(info) as file:
        shape, by_columns, dtype = _header(file, info.file_size)
        header = file.tell()
        if info.compress_type != zipfile.ZIP_STORED or 0 in shape or not shape:
            file.seek(0)
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
    raw.seek(info.header_offset + 26)  # the lengths of the name and of the extra field, which precede the data
    name, extra = np.frombuffer(raw.read(4), "<u2")
    start = info.header_offset + 30 + int(name) + int(extra) + header
    return np.memmap(raw, dtype, "r", start, shape, "F" if by_columns else "C")


_EXPANDED, _RATIO = 2**30, 200
"""Most bytes of compressed arrays in a small file, and their most bytes per byte of a file: more could fill the memory."""


def _header(file: Any, size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, order and type of an array of numbers; raise ValueError unless it fills a file of `size` bytes."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"it has the unknown version {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded: they can run any code; save numbers, array.astype(np.int64)")
    if dtype.kind not in "biufcSUMm":
        raise ValueError(f"it holds {dtype}, not numbers")
    wanted, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or wanted > there:
        raise ValueError(f"its shape {shape} of {dtype} takes {wanted:,} bytes, and it has {there:,}")
    if 0 in shape and max(shape) > _EMPTY:
        raise ValueError(f"its shape {shape} holds no numbers, but more than {_EMPTY:,} samples")
    return shape, by_columns, dtype


_EMPTY = 2**24
"""Most samples without numbers: a file of no size can name any number of these, and their order alone takes memory."""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file, and turn whatever the block finds wrong with it into an `ArgumentError`."""
    with opened(path) as file:
        try:
            yield file
        except ArgumentError:
            raise
        except Exception as problem:
            reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
            reason = reason[:300].rstrip(".") or type(problem).__name__
            raise ArgumentError(f"{str(path)!r} could not be read as arrays: {reason}.") from problem
