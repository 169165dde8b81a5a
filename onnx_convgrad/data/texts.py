"""Images with texts, for recognizers that are trained with the loss CTC."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.base.numbers import whole
from onnx_convgrad.base.paths import Folder, as_path, check_regular, inside, read_text
from onnx_convgrad.data.alphabet import Alphabet
from onnx_convgrad.data.datasets import Dataset, Rows
from onnx_convgrad.data.images import (
    IMAGE,
    check_size,
    given_preprocessing,
    images_directly_in,
    overridden,
    wanted_preprocessing,
)
from onnx_convgrad.data.pictures import ImageReader, check_pillow, image_port
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.lowering.cost.calibration import cores
from onnx_convgrad.programs.manifest import Manifest

TABLES = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
"""Suffix of a table of images and texts -> what is between its columns."""

_HEADINGS = frozenset("file files filename image images path".split())

_LARGEST = 2**27
"""Most bytes of a table of images and texts."""

TARGET, LENGTHS = "target", "target_lengths"


class TextImages(Dataset):
    """Images of texts, resized to the height of the input and padded on the right to its width with their last column.

    Args:
        source: A table (`.csv`, or `.tsv` and `.txt` with tabs) with the columns file and text, whose files are relative to
            its folder; a first row with `file`, `filename`, `image` or `path` is a heading. Or a folder of images that are
            named for their texts: `hello.png`, and `hello_2.png` for a second one.
        size: Height and width, where the input leaves them free.
        mean: Subtracted from each channel after scaling to [0, 1].
        std: Divisor of each channel after the subtraction.
        scale: Factor of the pixels, by default 1/255.
        preprocessing: All of these in one value, or a name, as for `ImageFolder`; the arguments above win.
        labels: The characters by class; by default those of the model's file.
        workers: Number of threads that read images; by default the number of cores.

    Attributes:
        files: The image of each sample.
        texts: The text of each sample.
        codes: The classes of the characters of each text, once the set is bound to a program that is trained with CTC.
        names: The arrays with these classes and their numbers.
        classes: The characters by class, once the set is bound to a program.

    Raises:
        ArgumentError: The table or a file is missing or cannot be read, or a character is not known.
    """

    slow = True

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        size: tuple[int, int] | int | None = None,
        mean: Sequence[float] | float | None = None,
        std: Sequence[float] | float | None = None,
        scale: float | None = None,
        preprocessing: Preprocessing | str | None = None,
        labels: Sequence[str] | None = None,
        workers: int | None = None,
    ) -> None:
        check_pillow()
        path = as_path(source, "The table of images and texts")
        pairs = _named(path) if path.is_dir() else _listed(path)
        if not pairs:
            raise ArgumentError(
                f"{str(path)!r} holds no images with texts.",
                hint="A row of a table is FILE,TEXT; in a folder, images are named for their texts.",
            )
        self.table = None if path.is_dir() else path
        self.folder = path if self.table is None else path.parent
        self.files, self.texts = [file for file, _ in pairs], [text for _, text in pairs]
        self.labels = None if labels is None else tuple(labels)
        self.workers = cores() if workers is None else whole(workers, "workers")
        self._wanted, named = wanted_preprocessing(preprocessing)
        self._given = {"fit": "pad"} | named | given_preprocessing(size, None, mean, std, scale)
        self.codes: list[list[int]] | None = None
        self.names = TARGET, LENGTHS
        self.reader: ImageReader | None = None

    def __len__(self) -> int:
        return len(self.files)

    def bound(self, manifest: Manifest) -> TextImages:
        """The set for a program, with the layout, channels and size of its image input and its alphabet."""
        port = image_port(manifest.data)
        bound = copy(self)
        bound.reader = ImageReader.of(port, overridden(self._wanted or manifest.preprocessing, self._given))
        if self.table is not None:
            bound.reader = replace(bound.reader, folder=Folder.of_file(self.table))
        bound.preprocessing = bound.reader.preprocessing
        check_size(port, bound.preprocessing, self._given.get("size"))
        term = next((t for t in manifest.losses if t["loss"] == "CTC"), None)
        if term is not None and term["options"].get("input_lengths"):
            raise ArgumentError(
                "Images of texts have no lengths of their own, which the loss takes.", hint="Leave input_lengths out."
            )
        labels = self.labels or manifest.labels
        if term is not None:
            blank = term["options"].get("blank", 0)
            count = manifest.characters.get(term["target"], {}).get("classes")
            alphabet = Alphabet.of_labels(labels, count, blank) if labels else Alphabet.of_texts(self.texts, blank)
            bound.codes = [alphabet.encode(t, str(f)) for f, t in zip(self.files, self.texts, strict=True)]
            bound.names = term["target"], f"{term['target']}_lengths"
            bound.classes = alphabet.labels
        return bound

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        if self.reader is None:
            raise ArgumentError("The image format is not known yet.", hint="Call bound(program.manifest) first.")
        numbers = range(len(self))[rows] if isinstance(rows, slice) else [int(i) for i in rows]
        with ThreadPoolExecutor(self.workers) as pool:
            images = np.stack(list(pool.map(self.reader, [self.files[i] for i in numbers])))
        if self.codes is None:
            return {IMAGE: images}
        codes = np.zeros((len(numbers), max(1, *map(len, self.codes), 1)), np.int64)
        lengths = np.zeros(len(numbers), np.int64)
        for row, i in enumerate(numbers):
            lengths[row] = len(self.codes[i])
            codes[row, : lengths[row]] = self.codes[i]
        return {IMAGE: images, self.names[0]: codes, self.names[1]: lengths}

    def describe(self) -> dict[str, Any]:
        p = self.preprocessing or overridden(self._wanted, self._given)
        options = {"size": p.size and list(p.size), "mean": list(p.mean), "std": list(p.std), "scale": p.scale}
        return {"kind": "texts", "samples": len(self), "classes": list(self.classes), **options}


def is_table(path: Path) -> bool:
    """Whether a path has the suffix of a table of images and texts."""
    return path.suffix.lower() in TABLES and not path.is_dir()


def _named(folder: Path) -> list[tuple[Path, str]]:
    """The images of a folder, and the texts in their names."""
    return [(file, _text_in(file.stem)) for file in images_directly_in(folder)]


def _text_in(stem: str) -> str:
    text, line, number = stem.rpartition("_")
    return text if line and text and number.isdecimal() else stem


def _listed(path: Path) -> list[tuple[Path, str]]:
    """The rows of a table."""
    if path.suffix.lower() not in TABLES:
        raise ArgumentError(
            f"{str(path)!r} is not a table of images and texts.", hint=f"Its name ends in {', '.join(TABLES)}."
        )
    check_regular(path)
    try:
        text = read_text(path, _LARGEST)
        between = TABLES[path.suffix.lower()]
        if between == "\t":
            rows = [line.split("\t") for line in text.splitlines()]
        else:
            rows = list(csv.reader(text.splitlines(), strict=True))
    except ArgumentError:
        raise
    except (OSError, ValueError, csv.Error) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else f"{problem}".rstrip(".")
        raise ArgumentError(
            f"{str(path)!r} could not be read as a table: {reason}.",
            hint="Save it as UTF-8 with two columns, file and text.",
        ) from None
    pairs, folder = [], Folder.of_file(path)
    for number, row in enumerate(rows, 1):
        if not any(row) or (number == 1 and row[0].strip().lower() in _HEADINGS):
            continue
        if len(row) != 2:
            raise ArgumentError(
                f"Row {number} of {str(path)!r} has {len(row)} columns; there must be two, file and text.",
                hint=f"{'A text with commas stands in double quotes.' if between == ',' else 'A tab is between them.'} "
                "Tables are for images of texts; of numbers, save the columns as arrays: "
                "np.savez('data.npz', x=..., target=...).",
            )
        try:
            pairs.append((inside(folder, row[0]), row[1]))
        except ValueError as problem:
            raise ArgumentError(
                f"Row {number} of {str(path)!r} names {row[0]!r:.200}, {problem}.",
                hint="Put the images beside the table; its paths are relative to its folder.",
            ) from None
    return pairs
