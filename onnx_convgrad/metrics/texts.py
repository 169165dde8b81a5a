"""Texts of recognizers (CTC): greedy decoding, exact matches and the character error rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from onnx_convgrad.base.optional import imported
from onnx_convgrad.data.alphabet import Alphabet, edit_distance, greedy
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.metrics.metric import Arrays, OfOneOutput
from onnx_convgrad.programs.manifest import Manifest


class Text(NamedTuple):
    """A decoded text, and its confidence: the mean probability of its characters, or of the blanks of an empty text."""

    text: str
    confidence: float


def decoded(probabilities: np.ndarray, alphabet: Alphabet) -> list[Text]:
    """Decode probabilities `[N, T, classes]` greedily."""
    texts = []
    for frames in probabilities:
        codes, first = greedy(frames, alphabet.blank)
        best = frames.max(1)
        confidence = float(best[first].mean() if first else best.mean()) if len(best) else 0.0
        texts.append(Text(alphabet.decode(codes), confidence))
    return texts


def frames_first(shape: Sequence[int | str | None] | None, batch: int | str | None) -> bool:
    """Whether an output of this shape is `[T, N, classes]`: its second axis, and not its first, is that of the samples."""
    return shape is not None and len(shape) == 3 and batch is not None and shape[1] == batch != shape[0]


def samples_first(y: np.ndarray, output: str, *, time_first: bool) -> np.ndarray:
    """An output as `[N, T, classes]`.

    Raises:
        ArgumentError: It has not three axes.
    """
    if y.ndim != 3:
        raise ArgumentError(
            f"The output {output!r} has the shape {y.shape}; texts are read from [N, T, classes] or [T, N, classes].",
            hint="Name another one with --of, in Python output=.",
        )
    return np.moveaxis(y, 1, 0) if time_first else y


@dataclass(slots=True)
class TextCounts:
    """Exact matches, edits and characters so far."""

    samples: int = 0
    exact: int = 0
    edits: int = 0
    characters: int = 0

    def add(self, predicted: Sequence[object], wanted: Sequence[object]) -> None:
        """Count a sample."""
        self.samples += 1
        self.exact += predicted == wanted
        self.edits += edit_distance(predicted, wanted)
        self.characters += len(wanted)

    @property
    def cer(self) -> float:
        """Edits per character of the wanted texts; may be above 1."""
        return self.edits / max(self.characters, 1)

    def result(self) -> dict[str, float]:
        """`exact`, the share of samples without an edit, and `cer`."""
        return {"exact": self.exact / max(self.samples, 1), "cer": self.cer}


@dataclass(frozen=True, kw_only=True)
class OfTexts(OfOneOutput):
    """A metric of an output that is trained with CTC.

    Args:
        blank: Number of the blank.
        time_first: Whether the time is the first axis of the output.
    """

    losses = ("CTC",)
    needs = "ctc", "Use accuracy for classes."

    blank: int = 0
    time_first: bool = False

    def facts(self, term: Mapping[str, Any]) -> dict[str, Any]:
        return {name: term["options"][name] for name in ("blank", "time_first") if name in term["options"]}

    def pairs(self, results: Arrays, batch: Arrays) -> Iterator[tuple[list[int], list[int]]]:
        """The classes on the best path of each sample, and those of its label."""
        y = samples_first(np.asarray(results[self.output or ""]), self.output or "", time_first=self.time_first)
        for scores, wanted in zip(y, codes_of(batch[self.target], batch[f"{self.target}_lengths"]), strict=True):
            yield greedy(scores, self.blank)[0], wanted

    def counts(self, results: Arrays, batch: Arrays) -> TextCounts:
        """Compare the classes on the best paths with the labels."""
        counted = TextCounts()
        for predicted, wanted in self.pairs(results, batch):
            counted.add(predicted, wanted)
        return counted


@dataclass(frozen=True)
class ExactMatch(OfTexts):
    """Share of texts that are predicted without an error, by greedy decoding."""

    title = "exact"

    def __call__(self, results: Arrays, batch: Arrays) -> tuple[float, float]:
        counted = self.counts(results, batch)
        return counted.exact / max(counted.samples, 1), float(counted.samples)


@dataclass(frozen=True)
class CharacterErrorRate(OfTexts):
    """Insertions, deletions and substitutions per character of the labels, by greedy decoding."""

    title = "cer"

    def __call__(self, results: Arrays, batch: Arrays) -> tuple[float, float]:
        counted = self.counts(results, batch)
        return counted.cer, float(counted.characters)


@dataclass(frozen=True)
class WordErrorRate(OfTexts):
    """Insertions, deletions and substitutions per word of the labels, by greedy decoding; counted by the package jiwer.

    Args:
        labels: The characters by class, of which a space separates words; by default those of the model's file.

    Raises:
        ArgumentError: The characters are not known.
        ExecutionError: jiwer is not installed.
    """

    title = "wer"

    labels: Sequence[str] = ()

    def of(self, manifest: Manifest) -> Self:
        found = super().of(manifest)
        labels = self.labels or manifest.labels
        if not labels:
            raise ArgumentError(
                "The metric wer needs the characters by class, which the model's file does not name.",
                hint="Give them: og.metrics.WordErrorRate(labels=[...]), on the command line --labels FILE.",
            )
        imported("jiwer", "The metric wer needs jiwer", "use cer")
        count = manifest.characters.get(found.target, {}).get("classes")
        return replace(found, labels=Alphabet.of_labels(labels, count, found.blank).labels)

    def __call__(self, results: Arrays, batch: Arrays) -> tuple[float, float]:
        jiwer = imported("jiwer", "The metric wer needs jiwer", "use cer")
        alphabet = Alphabet(tuple(self.labels), self.blank)
        texts = [[alphabet.decode(codes) for codes in pair] for pair in self.pairs(results, batch)]
        words = jiwer.process_words([wanted for _, wanted in texts], [predicted for predicted, _ in texts])
        count = words.hits + words.substitutions + words.deletions
        return (words.substitutions + words.deletions + words.insertions) / max(count, 1), float(count)


def codes_of(targets: Any, lengths: Any) -> Iterator[list[int]]:
    """The classes of each label, without its padding."""
    for row, length in zip(np.asarray(targets), np.asarray(lengths), strict=True):
        yield row[: int(length)].tolist()
