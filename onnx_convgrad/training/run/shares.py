"""How much each of several batches counts in a mean over all of them.

A loss that is a mean is the mean over the union of batches only if each batch counts by what its own mean was divided by:
the samples, the entries, or the class weights of the targets that are not ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.program.manifest import Manifest
from onnx_convgrad.training.run.progress import PART

__all__ = ["joined", "parts", "samples", "shares"]

Arrays = Mapping[str, np.ndarray]

_CLASSES = ("CrossEntropy", "NLL")
_ENTRIES = ("MSE", "L1", "Huber", "BCEWithLogits")


def samples(manifest: Manifest, batch: Arrays) -> int:
    """Size of the first axis of the first input."""
    first = batch[manifest.data[0].name]
    return len(first) if first.ndim else 1


def parts(manifest: Manifest, results: Arrays, *batches: Arrays) -> Iterator[tuple[str, float, float]]:
    """The loss of some batches together, by terms: name, value, and what it counts in an average over batches.

    A sum counts 1.
    """
    several = len(manifest.losses) > 1
    for term, own in zip(manifest.losses, manifest.terms if several else ("loss",), strict=True):
        value = float(np.sum(results[own])) * (term["weight"] if several else 1)
        counts = [_count(manifest, term, batch) for batch in batches]
        yield f"loss{PART}{own}" if several else "loss", value, sum(1 / len(counts) if c is None else c for c in counts)


def shares(manifest: Manifest, batches: Sequence[Arrays]) -> list[float]:
    """Factor of each batch's loss and gradients, with which they add up to those of all batches together.

    Raises:
        ArgumentError: The terms of the loss would need different factors.
    """
    found: dict[str, np.ndarray] = {}
    for term in manifest.losses:
        counts = [_count(manifest, term, batch) for batch in batches]
        known = np.array([np.nan if c is None else c for c in counts])
        total = known.sum()
        name = f"{term['loss'] or 'loss'} of {term['output']}"
        found[name] = np.ones(len(batches)) if np.isnan(total) else known / total if total else known * 0 + 1
    (first, reference), *others = found.items()
    for name, own in others:
        if not np.allclose(own, reference, rtol=1e-6, atol=0):
            raise ArgumentError(
                f"Batches cannot be accumulated: {first} would weigh them {_listed(reference)}, {name} {_listed(own)}.",
                hint="Use batches of equal size, and the same reduction in all terms.",
            )
    return [float(share) for share in reference]


def joined(name: str, arrays: Sequence[Any]) -> np.ndarray:
    """What several batches have or gave under a name, one after the other.

    Raises:
        ArgumentError: Their sizes differ along another axis.
    """
    rows = [np.atleast_1d(a) for a in arrays]
    if len({a.shape[1:] for a in rows}) > 1:
        raise ArgumentError(
            f"Of the batches that make one step, {name!r} has the shapes {', '.join(str(a.shape) for a in rows)}.",
            hint="Accumulate batches of one size, or ask for no outputs and no metrics.",
        )
    return np.concatenate(rows)


def _count(manifest: Manifest, term: Mapping[str, Any], batch: Arrays) -> float | None:
    """What the mean of a term is divided by, up to a factor that is the same for all batches; `None` for a sum."""
    options = term["options"]
    if options.get("reduction", "mean") != "mean":
        return None
    target = batch.get(term["target"] or "")
    if target is None or term["loss"] not in (*_CLASSES, *_ENTRIES):
        return float(samples(manifest, batch))
    if term["loss"] in _ENTRIES or options.get("probabilities"):
        return float(target.size)
    ignored = options.get("ignore_index", -100)
    counted = target.reshape(-1) if ignored is None else target[target != ignored]
    weights = options.get("weight")
    if weights is None:
        return float(counted.size)
    classes = counted[(counted >= 0) & (counted < len(weights))]  # of others the loss is not finite, which is told
    return float(np.asarray(weights, np.float64)[classes].sum())


def _listed(numbers: np.ndarray) -> str:
    return ", ".join(f"{n:.3g}" for n in numbers)
