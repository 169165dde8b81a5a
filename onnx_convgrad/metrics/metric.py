"""Metrics: quantities that are averaged over batches, or of all samples of an epoch together.

Args:
    manifest: The description of the program.
    results: `"loss"`, and outputs of the model by name.
    batch: Data and labels by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.manifest import Manifest

Arrays = Mapping[str, Any]
"""Name -> array or number. `Any`, so that a metric may use them in any arithmetic."""


class Metric(ABC):
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
        """Compute the value of a batch and its weight in an average."""


class Total(Metric):
    """A quantity of all samples of an epoch, such as F1, which is not the average of its values over batches.

    Attributes:
        summed: Whether the arrays of the batches are added up; otherwise all of them are kept.
    """

    summed = True

    @abstractmethod
    def collect(self, results: Arrays, batch: Arrays) -> np.ndarray:
        """The arrays of a batch that the result needs."""

    @abstractmethod
    def result(self, parts: Sequence[np.ndarray]) -> Any:
        """The quantity, a number or nested lists of numbers, from one array (the sum) or from those of all batches.

        Args:
            parts: Results of `collect`: their sum alone, or one for each batch.
        """

    def __call__(self, results: Arrays, batch: Arrays) -> tuple[float, float]:
        """The value of one batch."""
        return self.result([self.collect(results, batch)]), 1.0


@dataclass(frozen=True, kw_only=True)
class OfOneOutput(Metric):
    """Base of metrics that compare one output with its labels.

    Args:
        output: The output to compare, if the program has several losses.
        target: Name of the labels. This and all further arguments follow from the program; `of` fills them in.
        label: Text that is appended to the name.
    """

    title: ClassVar[str]
    losses: ClassVar[tuple[str, ...]]
    needs: ClassVar[tuple[str, str]]
    """The losses whose outputs it compares, in words, and the remedy where there is none."""

    output: str | None = None
    target: str = ""
    label: str = ""

    def of(self, manifest: Manifest) -> Self:
        if self.target:  # a metric for a program already
            return self
        term = next(
            (t for t in manifest.losses if t["loss"] in self.losses and self.output in (None, t["output"])), None
        )
        if term is None:
            where = f" of {self.output!r}" if self.output else ""
            raise ArgumentError(f"The metric {self.title} needs the loss {self.needs[0]}{where}.", hint=self.needs[1])
        label = "" if self.output is None else f"_{self.output}"
        return replace(self, output=term["output"], target=term["target"], label=label, **self.facts(term))

    @abstractmethod
    def facts(self, term: Mapping[str, Any]) -> dict[str, Any]:
        """The further arguments, which follow from a term of the loss."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """The usual name, followed by the name of the output if one was given."""
        return self.title + self.label

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """The output that is compared."""
        return (self.output or "",)
