"""The scores of a classifier, one per sample and class, and the class that is explained or attacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.base.names import INSPECT, check_names
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.endings import Ending
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.composed import compose, new_input, one_floating_input
from onnx_convgrad.pipeline.options import TargetLike

Label = int | tuple[int, ...] | str | None
"""A class by its number, `"input"` for a graph input `label`, or `None` for the class with the highest score; a tuple is
a class and its place on the further axes of the scores, such as the cell of a detector."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores `[N, C]` of a classifier, and a class for each sample.

    Attributes:
        values: One score per sample and class.
        mask: 1 at the class of each sample, else 0; `[N, C]`, of the dtype of the scores.
        label: The class of each sample, int64 `[N]`.
    """

    values: ir.Value
    mask: ir.Value
    label: ir.Value

    def selected(self, e: Emitter, values: ir.Value | None = None) -> ir.Value:
        """The score of the class of each sample, `[N]`; of other scores `values` if given."""
        return e.reduce_sum(e.mul(self.values if values is None else values, self.mask), [1], keepdims=False)


@dataclass(frozen=True, slots=True)
class ScoreArguments:
    """The arguments that explanations and attacks share: the class, the names of scores and input, and the target."""

    label: Label
    of: str | None
    input: str | None
    target: TargetLike


def with_scores(
    model: AnyModel, write: Callable[[Emitter, ir.Value, Scores], Mapping[str, ir.Value]], asked: ScoreArguments
) -> Built:
    """Add the outputs that `write` returns to a classifier; it is given the emitter, the input, and the scores."""

    def added(e: Emitter) -> Mapping[str, ir.Value]:
        return write(e, one_floating_input(e.graph, asked.input), scores_of(e, asked.of, asked.label))

    return compose(model, added, wrt="inputs", target=asked.target, keep_outputs=True)


def scores_of(e: Emitter, of: str | None, label: Label) -> Scores:
    """Emit the scores of a classifier, and the class of each sample.

    The value `of` with the scores is any value of the graph, whose axis 1 holds the classes. By default it is the only
    floating output; if that ends in Softmax, LogSoftmax or Sigmoid, the logits before.

    Raises:
        ArgumentError: The output is ambiguous, or there is no such value or class.
        ModelError: The scores have no axes.
    """
    if isinstance(label, (list, np.ndarray)) or (isinstance(label, tuple) and not label):
        raise ArgumentError(
            f"label is {label!r}, not one class or place for all samples.",
            hint="Give the number of a class; a tuple (class, place, ...) for scores with further axes; or 'input', to give "
            "the class of each sample to a graph input.",
        )
    source, axis = _source(e.graph, of)
    if isinstance(label, tuple):
        label, *places = label
        source, axis = _at(e, source, axis, places), None
    values = _matrix(e, source, axis)
    classes = None if values.shape is None else known(values.shape[1])
    if label is None:
        chosen = e.op("ArgMax", values, axis=1, keepdims=0)
    elif label == "input":
        chosen = new_input(e, "label", ir.DataType.INT64, ir.Shape([values.shape[0] if values.shape else None]))
    else:
        number = whole(label, "label", 0)
        if classes is not None and number >= classes:
            raise ArgumentError(f"There is no class {number}: the model has {classes}, numbered from 0.")
        chosen = e.op("Expand", e.const(np.int64(number)), e.vector([e.dim(values, 0)]))
    return Scores(values, one_hot(e, chosen, values), chosen)


def one_hot(e: Emitter, label: ir.Value, like: ir.Value) -> ir.Value:
    """1 at the class of each sample, else 0, from labels int64 `[N]`: of the shape and dtype of `like`, `[N, C]`."""
    return e.typed(e.mask(e.compare("Equal", e.unsqueeze(label, [1]), e.arange(e.dim(like, 1))), like), like)


def floating_value(graph: ir.Graph, name: str, argument: str) -> ir.Value:
    """The floating value that an argument names."""
    values = {found: v for found, v in named_values(graph).items() if floating(v)}
    check_names([name], list(values), f"value in {argument}:", INSPECT)
    return values[name]


def _source(graph: ir.Graph, of: str | None) -> tuple[ir.Value, int | None]:
    """The value with the scores, and the axis of its classes if that is certain."""
    if of is not None:
        return floating_value(graph, of, "of"), None
    outputs = [v for v in graph.outputs if floating(v)]
    endings = {v: Ending.of(v) for v in outputs}
    certain = [v for v in outputs if endings[v].activation] or outputs
    if len(certain) != 1:
        listed = ", ".join(v.name or "" for v in certain) or "none"
        raise ArgumentError(
            f"The model has {len(certain)} floating outputs ({listed}), not one.", hint="Name the scores with of=."
        )
    ending = endings[certain[0]]
    if not ending.activation or ending.last is None or ending.last.inputs[0] is None:
        return certain[0], None
    logits = ending.last.inputs[0]
    if ending.activation == "Sigmoid" or logits.shape is None:
        return logits, None
    return logits, ending.last.attributes.get_int("axis", -1) % len(logits.shape)


def _at(e: Emitter, values: ir.Value, axis: int | None, places: Sequence[int]) -> ir.Value:
    """The scores `[N, C]` at a place on the axes that hold neither samples nor classes."""
    rank = e.rank(values, "the choice of a place")
    axes = [i for i in range(1, rank) if i != _axis(axis)]
    if len(places) != len(axes):
        raise ArgumentError(
            f"A label of {1 + len(places)} numbers does not fit the scores {values.name!r}, which have {rank} axes.",
            hint="It has the number of the class, and one for each further axis but that of the samples.",
        )
    for i, place in reversed(list(zip(axes, places, strict=True))):
        number, size = whole(place, "a place in label", 0), None if values.shape is None else known(values.shape[i])
        if size is not None and number >= size:
            raise ArgumentError(f"There is no place {number} on axis {i} of the scores, which has {size}.")
        values = e.op("Gather", values, e.const(np.int64(number)), axis=i)
    return values


def _axis(axis: int | None) -> int:
    """The axis of the classes: as it is known, or else 1."""
    return axis or 1


def _matrix(e: Emitter, values: ir.Value, axis: int | None) -> ir.Value:
    """Scores `[N, C]` from values with an axis of classes, summed over all others but the first."""
    rank = e.rank(values, "the choice of a class")
    if rank == 0:
        raise ModelError(f"{values.name!r} is one number, not a score per sample.", hint="Name the scores with of=.")
    if rank == 1:  # one score per sample
        return e.unsqueeze(values, [1])
    return e.reduce_sum(values, [i for i in range(1, rank) if i != _axis(axis)], keepdims=False)
