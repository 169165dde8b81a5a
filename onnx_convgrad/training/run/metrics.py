"""Metrics: functions of a batch's outputs and arrays, averaged over an epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat, TypeAlias

import numpy as np

from onnx_convgrad.base.boundary import CallersCode, TypedArguments
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.program.manifest import Manifest
from onnx_convgrad.training.run.batch_weights import BINARY_LOSSES, CLASS_LOSSES, samples

Arrays = Mapping[str, Any]
"""Name -> array or number. `Any`, so that a metric may use them in any arithmetic."""


class Metric(metaclass=TypedArguments):
    """A quantity that is averaged over batches.

    Attributes:
        name: Key in the rows of the history.
        outputs: Outputs of the model that the metric reads; `None` for all.
    """

    name: str
    outputs: tuple[str, ...] | None = None

    def of(self, manifest: Manifest) -> Metric:  # noqa: ARG002 - most metrics do not depend on the program
        """The metric for a program; raises `ArgumentError` if it does not apply to it."""
        return self

    @abstractmethod
    def __call__(self, results: Arrays, batch: Arrays) -> tuple[float, float]:
        """Compute the value of a batch and its weight in an average.

        Args:
            results: `"loss"`, and outputs of the model by name.
            batch: Data and targets by name.
        """


MetricLike: TypeAlias = str | Metric | Callable[[Arrays, Arrays], SupportsFloat]
"""`"accuracy"`, a metric, or a function `(results, batch) -> number`, which is averaged over samples."""


@dataclass(frozen=True)
class Accuracy(Metric):
    """Share of targets that the output predicts; targets that the loss ignores do not count.

    With `cross_entropy` and `nll` the target must be among the `top` classes with the largest outputs; with
    `bce_with_logits` the sign of each entry is compared, or whether it is above 0.5 if the output ends in Sigmoid.

    Args:
        top: Number of predicted classes.
        output: The output to compare, if the program has several losses.
    """

    top: int = 1
    output: str | None = None
    target: str = ""
    binary: bool = False
    ignored: int | None = None
    label: str = ""
    threshold: float = 0.0
    axis: int = 1

    def __post_init__(self) -> None:
        whole(self.top, "top")

    @property
    def name(self) -> str:  # type: ignore[override]
        """`accuracy` or, for example, `top5`; followed by the name of the output if one was given."""
        return ("accuracy" if self.top == 1 else f"top{self.top}") + self.label

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """The compared output."""
        return (self.output or "",)

    def of(self, manifest: Manifest) -> Accuracy:
        if self.target:  # a metric for a program already
            return self
        terms = [t for t in manifest.losses if t["loss"] in (*CLASS_LOSSES, *BINARY_LOSSES)]
        if self.output is not None:
            terms = [t for t in terms if t["output"] == self.output]
        if not terms:
            raise ArgumentError(
                "Accuracy needs the loss cross_entropy, nll or bce_with_logits"
                + (f" of {self.output!r}." if self.output else "."),
                hint="Give a function (results, batch) -> number as metric instead.",
            )
        term = terms[0]
        binary = term["loss"] in BINARY_LOSSES
        ignored = term["options"].get("ignore_index", -100)
        label = "" if self.output is None else f"_{self.output}"
        threshold = 0.0 if term.get("reads", term["output"]) == term["output"] else 0.5
        axis = term["options"].get("axis", 1)
        return Accuracy(self.top, term["output"], term["target"], binary, ignored, label, threshold, axis)

    def __call__(self, results: Arrays, batch: Arrays) -> tuple[float, float]:
        y, target = np.asarray(results[self.output or ""]), np.asarray(batch[self.target])
        if self.binary:
            return float(np.mean((y > self.threshold) == (target > 0.5))), float(y.size)
        axis = self.axis % y.ndim if y.ndim > 1 else 0
        if target.ndim == y.ndim:  # probabilities
            target = target.argmax(axis)
        if self.top == 1:
            hit = y.argmax(axis) == target
        else:
            place = np.expand_dims(np.clip(target, 0, y.shape[axis] - 1), axis)
            scored = np.take_along_axis(y, place, axis)
            before = np.arange(y.shape[axis]).reshape(-1, *[1] * (y.ndim - axis - 1)) < place
            ahead = (y > scored) | ((y == scored) & before)  # among equal outputs the first wins, as with argmax
            hit = (ahead.sum(axis) < self.top) & ~np.isnan(y).any(axis)
        counted = np.ones_like(hit) if self.ignored is None else target != self.ignored
        count = int(counted.sum())
        return (float((hit & counted).sum() / count) if count else 0.0), float(count)


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
    resolved = tuple(_resolved(metric, manifest) for metric in listed)
    names = ["loss", *(metric.name for metric in resolved)]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(
                f"There is more than one metric called {name!r}.",
                hint="A function is called by its __name__; the name of Accuracy(output=...) ends with the output.",
            )
    for metric in resolved:
        for name in metric.outputs or ():
            if name not in manifest.outputs:
                raise ArgumentError(
                    f"The metric {metric.name!r} needs {name!r}, which is not an output of the program.",
                    hint=f"Build it with outputs=[{name!r}].",
                )
    return resolved


def _resolved(metric: MetricLike, manifest: Manifest) -> Metric:
    if isinstance(metric, str):
        check_names([metric], ["accuracy"], "metric")
        return Accuracy().of(manifest)
    if isinstance(metric, Metric):
        return metric.of(manifest)
    if not callable(metric):
        raise ArgumentError(f"A metric is a name, a member of onnx_convgrad.metrics or a function, not {metric!r}.")
    return _Function(metric, manifest)
