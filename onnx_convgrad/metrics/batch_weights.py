"""Compute the weight of each batch in a mean over several batches.

A loss that is a mean equals the mean over the union of batches only if each batch is weighted by the denominator of its own
mean: the samples, the entries, or the class weights of the labels that are not ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.metrics.progress import PART, Progress
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.runtime import session

Arrays = Mapping[str, np.ndarray]

CLASS_LOSSES = ("CrossEntropy", "NLL", "Focal", "Dice")
"""Losses whose labels are classes."""

BINARY_LOSSES = ("BCE", "BCEWithLogits", "SigmoidFocal", "BinaryDice")
"""Losses whose labels say for each class whether it is there."""


def samples(manifest: Manifest, batch: Arrays) -> int:
    """Number of samples: the size of the axis of samples of the first input that is not a state."""
    name = manifest.samples_in.name
    return int(batch[name].shape[manifest.batch_axes.get(name, 0)]) if batch[name].ndim else 1


class Counts:
    """Counts what the mean of each summand of a program's loss divides by: samples, entries, or weights of labels.

    Attributes:
        weights: Input with the weight of a term -> its number in the steps and evaluations that follow.
    """

    def __init__(self, program: TrainingProgram) -> None:
        self.program, self.manifest = program, program.manifest
        self.summands = self.manifest.summands()
        self.weights = {t["weight_input"]: float(t["weight"]) for t in self.manifest.losses if t.get("weight_input")}
        self._counted = any(s["joining"] == "count" for s in self.summands)

    @cached_property
    def _session(self) -> Any:
        return session(self.program.model("counts"), providers="cpu", options={"threads": 1})

    @cached_property
    def _inputs(self) -> list[str]:
        return [port.name for port in self._session.get_inputs()]

    def fed_weights(self) -> dict[str, np.ndarray]:
        """The weights of terms as inputs of the graphs."""
        return {name: np.asarray(weight, np.float32) for name, weight in self.weights.items()}

    def weight(self, summand: Mapping[str, Any]) -> float:
        """The weight of a summand in the loss."""
        return float(self.weights.get(summand["weight_input"], summand["weight"]))

    def __call__(self, batch: Arrays) -> np.ndarray:
        """The count of each summand over a batch; for a summand that is a sum, it means nothing."""
        if not self._counted:
            return np.full(len(self.summands), float(samples(self.manifest, batch)))
        (counts,) = self._session.run(None, {name: batch[name] for name in self._inputs})
        return np.asarray(counts, np.float64)

    def shares(self, batches: Sequence[Arrays], total: Callable[[Sequence[float]], list[float]] = list) -> np.ndarray:
        """The share of each batch (rows) in each summand (columns) of the loss of their union.

        `total` adds up numbers over all ranks, each of which has its own batches.
        """
        counts = np.array([self(batch) for batch in batches], np.float64).reshape(len(batches), len(self.summands))
        totals = np.array(total(counts.sum(0).tolist()))
        is_sum = np.array([s["joining"] == "sum" for s in self.summands])
        return np.where(is_sum | (totals == 0), 1.0, counts / np.where(totals == 0, 1.0, totals))

    def ignored_targets(self, batches: Sequence[Arrays]) -> list[str]:
        """Names of labels of which a loss counts no entry in all the batches: ignored, or of classes that weigh nothing."""
        totals = iter(sum((self(batch) for batch in batches), np.zeros(len(self.summands))))
        found = []
        for term in self.manifest.losses:
            own = [next(totals) == 0 and s["joining"] == "count" for s in term["summands"]]
            if batches and any(own) and term["target"]:
                found.append(term["target"])
        return found


def loss_sum(loss: ArrayLike) -> float:
    """The sum of the entries of a loss, which mostly has one."""
    return float(loss if np.ndim(loss) == 0 else np.sum(loss, dtype=np.float64))  # type: ignore[arg-type]


def loss_terms(counts: Counts, results: Arrays, *batches: Arrays) -> Iterator[tuple[str, str, float, float]]:
    """Yield name, joining, value and weight of each summand of a loss over `batches`."""
    weights = sum((counts(batch) for batch in batches), np.zeros(len(counts.summands)))
    several = len(counts.summands) > 1
    for summand, weight in zip(counts.summands, weights, strict=True):
        value = loss_sum(results.get(summand["value"], 0.0)) * counts.weight(summand)
        name = f"loss{PART}{summand['value']}" if several else "loss"
        yield name, summand["joining"], value, 1.0 if summand["joining"] == "sum" else float(weight)


def add_losses(progress: Progress, counts: Counts, results: Arrays, batch: Arrays) -> None:
    """Add the losses of a batch to those of the data."""
    for name, joining, value, weight in loss_terms(counts, results, batch):
        if joining == "sum":
            progress.add(name, value, float(name not in progress.sums))
        else:
            progress.count(name, value, weight)


def concatenate(name: str, arrays: Sequence[ArrayLike], axis: int = 0) -> np.ndarray:
    """Concatenate an input or output of several batches along the axis of the samples.

    Raises:
        ArgumentError: Other axes differ in size.
    """
    rows = [np.atleast_1d(a) for a in arrays]
    if len({(*a.shape[:axis], *a.shape[axis + 1 :]) for a in rows}) > 1:
        raise ArgumentError(
            f"{name!r} has different shapes in the batches of one step: {', '.join(str(a.shape) for a in rows)}.",
            hint="Accumulate batches of one size, or request neither outputs nor metrics.",
        )
    return np.concatenate(rows, axis)
