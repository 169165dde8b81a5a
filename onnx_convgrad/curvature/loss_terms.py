"""The loss whose curvature is wanted: its value, and the columns of the root of its Hessian by the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import Slices, emit_sums, placeholder
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.pipeline.composed import new_input
from onnx_convgrad.pipeline.scores import one_hot
from onnx_convgrad.programs.losses.cross_entropy import CrossEntropy
from onnx_convgrad.programs.losses.elementwise import MSE, BCEWithLogits, Loss
from onnx_convgrad.programs.reading import read
from onnx_convgrad.programs.summands import Facts, emitted
from onnx_convgrad.programs.terms import LossLike, resolve

Convex = CrossEntropy | MSE | BCEWithLogits


Key = TypeVar("Key")


def summed(
    e: Emitter,
    zeros: Mapping[Key, ir.Value],
    numbers: ir.Value,
    terms: Callable[[ir.Value], Mapping[Key, ir.Value]],
) -> dict[Key, ir.Value]:
    """The sums of the terms that a loop over numbers emits; `zeros` are of the shapes of the terms."""
    start, number = len(e.emitted), placeholder(e, numbers, ir.Shape([]))
    found = terms(number)
    sums = emit_sums(e, start, {number: Slices(numbers)}, [(zeros[key], term) for key, term in found.items()])
    return dict(zip(found, sums, strict=True))


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A loss of one output.

    Attributes:
        e: The emitter.
        outputs: The value that it reads.
        value: The loss, one number.
        loss: Its definition; `None` if the model computes it.
    """

    e: Emitter
    outputs: ir.Value
    value: ir.Value
    loss: Loss | None

    @classmethod
    def of(cls, e: Emitter, loss: LossLike) -> LossTerm:
        """Emit a loss; its labels become a graph input.

        Raises:
            ArgumentError: The loss is unknown, has several terms, or does not fit the output.
        """
        terms = resolve(e.graph, loss)
        if len(terms) != 1 or terms[0].weight != 1:
            raise ArgumentError("The curvature of one loss can be computed, without a weight.", hint="Give one loss.")
        (term,) = terms
        values = named_values(e.graph)
        y = values[term.output or ""]
        if term.loss is not None:
            y = read(e, y, term.loss, term.reads or "")
        operands = [values[name] for name in term.also]
        operands += [new_input(e, name, *spec) for name, spec in term.targets(y).items()]
        facts = Facts((*operands, y), frozenset(), (y,))
        return cls(e, y, y if term.loss is None else emitted(e, term.loss, y, operands, facts)[0], term.loss)

    def convex(self) -> Convex:
        """The loss, if the root of its Hessian is known.

        Raises:
            ArgumentError: It is another loss, or has weights or other options.
            ModelError: The output is not `[N, C]`.
        """
        loss: Any = self.loss
        plain = isinstance(loss, (CrossEntropy, MSE, BCEWithLogits)) and loss.reduction in ("mean", "sum")
        if not plain or loss.to_json() != type(loss)(reduction=loss.reduction).to_json():
            raise ArgumentError(
                "This curvature is known for cross_entropy, mse and bce_with_logits with the reduction mean or sum, and "
                "without other options.",
                hint="Use one of these, or ggn_product, which takes any loss.",
            )
        if self.e.rank(self.outputs, "the curvature of the loss") != 2:
            raise ModelError(f"The loss reads {self.outputs.name!r} of shape {self.outputs.shape}, not [N, C].")
        return loss  # type: ignore[no-any-return]

    def column(self, number: ir.Value) -> ir.Value:
        """A column of the root S of each sample's Hessian, S S^T = H, `[N, C]`; without the division by N of a mean."""
        e, y, loss = self.e, self.outputs, self.convex()
        label = e.op("Expand", number, e.vector([e.dim(y, 0)]))
        own = one_hot(e, label, y)
        if isinstance(loss, CrossEntropy):  # H = diag(p) - p p^T
            p = e.op("Softmax", y, axis=1)
            root = e.op("Sqrt", e.reduce_sum(e.mul(p, own), [1]))
            return e.typed(e.mul(root, e.sub(own, p)), y)
        if isinstance(loss, BCEWithLogits):  # H = diag(p (1 - p))
            p = e.op("Sigmoid", y)
            root = e.mul(own, e.op("Sqrt", e.mul(p, e.sub(1, p))))
        else:  # H = 2 I
            root = e.mul(own, math.sqrt(2))
        if loss.reduction == "mean":
            wide = e.wide(root)
            root = e.cast_like(e.div(wide, e.op("Sqrt", e.size_as(e.dim(y, 1), wide))), root)
        return e.typed(root, y)

    def over_columns(
        self, zeros: Mapping[Key, ir.Value], terms: Callable[[ir.Value], Mapping[Key, ir.Value]]
    ) -> dict[Key, ir.Value]:
        """The sums over all columns of the terms that `terms` emits for each, averaged if the loss is a mean of samples.

        `zeros` are of the shapes of the terms, and the results for those that a column does not give.
        """
        self.convex()
        numbers = self.e.arange(self.e.dim(self.outputs, 1))
        totals = summed(self.e, zeros, numbers, lambda number: terms(self.column(number)))
        return {key: self.averaged(totals[key]) if key in totals else zero for key, zero in zeros.items()}

    def averaged(self, total: ir.Value) -> ir.Value:
        """A sum over the samples, divided by their number if the loss is a mean."""
        if self.convex().reduction == "sum":
            return total
        return self.e.averaged(total, self.e.dim(self.outputs, 0))
