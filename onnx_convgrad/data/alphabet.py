"""The characters that a recognizer of texts (CTC) knows, by class; one class is the blank, which stands for no character."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onnx_convgrad.errors import ArgumentError

BLANK = "<blank>"
"""Label of the blank in alphabets that are made here."""


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Labels by class.

    Attributes:
        labels: A character for every class; that of the blank counts for nothing.
        blank: The class that stands for no character.
    """

    labels: tuple[str, ...]
    blank: int = 0

    @classmethod
    def of_labels(cls, labels: Sequence[str], classes: int | None = None, blank: int = 0) -> Alphabet:
        """The alphabet for an output of so many classes; labels that are one too few lack the blank.

        Raises:
            ArgumentError: There are more or fewer labels.
        """
        given = tuple(labels)
        if classes is not None and len(given) == classes - 1:
            given = (*given[:blank], BLANK, *given[blank:])
        if classes is not None and len(given) != classes:
            raise ArgumentError(
                f"There are {len(labels)} labels, and the output has {classes} classes.",
                hint=f"Give one label for each class but the blank ({classes - 1}), or for each ({classes}), with --labels.",
            )
        return cls(given, blank)

    @classmethod
    def of_texts(cls, texts: Iterable[str], blank: int = 0) -> Alphabet:
        """The alphabet of all characters of some texts, sorted."""
        characters = sorted({c for text in texts for c in text})
        return cls((*characters[:blank], BLANK, *characters[blank:]), blank)

    def encode(self, text: str, where: str) -> list[int]:
        """The classes of a text.

        Raises:
            ArgumentError: A character is not in the alphabet; `where` the text stands.
        """
        numbers = {label: i for i, label in enumerate(self.labels) if i != self.blank}
        unknown = next((c for c in text if c not in numbers), None)
        if unknown is not None:
            raise ArgumentError(
                f"The character {unknown!r} in the text {text!r} ({where}) is not among the {len(numbers)} of the model.",
                hint="Give a larger alphabet with --labels FILE (one character on each line), which replaces the last "
                "layer, or correct the text.",
            )
        return [numbers[c] for c in text]

    def decode(self, codes: Iterable[int]) -> str:
        """The text of some classes, blanks left out."""
        return "".join(self.labels[int(c)] for c in codes if int(c) != self.blank)


def greedy(scores: np.ndarray, blank: int) -> tuple[list[int], list[int]]:
    """The best path through scores `[T, classes]`: classes without repeats and blanks, and the first frame of each.

    Graves et al. 2006, section 3.2 (best path decoding).
    """
    best = scores.argmax(1)
    first = np.flatnonzero((best != blank) & (best != np.concatenate([[-1], best[:-1]])))
    return best[first].tolist(), first.tolist()


def edit_distance(a: Sequence[object], b: Sequence[object]) -> int:
    """The least number of insertions, deletions and substitutions that turn one sequence into another (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]
