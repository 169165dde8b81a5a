"""Metrics of classes and labels: accuracy, precision, recall, F1, IoU, AUROC, perplexity and the confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from onnx_convgrad.base.numbers import whole
from onnx_convgrad.metrics import scores
from onnx_convgrad.metrics.batch_weights import BINARY_LOSSES, CLASS_LOSSES
from onnx_convgrad.metrics.metric import Arrays, OfOneOutput, Total


@dataclass(frozen=True, kw_only=True)
class OfClasses(OfOneOutput):
    """Compares an output with classes (`cross_entropy`, `nll`) or with labels (`bce_with_logits`).

    Args:
        binary: Whether the output has labels instead of classes.
        ignored: The label that does not count.
        axis: Axis of the classes; the loss's by default.
        logits: Whether the output has logits, not probabilities.
    """

    losses: ClassVar[tuple[str, ...]] = (*CLASS_LOSSES, *BINARY_LOSSES)
    needs = "cross_entropy, nll or bce_with_logits", "Give a function (results, batch) -> number as metric instead."

    binary: bool = False
    ignored: int | None = None
    axis: int | None = None
    logits: bool = True

    def facts(self, term: Mapping[str, Any]) -> dict[str, Any]:
        before = term.get("reads", term["output"]) != term["output"]  # the loss reads what a Softmax or Sigmoid takes
        return {
            "binary": term["loss"] in BINARY_LOSSES,
            "ignored": term["options"].get("ignore_index", -100),
            "axis": term["options"].get("axis"),
            "logits": term["loss"] not in ("NLL", "BCE") and not before,
        }

    @property
    def threshold(self) -> float:
        """A label is predicted if its output is above this number."""
        return 0.0 if self.logits else 0.5

    def rows(self, results: Arrays, batch: Arrays) -> scores.Rows:
        """The output and the labels that count, one prediction in a row."""
        y, target = results[self.output or ""], batch[self.target]
        if self.binary:
            return scores.label_rows(y, target)
        return scores.class_rows(y, target, self.ignored, self.axis)


@dataclass(frozen=True)
class Accuracy(OfClasses):
    """Share of labels that the output predicts; labels that the loss ignores do not count.

    With `cross_entropy` and `nll` the label must be among the `top` classes with the largest outputs; with
    `bce_with_logits` the sign of each entry is compared, or whether it is above 0.5 if the output ends in Sigmoid.

    Args:
        top: Number of predicted classes.
    """

    top: int = 1

    def __post_init__(self) -> None:
        whole(self.top, "top")

    @property
    def title(self) -> str:  # type: ignore[override]
        """`accuracy` or, for example, `top5`."""
        return "accuracy" if self.top == 1 else f"top{self.top}"

    def __call__(self, results: Arrays, batch: Arrays) -> tuple[float, float]:
        y, target = self.rows(results, batch)
        if self.binary:
            hit = (y > self.threshold) == target
        elif self.top == 1:
            hit = y.argmax(1) == target
        else:
            place = target[:, None]
            scored = np.take_along_axis(y, place, 1)
            before = np.arange(y.shape[1]) < place
            ahead = (y > scored) | ((y == scored) & before)  # among equal outputs the first wins, as with argmax
            hit = (ahead.sum(1) < self.top) & ~np.isnan(y).any(1)
        return (float(hit.mean()) if hit.size else 0.0), float(hit.size)


@dataclass(frozen=True)
class ConfusionMatrix(OfClasses, Total):
    """Counts of labels by true class (rows) and predicted class (columns), as nested lists.

    With `bce_with_logits` it is one matrix of 2 x 2 for each label, as scikit-learn's `multilabel_confusion_matrix`.
    """

    title = "confusion"

    def collect(self, results: Arrays, batch: Arrays) -> np.ndarray:
        rows = self.rows(results, batch)
        return scores.label_counts(rows, self.threshold) if self.binary else scores.class_counts(rows)

    def result(self, parts: Sequence[np.ndarray]) -> Any:
        return parts[0].tolist()


@dataclass(frozen=True)
class Precision(ConfusionMatrix):
    """Share of the predictions of a class that are right: the mean over classes (macro).

    Classes that neither occur nor are predicted do not count; a class that is never predicted has 0. With
    `bce_with_logits` the mean over labels; of a single label, its own.
    """

    title = "precision"
    number: ClassVar[int] = 0

    def result(self, parts: Sequence[np.ndarray]) -> float:
        return scores.mean_over_classes(scores.precision_recall_f1(parts[0])[self.number], parts[0])


@dataclass(frozen=True)
class Recall(Precision):
    """Share of the labels of a class that are predicted: the mean over classes, as for `Precision`."""

    title = "recall"
    number = 1


@dataclass(frozen=True)
class F1(Precision):
    """Harmonic mean of precision and recall of a class: the mean over classes, as for `Precision`."""

    title = "f1"
    number = 2


@dataclass(frozen=True)
class IoU(ConfusionMatrix):
    """Intersection over union of a class, the Jaccard index: the mean over classes, as for `Precision`.

    The Dice coefficient of a segmentation is `F1`, and the accuracy of its pixels is `Accuracy`.
    """

    title = "iou"

    def result(self, parts: Sequence[np.ndarray]) -> float:
        f1 = scores.precision_recall_f1(parts[0])[2]
        return scores.mean_over_classes(f1 / (2 - f1), parts[0])


@dataclass(frozen=True)
class Perplexity(OfClasses, Total):
    """exp of the mean negative log likelihood of the labels that count, such as the words of a language model."""

    title = "perplexity"
    losses = CLASS_LOSSES
    needs = "cross_entropy or nll", "Give a function (results, batch) -> number as metric instead."

    def collect(self, results: Arrays, batch: Arrays) -> np.ndarray:
        y, target = self.rows(results, batch)
        y = y.astype(np.float64)
        if not self.logits and (y >= 0).all():  # probabilities; log-probabilities are logits of themselves
            y = np.log(np.maximum(y, np.finfo(np.float64).tiny))
        likely = np.take_along_axis(y, target[:, None], 1)[:, 0] - np.logaddexp.reduce(y, 1)
        return np.array([-likely.sum(), len(likely)])

    def result(self, parts: Sequence[np.ndarray]) -> float:
        total, count = parts[0]
        return float(np.exp(total / count)) if count else float("nan")


@dataclass(frozen=True)
class AUROC(OfClasses, Total):
    """Area under the ROC curve of each class against all others: the mean over classes that some, but not all, labels have.

    With `bce_with_logits` the mean over labels. It keeps the outputs of an epoch in memory.
    """

    title = "auroc"
    summed = False

    def collect(self, results: Arrays, batch: Arrays) -> np.ndarray:
        rows = self.rows(results, batch)
        probabilities = scores.softmax(rows.scores, 1) if self.logits and not self.binary else rows.scores
        return np.column_stack([probabilities, rows.target])

    def result(self, parts: Sequence[np.ndarray]) -> float:
        return scores.mean_area(self.areas(parts))

    def areas(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The area of each class or label.

        Args:
            parts: Results of `collect`, one for each batch.
        """
        table = np.concatenate(parts)
        count = table.shape[1] // 2 if self.binary else table.shape[1] - 1
        target = table[:, count:] if self.binary else table[:, count]
        return scores.class_aurocs(scores.Rows(table[:, :count], target.astype(np.int64)))
