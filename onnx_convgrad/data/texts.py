"""Images with texts, for recognizers that are trained with the loss CTC."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from onnx_convgrad.base.paths import Folder, as_path, check_regular, inside, read_text
from onnx_convgrad.data.alphabet import Alphabet
from onnx_convgrad.data.datasets import Rows
from onnx_convgrad.data.image_set import IMAGE, ImageSet
from onnx_convgrad.data.images import images_directly_in
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.programs.manifest import Manifest

TABLES = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
"""Suffix of a table of images and texts -> what is between its columns."""

_HEADINGS = frozenset("file files filename image images path".split())

_LARGEST = 2**27
"""Most bytes of a table of images and texts."""

TARGET, LENGTHS = "target", "target_lengths"


class TextImages(ImageSet):
    """Images of texts, resized to the height of the input and padded on the right to its width with their last column.

    Other arguments as for `onnx_convgrad.data.ImageFolder`.

    Args:
        source: A table (`.csv`, or `.tsv` and `.txt` with tabs) with the columns file and text, whose files are relative to
            its folder; a first row with `file`, `filename`, `image` or `path` is a heading. Or a folder of images that are
            named for their texts: `hello.png`, and `hello_2.png` for a second one.
        size: Height and width, where the input leaves them free.
        labels: The characters by class; by default those of the model's file.

    Attributes:
        files: The image of each sample.
        texts: The text of each sample.
        codes: The classes of the characters of each text, once the set is bound to a program that is trained with CTC.
        names: The arrays with these classes and their numbers.
        classes: The characters by class, once the set is bound to a program.

    Raises:
        ArgumentError: The table or a file is missing or cannot be read, or a character is not known.
    """

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
        super().__init__(workers, preprocessing, size=size, mean=mean, std=std, scale=scale)
        self._given |= {"fit": "pad"}
        path = as_path(source, "The table of images and texts")
        folder = path.is_dir()
        pairs = [(f, _text_in(f.stem)) for f in images_directly_in(path)] if folder else _listed(path)
        if not pairs:
            raise ArgumentError(
                f"{str(path)!r} holds no images with texts.",
                hint="A row of a table is FILE,TEXT; in a folder, images are named for their texts.",
            )
        self.table = None if folder else path
        self.folder = path if self.table is None else path.parent
        self.files, self.texts = [file for file, _ in pairs], [text for _, text in pairs]
        self.labels = None if labels is None else tuple(labels)
        self.codes: list[list[int]] | None = None
        self.names = TARGET, LENGTHS

    def bound(self, manifest: Manifest) -> Self:
        """The set for a program, with the layout, channels and size of its image input and its alphabet."""
        bound = super().bound(manifest)
        if self.table is not None and bound.reader is not None:
            bound.reader = replace(bound.reader, folder=Folder.of_file(self.table))
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
        numbers, images = self._images(rows)
        if self.codes is None:
            return {IMAGE: images}
        codes = np.zeros((len(numbers), max(1, *map(len, self.codes), 1)), np.int64)
        lengths = np.zeros(len(numbers), np.int64)
        for row, i in enumerate(numbers):
            lengths[row] = len(self.codes[i])
            codes[row, : lengths[row]] = self.codes[i]
        return {IMAGE: images, self.names[0]: codes, self.names[1]: lengths}

    def describe(self) -> dict[str, Any]:
        return self._described("texts", "size", "mean", "std", "scale")


def is_table(path: Path) -> bool:
    """Whether a path has the suffix of a table of images and texts."""
    return path.suffix.lower() in TABLES and not path.is_dir()


def _text_in(stem: str) -> str:
    """The text in the name of an image."""
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
