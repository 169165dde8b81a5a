"""Averages and metrics of an epoch, over all ranks of a run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnx_convgrad.base.boundary import CallersCode
from onnx_convgrad.data.inputs import Batch
from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.metrics.batch_weights import Counts, concatenate, loss_terms, samples
from onnx_convgrad.metrics.metric import Metric, Total
from onnx_convgrad.metrics.progress import Progress


class Tally:
    """Adds the results of batches to a progress.

    A loss that is a sum is averaged over steps, and added up over the batches of a validation.

    Args:
        counts: Counts what the losses are joined by.
        metrics: The metrics.
        ranks: The ranks, each of which has its own samples, or none.
        whole: Whether losses are those of the batches of all ranks, as after a step, or of this rank's, as in a validation.
    """

    def __init__(self, counts: Counts, metrics: Sequence[Metric], ranks: Ranks, *, whole: bool) -> None:
        self.counts, self.manifest = counts, counts.manifest
        self.metrics, self.ranks, self.whole = metrics, ranks, whole

    def add(self, progress: Progress, results: Mapping[str, Any], batches: Sequence[Batch]) -> None:
        """Add the results of some batches; every rank calls this, also one without batches."""
        own, m = Progress(), self.manifest
        sums = set()
        for name, joining, value, weight in loss_terms(self.counts, results, *batches):
            own.count(name, value, weight / self.ranks.size if joining == "sum" and self.whole else weight)
            sums |= {name} if joining == "sum" and not self.whole else set()
        names = [*own.sums, *(metric.name for metric in self.metrics if not isinstance(metric, Total))]
        if self.metrics and batches:
            union = batches[0]
            if len(batches) > 1:
                axes = m.batch_axes
                union = {n: concatenate(n, [batch[n] for batch in batches], axes.get(n, 0)) for n in union}
            measure(own, self.metrics, results, union)
        for metric in self.metrics:
            if isinstance(metric, Total):
                for array in own.collected.get(metric.name, ()):
                    progress.collect(metric.name, array, summed=metric.summed)
        numbers = [number for name in names for number in own.sums.get(name, (0.0, 0.0))]
        *totals, count = self.ranks.sums([*numbers, sum(samples(m, batch) for batch in batches)])
        progress.samples += round(count)
        for name, total, weight in zip(names, totals[::2], totals[1::2], strict=True):
            progress.add(name, total, float(name not in progress.sums) if name in sums else weight)

    def collected(self, progress: Progress) -> dict[str, list[np.ndarray]]:
        """The arrays that the metrics of all samples have collected on all ranks."""
        if not self.ranks.several or not any(isinstance(metric, Total) for metric in self.metrics):
            return progress.collected
        parts: dict[str, list[np.ndarray]] = {}
        for content in self.ranks.gather(_packed(progress.collected)):
            for name, array in _unpacked(content):
                parts.setdefault(name, []).append(array)
        summed = {metric.name for metric in self.metrics if isinstance(metric, Total) and metric.summed}
        return {name: [sum(arrays[1:], arrays[0])] if name in summed else arrays for name, arrays in parts.items()}

    def values(self, progress: Progress) -> dict[str, Any]:
        """Losses and metrics of all ranks so far; the metrics in their order."""
        return measured(progress, self.metrics, self.collected(progress))


def measured(
    progress: Progress, metrics: Sequence[Metric], collected: Mapping[str, list[np.ndarray]] | None = None
) -> dict[str, Any]:
    """Losses and metrics over all batches so far; the metrics in their order. `collected` is by default the progress's."""
    values: dict[str, Any] = progress.averages()
    for metric in metrics:
        if isinstance(metric, Total):
            parts = (progress.collected if collected is None else collected).get(metric.name)
            with CallersCode(metric):
                values[metric.name] = metric.result(parts) if parts else float("nan")
        else:
            values[metric.name] = values.pop(metric.name, float("nan"))
    return values


def measure(
    progress: Progress, metrics: Sequence[Metric], results: Mapping[str, Any], batch: Mapping[str, np.ndarray]
) -> None:
    """Add the metrics of a batch."""
    for metric in metrics:
        with CallersCode(metric):
            if isinstance(metric, Total):
                progress.collect(metric.name, metric.collect(results, batch), summed=metric.summed)
            else:
                progress.count(metric.name, *metric(results, batch))


def needed(readers: Sequence[object], outputs: Sequence[str]) -> list[str]:
    """The outputs that metrics and callbacks read: those in their attribute `outputs`, or all if it is `None`."""
    read = [getattr(reader, "outputs", ()) for reader in readers]
    wanted = {name for names in read for name in (outputs if names is None else names)}
    return [name for name in outputs if name in wanted]


def _packed(collected: Mapping[str, Sequence[np.ndarray]]) -> bytes:
    arrays = [(name, array) for name, parts in collected.items() for array in parts]
    file = io.BytesIO()
    np.savez(file, names=np.array([name for name, _ in arrays], str), **{str(i): a for i, (_, a) in enumerate(arrays)})  # type: ignore[arg-type]
    return file.getvalue()


def _unpacked(content: bytes) -> list[tuple[str, np.ndarray]]:
    with np.load(io.BytesIO(content)) as file:
        return [(str(name), file[str(i)]) for i, name in enumerate(file["names"])]
