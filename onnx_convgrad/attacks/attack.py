"""The parts that all attacks share: the attacked input, the class, bounds, gradients at other points, success."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.base.numbers import factors, flag
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.loop_bodies import Carried, placeholder
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.composed import at_point
from onnx_convgrad.pipeline.scores import ScoreArguments, Scores, with_scores

Bounds = Sequence[Any]
"""The smallest and the largest number of the input: numbers, or arrays that broadcast to it."""

SMALL = 1e-12
"""Least norm that is divided by."""


@dataclass(frozen=True, slots=True)
class Attack:
    """The graph that an attack is written into.

    Attributes:
        e: Its emitter.
        input: The attacked input, `[N, ...]`.
        scores: The scores, and the class that is left, or reached if `targeted`.
        targeted: Whether the class is to be reached.
        low: The smallest number of the input.
        high: The largest.
    """

    e: Emitter
    input: ir.Value
    scores: Scores
    targeted: bool
    low: ir.Value
    high: ir.Value

    def clipped(self, x: ir.Value) -> ir.Value:
        """The nearest input within the bounds."""
        return clipped(self.e, x, self.low, self.high, self.input)

    def scores_at(self, x: ir.Value) -> ir.Value:
        """The scores `[N, C]` of another input."""
        return at_point(self.e, self.input, x, self.scores.values)

    def slope(self, x: ir.Value, values: ir.Value, cotangent: ir.Value) -> ir.Value:
        """The gradient with respect to `x` of its scores `values`, for their `cotangent`."""
        found = backward(self.e, {values: self.e.typed(cotangent, values)}, [x])
        return found[x] if x in found else self.e.zeros_like(x)

    def uphill(self, x: ir.Value) -> ir.Value:
        """The direction in which the cross entropy of the class grows, or falls if it is to be reached, by gradient."""
        e, values = self.e, self.scores_at(x)
        cotangent = e.sub(e.op("Softmax", values, axis=1), self.scores.mask)
        return self.slope(x, values, e.neg(cotangent) if self.targeted else cotangent)

    def fooled(self, values: ir.Value, margin: float = 0.0) -> ir.Value:
        """Whether scores meet the goal, by at least a margin of the class's score; bool `[N]`."""
        e = self.e
        if margin:
            values = e.add(values, e.mul(self.scores.mask, -margin if self.targeted else margin))
        same = e.op("Equal", e.op("ArgMax", values, axis=1, keepdims=0), self.scores.label)
        return same if self.targeted else e.op("Not", same)

    def like_input(self, x: ir.Value) -> ir.Value:
        return self.e.typed(x, self.input)

    def per_sample(self, value: ir.Value) -> ir.Value:
        """A value `[N]` with axes of size 1 behind, to be broadcast against the input."""
        return self.e.unsqueeze(value, list(range(1, self.e.rank(self.input))))

    def norm(self, x: ir.Value, order: int = 2) -> ir.Value:
        """The norm of each sample, `[N]`."""
        return self.e.reduce(f"ReduceL{order}", x, list(range(1, self.e.rank(self.input))), keepdims=False)

    def scaled_to_one(self, x: ir.Value, order: int) -> ir.Value:
        """Each sample divided by its norm."""
        return self.e.div(x, self.per_sample(self.e.op("Max", self.norm(x, order), self.e.scalar(SMALL, x))))

    def carried(self, like: ir.Value) -> ir.Value:
        """A placeholder for a value that a loop carries, of the dtype and shape of `like`."""
        return placeholder(self.e, like, like.shape)


def clipped(e: Emitter, x: ir.Value, low: ir.Value, high: ir.Value, like: ir.Value) -> ir.Value:
    """The nearest numbers within bounds, of the shape and dtype of `like`."""
    return e.typed(e.op("Min", e.op("Max", x, low), high), like)


def state(e: Emitter, first: ir.Value, inner: ir.Value, following: ir.Value) -> Carried:
    """A carried value, whose shape and dtype never change."""
    return Carried(first, inner, e.typed(following, first))


def attack(
    model: AnyModel,
    write: Callable[[Attack], ir.Value],
    arguments: ScoreArguments,
    *,
    targeted: bool,
    bounds: Bounds,
) -> Built:
    """Add the input that `write` returns, and whether it meets the goal, to a model; arguments and errors as for `fgsm`."""
    targeted = flag(targeted, "targeted")
    if targeted and arguments.label is None:
        raise ArgumentError("A targeted attack needs the class to reach.", hint="Give its number, or label='input'.")
    ends = ends_of(bounds)

    def added(e: Emitter, image: ir.Value, scores: Scores) -> dict[str, ir.Value]:
        if scores.values.shape is not None and known(scores.values.shape[1]) == 1:
            raise ArgumentError(
                "The model has one score per sample, which no attack on classes can change.",
                hint="Name scores of at least two classes with of=.",
            )
        low, high = (e.const(end, image.dtype) for end in ends)
        x = Attack(e, image, scores, targeted, low, high)
        changed = write(x)
        return {"adversarial": changed, "success": x.fooled(x.scores_at(changed)), "attacked_label": scores.label}

    return with_scores(model, added, arguments)


def ends_of(bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest numbers of the input."""
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ArgumentError(f"bounds must be the smallest and the largest number, not {bounds!r:.60}.") from None
    low, high = factors(low, "bounds"), factors(high, "bounds")
    if not (low < high).all():
        raise ArgumentError(f"The lower bound must be below the upper one, unlike {bounds!r:.60}.")
    return low, high
