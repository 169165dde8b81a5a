"""Scores of predictions in numpy: confusion matrix, precision, recall, F1, ROC and errors of numbers.

A ratio over nothing is 0, and a mean over classes leaves out those that neither occur nor are predicted, as in scikit-learn
and torchmetrics.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.base.limits import machine_bytes
from onnx_convgrad.errors import ArgumentError, LimitError


class Rows(NamedTuple):
    """Predictions, one row each: scores `[M, C]` of classes and their numbers `[M]`, or of labels and 0 or 1 `[M, L]`."""

    scores: np.ndarray
    target: np.ndarray


def class_rows(predicted: ArrayLike, wanted: ArrayLike, ignored: int | None = None, axis: int | None = None) -> Rows:
    """Predicted scores of classes along `axis` (1, or 0 of a single row), and wanted classes or probabilities, as rows.

    Wanted classes equal to `ignored` are left out.

    Raises:
        ArgumentError: A label is not a class, or there is not one for each prediction.
    """
    y: np.ndarray = np.asarray(predicted)
    target: np.ndarray = np.asarray(wanted)
    axis = min(1, y.ndim - 1) if axis is None or y.ndim < 2 else axis
    if target.shape == y.shape:
        target = target.argmax(axis)
    elif target.ndim == y.ndim and target.shape[axis] == 1:
        target = target.take(0, axis)
    if target.size * y.shape[axis] != y.size or target.ndim >= max(y.ndim, 2):
        raise ArgumentError(
            f"The output has the shape {y.shape} in a batch, and the labels have the shape {target.shape}.",
            hint=f"Give the number of a class, or a probability for each, for every prediction along axis {axis}.",
        )
    scores = np.moveaxis(y, axis, -1).reshape(-1, y.shape[axis])
    with np.errstate(invalid="ignore"):  # checked below
        numbers = target.reshape(-1).astype(np.int64)
    if not np.array_equal(numbers, target.reshape(-1)):
        raise ArgumentError(
            "A label is not a whole number, so it is not a class.",
            hint="Number the classes from 0; or the outputs are numbers: task='numbers', --task numbers.",
        )
    if ignored is not None:
        scores, numbers = scores[numbers != ignored], numbers[numbers != ignored]
    wrong = numbers[(numbers < 0) | (numbers >= y.shape[axis])]
    if wrong.size:
        raise ArgumentError(
            f"A label is the class {wrong[0]}, and the output has {y.shape[axis]} classes.",
            hint="Classes are numbered from 0.",
        )
    return Rows(scores, numbers)


def label_rows(y: ArrayLike, target: ArrayLike) -> Rows:
    """The scores of labels along axis 1, each 0 or 1 (above one half) by itself, as rows."""
    both = [np.asarray(array) for array in (y, target)]
    rows = [np.moveaxis(a, 1, -1).reshape(-1, a.shape[1]) if a.ndim > 1 else a.reshape(-1, 1) for a in both]
    return Rows(rows[0], (rows[1] > 0.5).astype(np.int64))


# -- counts ------------------------------------------------------------------------------------------------------------


def class_counts(rows: Rows) -> np.ndarray:
    """The confusion matrix `[C, C]`: rows are true classes, columns are those with the largest scores.

    Raises:
        LimitError: It would take most of the memory of this machine; any model can name any number of classes.
    """
    classes = rows.scores.shape[1]
    if 8 * classes**2 > _SHARE * machine_bytes():
        raise LimitError(
            f"The confusion matrix of {classes:,} classes takes {8 * classes**2 / 1e9:,.0f} GB.",
            hint="Use a machine with more memory, or metrics that count no confusions, such as accuracy.",
        )
    pairs = rows.target * classes + rows.scores.argmax(1)
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


_SHARE = 0.25
"""Share of the machine's memory that counts may take: those of a batch and their sum exist at once."""


def label_counts(rows: Rows, threshold: float) -> np.ndarray:
    """The confusion matrices `[L, 2, 2]` of labels, which are predicted above `threshold`."""
    pairs = 2 * rows.target + (rows.scores > threshold)
    return np.stack([np.bincount(column, minlength=4).reshape(2, 2) for column in pairs.T])


def precision_recall_f1(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Precision, recall, F1 and number of samples of each class or label, from one of the counts above."""
    if counts.ndim == 3:
        right, missed, wrong = counts[:, 1, 1], counts[:, 1, 0], counts[:, 0, 1]
    else:
        right = np.diag(counts)
        missed, wrong = counts.sum(1) - right, counts.sum(0) - right
    return (
        _ratio(right, right + wrong),
        _ratio(right, right + missed),
        _ratio(2 * right, 2 * right + missed + wrong),
        right + missed,
    )


def mean_over_classes(values: np.ndarray, counts: np.ndarray) -> float:
    """The mean of a value over the classes that occur or are predicted; over all labels."""
    seen = np.ones(len(values), bool) if counts.ndim == 3 else (counts.sum(0) + counts.sum(1)) > 0
    return float(values[seen].mean()) if seen.any() else float("nan")


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.where(whole > 0, part / np.maximum(whole, 1), 0.0)


# -- curves and errors -------------------------------------------------------------------------------------------------


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve: the share of pairs of a positive and a negative that are in order, ties counted half.

    NaN if one of the two does not occur.
    """
    count = int(positive.sum())
    if not 0 < count < len(scores) or not np.isfinite(scores).all():
        return float("nan")
    _, place, repeats = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(repeats)
    ranks = (last - (repeats - 1) / 2)[place.reshape(-1)]
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(scores) - count)))


def class_aurocs(rows: Rows) -> np.ndarray:
    """The area of each class against all others, or of each label."""
    columns = enumerate(rows.scores.T)
    single = rows.target.ndim == 1
    return np.array([auroc(s, rows.target == c if single else rows.target[:, c] == 1) for c, s in columns])


def mean_area(areas: np.ndarray) -> float:
    """The mean of the areas that are defined; NaN if there are none."""
    known = areas[~np.isnan(areas)]
    return float(known.mean()) if known.size else float("nan")


def softmax(y: np.ndarray, axis: int) -> np.ndarray:
    """Probabilities of logits, in float64."""
    e = np.exp(y.astype(np.float64) - y.max(axis, keepdims=True))
    result: np.ndarray = e / e.sum(axis, keepdims=True)
    return result


def sigmoid(y: np.ndarray) -> np.ndarray:
    """Probabilities of logits of single labels, in float64."""
    e = np.exp(-np.abs(y.astype(np.float64)))
    result: np.ndarray = np.where(y >= 0, 1, e) / (1 + e)
    return result


class Errors:
    """Errors of numbers over batches: the mean squares, the mean distance, and R2, averaged over columns.

    R2 of a single sample, and of constant labels, is not defined.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.shift: np.ndarray | None = None
        self.sums = np.zeros((4, 0))

    def add(self, y: np.ndarray, target: np.ndarray) -> None:
        """Take a batch of numbers, one row for each sample.

        Raises:
            ArgumentError: There is not one label for each number.
        """
        if y.size != target.size or not y.ndim:
            raise ArgumentError(
                f"The output has the shape {y.shape} in a batch, and its labels have the shape {target.shape}.",
                hint="Give a label for each number of the output.",
            )
        wanted = np.asarray(target, np.float64).reshape(len(y), -1)
        error = np.asarray(y, np.float64).reshape(wanted.shape) - wanted
        if self.shift is None:  # keeps the sums of squares exact
            self.shift, self.sums = wanted.mean(0), np.zeros((4, wanted.shape[1]))
        centered = wanted - self.shift
        self.rows += len(y)
        self.sums += [(error**2).sum(0), np.abs(error).sum(0), centered.sum(0), (centered**2).sum(0)]

    def result(self) -> dict[str, float]:
        """`mse`, `mae` and `r2`."""
        squares, distances, total, total_squares = self.sums
        spread = total_squares - total**2 / self.rows
        r2 = 1 - squares / np.where(spread > 0, spread, np.nan)
        return {
            "mse": float(squares.mean() / self.rows),
            "mae": float(distances.mean() / self.rows),
            "r2": float(r2.mean()) if self.rows > 1 else float("nan"),
        }
