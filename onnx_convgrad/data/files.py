"""Data to predict or evaluate on: image files and folders of them, with or without classes, and files of arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.base.paths import as_path, check_regular
from onnx_convgrad.data.batches import DataLike
from onnx_convgrad.data.columns import Columns, is_columns
from onnx_convgrad.data.datasets import Arrays, Dataset, Rows, named_arrays
from onnx_convgrad.data.image_set import IMAGE, ImageSet, is_assumed
from onnx_convgrad.data.images import SUFFIXES, ImageFolder, images_directly_in, images_in, is_image_folder
from onnx_convgrad.data.pictures import image_port
from onnx_convgrad.data.texts import TextImages, is_table
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.manifest import Manifest


class ImageFiles(ImageSet):
    """Image files in the order given, without classes, prepared as a model's file says.

    Args:
        files: The files.
    """

    def __init__(self, files: Iterable[str | os.PathLike[str]]) -> None:
        super().__init__()
        self.files = [as_path(file, "The path of an image") for file in files]
        if not self.files:
            raise ArgumentError("There are no images.", hint="Name image files, or a folder of them.")
        for file in self.files:
            check_regular(file)

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        return {IMAGE: self._images(rows)[1]}

    def describe(self) -> dict[str, Any]:
        return {"kind": "image files", "samples": len(self)}


def read_data(data: DataLike | Sequence[str | os.PathLike[str]]) -> Any:
    """Open what `predict` and `evaluate` take: paths become a data set, everything else stays as it is.

    Paths are image files, a folder of images (with one folder per class, or without), a table of images and texts (`.csv`,
    `.tsv`, `.txt`), or files of arrays, of which several may be given, also as `NAME=PATH`.

    Raises:
        ArgumentError: A path is missing or of no known kind.
    """
    if isinstance(data, np.ndarray) and data.ndim:
        return Arrays({"data": data})
    if is_columns(data):
        return Columns(data)
    if isinstance(data, (str, os.PathLike)):
        data = [data]
    paths = [p for p in data if isinstance(p, (str, os.PathLike))] if isinstance(data, (list, tuple)) else []
    return _of_paths(list(map(os.fsdecode, paths))) if paths and len(paths) == len(data) else data  # type: ignore[arg-type]


def _of_paths(entries: list[str]) -> Dataset:
    paths = [as_path(entry, "The path of data") for entry in entries]
    if len(paths) == 1 and is_table(paths[0]):
        return TextImages(paths[0])
    if len(paths) == 1 and is_image_folder(paths[0]) and not images_directly_in(paths[0]):
        return ImageFolder(paths[0])
    files: list[Path] = []
    others: list[Path] = []
    for path in paths:
        pictures = [path] if path.suffix.lower() in SUFFIXES else []
        found = images_in(path) if path.is_dir() else pictures
        files += found
        others += [] if found else [path]
    arrays = named_arrays(others)
    if files and arrays:
        raise ArgumentError(
            f"The data are images and arrays at once: {str(files[0])!r} and {str(others[0])!r}.", hint="Give one kind."
        )
    return ImageFiles(files) if files else Arrays(arrays)


def require_preprocessing(dataset: object, manifest: Manifest) -> None:
    """Refuse images if the manifest does not say how pixels become numbers: a guess could be wrong without an error.

    Raises:
        ArgumentError: Nothing says it.
    """
    if isinstance(dataset, ImageSet) and is_assumed(image_port(manifest.data), manifest.preprocessing, {}):
        raise ArgumentError(
            "The model's file does not say how images become its input: it has no metadata 'onnx_convgrad.preprocessing'.",
            hint="Give what the model was trained with: --preprocessing imagenet (or clip, inception, unit, raw), or "
            "--mean and --std (of pixels in [0, 1]), --scale if pixels are not divided by 255, --image-size and --resize; "
            "--preprocessing unit means pixels in [0, 1]. In Python: preprocessing=, such as 'imagenet', here or of "
            "data.ImageFolder.",
        )


def sample_names(dataset: object, count: int) -> tuple[str, ...]:
    """A name for each sample: its file, relative to the folder of a set with classes, or its number from 0."""
    files = [Path(file[0] if isinstance(file, tuple) else file) for file in getattr(dataset, "files", [])]
    if len(files) != count:
        return tuple(map(str, range(count)))
    folder = getattr(dataset, "folder", None)
    return tuple(str(f.relative_to(folder)) if folder and f.is_relative_to(folder) else str(f) for f in files)
