"""Resolve names, metrics and functions to the metrics of a training run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import SupportsFloat, TypeAlias

from onnx_convgrad.base.boundary import CallersCode
from onnx_convgrad.base.names import check_names
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.metrics.batch_weights import samples
from onnx_convgrad.metrics.class_metrics import (
    AUROC,
    F1,
    Accuracy,
    ConfusionMatrix,
    IoU,
    Perplexity,
    Precision,
    Recall,
)
from onnx_convgrad.metrics.detection import MeanAveragePrecision
from onnx_convgrad.metrics.metric import Arrays, Metric
from onnx_convgrad.metrics.number_metrics import R2, MeanAbsoluteError, MeanSquaredError
from onnx_convgrad.metrics.texts import CharacterErrorRate, ExactMatch, WordErrorRate
from onnx_convgrad.programs.manifest import Manifest

MetricLike: TypeAlias = str | Metric | Callable[[Arrays, Arrays], SupportsFloat]
"""A name, a metric, or a function `(results, batch) -> number`, which is averaged over samples."""

METRICS: dict[str, type[Metric]] = {
    "accuracy": Accuracy, "precision": Precision, "recall": Recall, "f1": F1, "iou": IoU, "auroc": AUROC,
    "confusion": ConfusionMatrix, "perplexity": Perplexity, "mae": MeanAbsoluteError, "mse": MeanSquaredError, "r2": R2,
    "exact": ExactMatch, "cer": CharacterErrorRate, "wer": WordErrorRate, "map": MeanAveragePrecision,
}  # fmt: skip
"""Metrics by name; further ones are `top2`, `top5` and so on, and `map50`, `map75` and so on."""


class _Function(Metric):
    """Wrap a plain function as a metric."""

    def __init__(self, function: Callable[[Arrays, Arrays], SupportsFloat], manifest: Manifest) -> None:
        self.function, self.manifest = function, manifest
        self.name = getattr(function, "__name__", type(function).__name__)

    def __call__(self, results: Arrays, batch: Arrays) -> tuple[float, float]:
        with CallersCode(self.function):
            number = self.function(results, batch)
        if not isinstance(number, SupportsFloat):
            raise ArgumentError(f"The metric {self.name!r} returned {number!r}, not a number.")
        return float(number), float(samples(self.manifest, batch))


def resolve_metrics(metrics: Iterable[MetricLike] | MetricLike, manifest: Manifest) -> tuple[Metric, ...]:
    """Resolve names, metrics and functions to metrics for a program.

    Raises:
        ArgumentError: A name is unknown or not unique, or a metric needs an output that the program does not have.
    """
    if metrics is None or not (callable(metrics) or isinstance(metrics, Iterable)):
        raise ArgumentError(f"metrics takes a list of names, metrics and functions, not {metrics!r}.")
    listed = [metrics] if isinstance(metrics, str) or callable(metrics) else list(metrics)
    if "grad_norm" in listed and manifest.grad_norm is None:
        raise ArgumentError(
            "The program does not compute 'grad_norm', the norm of its gradients.",
            hint="Build it with grad_norm=True (--grad-norm): then every row of the history has the norm.",
        )
    listed = [metric for metric in listed if metric != "grad_norm"]  # the rows have it anyway
    resolved = tuple(_resolved(metric, manifest) for metric in listed)
    names = ["loss", *([] if manifest.grad_norm is None else ["grad_norm"]), *(metric.name for metric in resolved)]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(
                f"There is more than one metric called {name!r}.",
                hint="A function is called by its __name__; the name of Accuracy(output=...) ends with the output.",
            )
    for metric in resolved:
        for name in metric.outputs or ():
            if name in ("loss", *manifest.grad_norms()):
                raise ArgumentError(
                    f"The metric {metric.name!r} needs the output {name!r}; results have the {name} of the step there.",
                    hint="Rename the output of the model, as with onnx_ir: model.graph.outputs[0].name = 'scores'.",
                )
            if name not in manifest.outputs:
                raise ArgumentError(
                    f"The metric {metric.name!r} needs {name!r}, which is not an output of the program.",
                    hint=f"Build it with outputs=[{name!r}].",
                )
    return resolved


def _resolved(metric: MetricLike, manifest: Manifest) -> Metric:
    if isinstance(metric, str):
        return metric_named(metric).of(manifest)
    if isinstance(metric, Metric):
        return metric.of(manifest)
    if not callable(metric):
        raise ArgumentError(f"A metric is a name, a member of onnx_convgrad.metrics or a function, not {metric!r}.")
    return _Function(metric, manifest)


def metric_named(name: str) -> Metric:
    """Create a metric by name: a key of `METRICS`, or `"top5"`, `"map50"` and the like.

    Raises:
        ArgumentError: The name is unknown.
    """
    if name.startswith("top") and name[3:].isdecimal():
        return Accuracy(int(name[3:]))
    if re.fullmatch(r"map[1-9]\d", name):
        return MeanAveragePrecision(iou=int(name[3:]) / 100)
    check_names([name], [*METRICS, "top5", "map50"], "metric")
    return METRICS[name]()
