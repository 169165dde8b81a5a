"""Losses for classes of very different frequency: the focal loss (Lin et al. 2017) and the soft Dice loss.

The Dice loss of a class is 1 - (2 sum p t + s) / (sum p + sum t + s) over the positions of one sample, with probabilities p,
labels t and smoothing s (Milletari et al. 2016, in the form without squares). Outputs without positions, [N, classes], are
summed over the batch instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnx_convgrad.base.numbers import positive, share
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.programs.losses.cross_entropy import ClassLoss, LogProbabilities
from onnx_convgrad.programs.losses.elementwise import Loss, reduce, shape_of


@dataclass(frozen=True, eq=False)
class Focal(ClassLoss):
    """Focal loss of classes that exclude each other: -(1 - p[t])^gamma log p[t], with p = softmax y.

    With gamma 0 it is the cross entropy, also in how weights enter the mean.

    Args:
        gamma: How much confident predictions are weighed down.
    """

    gamma: float = 2.0

    checks: ClassVar = {"gamma": positive}

    def modulated(self, e: Emitter, loss: ir.Value) -> ir.Value:
        missed = e.op("Relu", e.sub(1, e.op("Exp", e.neg(loss))))  # rounding may give less than 0
        return e.mul(e.op("Pow", missed, float(self.gamma)), loss) if self.gamma else loss

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        return self.by_index(e, LogProbabilities.of_logits(e, e.wide(y), self.axis_of(y)), target)


@dataclass(frozen=True, eq=False)
class SigmoidFocal(Loss):
    """Focal loss of independent classes from logits, as `torchvision.ops.sigmoid_focal_loss`.

    Args:
        alpha: Weight of positive labels, 1 - alpha that of negative ones; `None` for none.
        gamma: How much confident predictions are weighed down.
    """

    alpha: float | None = 0.25
    gamma: float = 2.0

    checks: ClassVar = {"gamma": positive, "alpha": share}

    takes = "binary logits"

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        y, target = e.wide(y), e.wide(target)
        p, other = e.op("Sigmoid", y), e.sub(1, target)
        entropy = e.add(e.mul(other, y), e.op("Softplus", e.neg(y)))
        missed = e.add(e.mul(e.sub(1, p), target), e.mul(p, other))
        loss = e.mul(entropy, e.op("Pow", missed, float(self.gamma))) if self.gamma else entropy
        if self.alpha is not None:
            loss = e.mul(e.add(e.mul(target, self.alpha), e.mul(other, 1 - self.alpha)), loss)
        return reduce(e, loss, self.reduction)


@dataclass(frozen=True, eq=False)
class Dice(ClassLoss):
    """Soft Dice loss of classes that exclude each other, from logits; each entry is the loss of one sample and class.

    Args:
        smooth: Added to both sides of the ratio, so that absent classes do not divide by zero.
    """

    smooth: float = 1.0

    checks: ClassVar = {"smooth": positive}

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        axis = self.axis_of(y)
        p = e.op("Softmax", e.wide(y), axis=axis)
        index = e.unsqueeze(target, [axis])
        hit = e.mask(e.compare("Equal", index, LogProbabilities(e, p, None, axis).classes()), p)
        if self.ignore_index is not None:
            p = e.where(e.compare("Equal", index, self.ignore_index), 0, p)
        weights = self.weights(e, LogProbabilities(e, p, None, axis))
        loss = _dice(e, p, hit, axis, self)
        return reduce(e, loss if weights is None else e.mul(loss, weights), self.reduction)


@dataclass(frozen=True, eq=False)
class BinaryDice(Loss):
    """Soft Dice loss of independent classes from logits, with labels of the output's shape; classes are on axis 1.

    Args:
        smooth: As for `Dice`.
    """

    smooth: float = 1.0

    checks: ClassVar = {"smooth": positive}

    takes = "binary logits"

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        loss = _dice(e, e.op("Sigmoid", e.wide(y)), e.wide(target), 1, self)
        return reduce(e, loss, self.reduction)


def _dice(e: Emitter, p: ir.Value, target: ir.Value, axis: int, loss: Dice | BinaryDice) -> ir.Value:
    """The loss of each sample and class, or of each class if there are no positions."""
    smooth, axes = loss.smooth, [i for i in range(len(shape_of(p, "the Dice loss"))) if i not in (0, axis)]
    if not axes and loss.sample_weight:
        raise ArgumentError(
            "The Dice loss of an output [N, classes] is one of the whole batch, whose samples have no weights.",
            hint="Leave sample_weight out, or use cross_entropy, focal or sigmoid_focal.",
        )
    axes = axes or [0]
    both, one, other = (e.reduce_sum(v, axes, keepdims=False) for v in (e.mul(p, target), p, target))
    return e.sub(1, e.div(e.add(e.mul(both, 2), smooth), e.add(e.add(one, other), smooth)))
