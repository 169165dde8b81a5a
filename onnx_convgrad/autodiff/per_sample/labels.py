"""The labels of values: the axis on which each holds the samples, as far as it is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.sample_axis import Label, Samples
from onnx_convgrad.ir.emit import Dim, Emitter


class Labels(ABC):
    """The labels of values so far.

    Args:
        e: Emits the equivalent subgraphs of operators that are followed through them.
        data: Graph inputs whose first axis is the batch.
        varied: Values that depend on the sources: only their broadcasting along the samples matters.
    """

    def __init__(self, e: Emitter, data: Sequence[ir.Value], varied: Iterable[ir.Value]) -> None:
        self.e = e
        self.count: Dim = e.dim(data[0], 0)
        self.size = None if data[0].shape is None else data[0].shape[0]
        self.labels: dict[ir.Value, Label] = dict.fromkeys(data, Samples(0))
        self.varied = set(varied)

    def __getitem__(self, value: ir.Value | None) -> Label:
        return None if value is None else self.labels.get(value)

    def rank(self, value: ir.Value) -> int:
        return self.e.rank(value, "tracking its samples")

    def sizes(self, value: ir.Value) -> list[Any]:
        """The shape of a value, with the number of samples as the size of their axis."""
        dims: list[Any] = list(value.shape or ())
        label = self[value]
        if dims and isinstance(label, Samples) and label.plain:
            dims[label.axis] = self.size
        return dims

    @abstractmethod
    def constant_along(self, value: ir.Value, place: Samples) -> None:
        """Check that a value without samples is broadcast along an axis, counted from the end, or label it as copies."""
