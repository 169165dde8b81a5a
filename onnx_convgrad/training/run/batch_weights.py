"""Compute the weight of each batch in a mean over several batches.

A loss that is a mean equals the mean over the union of batches only if each batch is weighted by the denominator of its own
mean: the samples, the entries, or the class weights of the targets that are not ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.base.numbers import factors
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.program.manifest import Manifest
from onnx_convgrad.training.run.progress import PART

Arrays = Mapping[str, np.ndarray]

CLASS_LOSSES = ("CrossEntropy", "NLL", "Focal", "Dice")
"""Losses whose targets are classes."""

BINARY_LOSSES = ("BCEWithLogits", "SigmoidFocal", "BinaryDice")
"""Losses whose targets say for each class whether it is there."""

_ENTRY_LOSSES = ("MSE", "L1", "Huber", "BCEWithLogits", "SigmoidFocal", "KLDiv")


def samples(manifest: Manifest, batch: Arrays) -> int:
    """Number of samples: the size of the axis of samples of the first input."""
    first = batch[manifest.data[0].name]
    return int(first.shape[manifest.batch_axes.get(manifest.data[0].name, 0)]) if first.ndim else 1


def loss_terms(
    manifest: Manifest, results: Arrays, *batches: Arrays, ranks: int = 1, whole: bool = True
) -> Iterator[tuple[str, float, float]]:
    """Yield name, value and weight of each term of a loss over `batches`; a sum has weight 1.

    Of several `ranks`, each has its own part of the batches, or none. Their averages together are those of one process.
    With `whole`, the results are those of all ranks, else of these batches alone.
    """
    several = len(manifest.losses) > 1
    for term, name in zip(manifest.losses, manifest.terms if several else ("loss",), strict=True):
        value = float(np.sum(results[name])) * (term["weight"] if several else 1) if name in results else 0.0
        if _is_mean(term):
            weight = sum(_count(manifest, term, batch) for batch in batches)
        else:
            value, weight = value if whole else value * ranks, 1 / ranks
        yield f"loss{PART}{name}" if several else "loss", value, weight


def ignored_targets(manifest: Manifest, batches: Sequence[Arrays]) -> list[str]:
    """Targets of which a loss counts no entry in all the batches: it ignores them, or their classes weigh nothing."""
    return [
        term["target"]
        for term in manifest.losses
        if term["target"] and _is_mean(term) and not any(_count(manifest, term, batch) for batch in batches)
    ]


def batch_weights(
    manifest: Manifest, batches: Sequence[Arrays], total: Callable[[Sequence[float]], list[float]] = list
) -> list[float]:
    """The factor of each batch's loss and gradients with which they add up to those of the union.

    `total` adds up numbers over all ranks, each of which has its own batches.

    Raises:
        ArgumentError: The terms of the loss need different factors.
    """
    counts = {
        i: np.array([_count(manifest, term, batch) for batch in batches], np.float64)
        for i, term in enumerate(manifest.losses)
        if _is_mean(term)
    }
    totals = dict(zip(counts, total([float(c.sum()) for c in counts.values()]), strict=True))
    factors: dict[str, np.ndarray] = {}
    for i, term in enumerate(manifest.losses):
        name = f"{term['loss'] or 'loss'} of {term['output']}"
        factors[name] = counts[i] / totals[i] if totals.get(i) else np.ones(len(batches))
    (first, reference), *others = factors.items()
    for name, own in others:
        if not np.allclose(own, reference, rtol=1e-6, atol=0):
            raise ArgumentError(
                f"Batches cannot be accumulated: {first} weights them by {_listed(reference)}, {name} by {_listed(own)}.",
                hint="Use batches of equal size, and the same reduction in all terms.",
            )
    return reference.tolist()  # type: ignore[no-any-return]


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


def _is_mean(term: Mapping[str, Any]) -> bool:
    return term["options"].get("reduction", "mean") in ("mean", "batchmean")


def _count(manifest: Manifest, term: Mapping[str, Any], batch: Arrays) -> float:
    """The denominator of a term's mean over a batch, up to a common factor."""
    options = term["options"]
    if options.get("reduction", "mean") == "batchmean":
        return float(samples(manifest, batch))
    target = batch.get(term["target"] or "")
    if target is None or term["loss"] == "Dice" or term["loss"] not in (*CLASS_LOSSES, *_ENTRY_LOSSES):
        return float(samples(manifest, batch))
    if term["loss"] in _ENTRY_LOSSES or options.get("probabilities"):
        return float(target.size)
    ignored = options.get("ignore_index", -100)
    counted = target.reshape(-1) if ignored is None else target[target != ignored]
    weights = options.get("weight")
    if weights is None:
        return float(counted.size)
    classes = counted[(counted >= 0) & (counted < len(weights))]  # any other class makes the loss NaN
    return float(factors(weights, "weight")[classes].sum())


def _listed(numbers: np.ndarray) -> str:
    return ", ".join(f"{n:.3g}" for n in numbers)
