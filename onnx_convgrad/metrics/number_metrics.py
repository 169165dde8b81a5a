"""Metrics of numbers: mean absolute and squared errors, and the coefficient of determination."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.metrics.metric import Arrays, OfOneOutput, Total


@dataclass(frozen=True, kw_only=True)
class OfNumbers(OfOneOutput, Total):
    """Compares an output with numbers of its shape, from all samples of an epoch."""

    losses = ("MSE", "L1", "Huber", "Custom")
    needs = "mse, l1 or huber", "Give a function (results, batch) -> number as metric instead."

    def facts(self, term: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - nothing else follows from it
        return {}

    def collect(self, results: Arrays, batch: Arrays) -> np.ndarray:
        """Samples, and the sums of squared errors, of absolute errors, of labels and of their squares, by column."""
        y, wanted = (np.asarray(a, np.float64) for a in (results[self.output or ""], batch[self.target]))
        if y.shape != wanted.shape:
            raise ArgumentError(f"The output has the shape {y.shape}, and its labels have the shape {wanted.shape}.")
        y, wanted = (a.reshape(len(a) if a.ndim else 1, -1) for a in (y, wanted))
        error = y - wanted
        sums = [(error**2).sum(0), np.abs(error).sum(0), wanted.sum(0), (wanted**2).sum(0)]
        return np.stack([np.full(error.shape[1], float(len(error))), *sums])

    @abstractmethod
    def result(self, parts: Sequence[np.ndarray]) -> float:
        """The mean over columns."""


@dataclass(frozen=True)
class MeanAbsoluteError(OfNumbers):
    """Mean of |y - t| over samples and columns."""

    title = "mae"

    def result(self, parts: Sequence[np.ndarray]) -> float:
        samples, _, absolute, *_ = parts[0]
        return float((absolute / samples).mean())


@dataclass(frozen=True)
class MeanSquaredError(OfNumbers):
    """Mean of (y - t)^2 over samples and columns."""

    title = "mse"

    def result(self, parts: Sequence[np.ndarray]) -> float:
        samples, squared, *_ = parts[0]
        return float((squared / samples).mean())


@dataclass(frozen=True)
class R2(OfNumbers):
    """Coefficient of determination: 1 - sum (y - t)^2 / sum (t - mean t)^2, the mean over columns.

    It is not a number for a single sample and for labels that are all equal.
    """

    title = "r2"

    def result(self, parts: Sequence[np.ndarray]) -> float:
        samples, squared, _, total, squares = parts[0]
        spread = squares - total**2 / samples
        return float((1 - squared / np.where(spread > 0, spread, np.nan)).mean())
