"""Cross entropy and other losses over the class axis: axis 1 by default, or the only axis of a vector.

With u = log softmax(y), weights w, smoothing s and C classes, one sample costs

    index labels          (1 - s) w[t] (-u[t]) + s / C sum over c of w[c] (-u[c])        mean: divided by the sum of w[t]
    probability labels    sum over c of w[c] q[c] (-u[c]),  q = (1 - s) p + s / C        mean: divided by the samples

If the class axis is not the last one, u is not computed, since ONNX Runtime would transpose. Instead u[c] = z[c] - log sum
exp z with z = y - ceil(max y), which is as exact: any shift cancels, and the derivative of a rounded one is zero.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsIndex

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.numbers import above_zero, factors, share
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.indices import takes_one_of_few
from onnx_convgrad.programs.losses.elementwise import Loss, Spec, Takes, like, reduce, shape_of


def class_axis(y: ir.Value, axis: int = 1) -> int:
    """The class axis: `axis`, or 0 for a vector; raises `ArgumentError` if the output has no such axis."""
    rank = len(shape_of(y, "the class axis"))
    if rank == 0:
        raise ArgumentError(
            f"The output {y.name!r} is a single number, and a loss over classes needs an axis of them.",
            hint="Its output has the shape [N, classes] or [N, classes, ...].",
        )
    if rank == 1 and axis in (0, 1, -1):
        return 0
    if not -rank <= axis < rank:
        raise ArgumentError(
            f"The output {y.name!r} has {rank} axes, and the loss has its classes along axis {axis}.",
            hint=f"axis is at least {-rank} and below {rank}.",
        )
    return axis % rank


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """u = value - total along `axis`, where `total` is the logarithm of a sum, or `None` if the value is u itself."""

    e: Emitter
    value: ir.Value
    total: ir.Value | None
    axis: int

    @classmethod
    def of_logits(cls, e: Emitter, y: ir.Value, axis: int) -> LogProbabilities:
        """Emit the log probabilities of logits along `axis`."""
        if axis == len(shape_of(y, "the class axis")) - 1:
            return cls(e, e.op("LogSoftmax", y, axis=axis), None, axis)
        shifted = e.sub(y, e.op("Ceil", e.reduce("ReduceMax", y, [axis])))
        return cls(e, shifted, e.op("Log", e.reduce_sum(e.op("Exp", shifted), [axis])), axis)

    def pick(self, index: ir.Value) -> ir.Value:
        """Emit u at one class per sample; `index` has a class axis of size one."""
        e = self.e
        last = self.total is None and "ScatterElements" not in e.target.missing
        if last or takes_one_of_few(self.value, index, self.axis):
            picked = e.op("GatherElements", self.value, index, axis=self.axis)
        else:  # Where, not a product: u is infinite for a class of probability zero
            hit = e.compare("Equal", index, self.classes())
            picked = e.reduce_sum(e.where(hit, self.value, 0), [self.axis])
        return picked if self.total is None else e.sub(picked, self.total)

    def dot(self, weights: ir.Value | None) -> ir.Value:
        """Emit the sum over classes of weights times u; `None` means ones."""
        e = self.e
        weighted = self.value if weights is None else e.mul(self.value, weights)
        result = e.reduce_sum(weighted, [self.axis])
        if self.total is None:
            return result
        if weights is None:
            mass = e.size_as(e.dim(self.value, self.axis), self.value)
        else:
            mass = e.reduce_sum(weights, [-1 - self.trailing])  # weights may lack the axes before the classes
        return e.sub(result, e.mul(self.total, mass))

    def classes(self) -> ir.Value:
        """0, 1, ..., C - 1 along the class axis."""
        return self.along(self.e.arange(self.e.dim(self.value, self.axis)))

    def along(self, vector: ir.Value) -> ir.Value:
        """Unsqueeze a vector over the classes, so that it broadcasts against u."""
        return self.e.unsqueeze(vector, range(1, 1 + self.trailing))

    @property
    def trailing(self) -> int:
        """Number of axes after the classes."""
        return len(shape_of(self.value, "the class axis")) - 1 - self.axis


@dataclass(frozen=True, eq=False)
class ClassLoss(Loss):
    """Base class of the losses whose labels are classes.

    Args:
        weight: Factor for each class.
        ignore_index: Label that is ignored; `None` for none.
        axis: Axis of the classes in the output; the labels have all other axes. -1 for sequences: an output of
            [N, T, classes] and labels of [N, T].
    """

    weight: Sequence[float] | np.ndarray | None = None
    ignore_index: int | None = -100
    axis: int = 1

    takes: ClassVar[Takes] = "logits"

    def axis_of(self, y: ir.Value) -> int:
        return class_axis(y, self.axis)

    def target(self, y: ir.Value) -> Spec:
        shape = list(shape_of(y, "the labels"))
        del shape[self.axis_of(y)]
        return ir.DataType.INT64, ir.Shape(shape)

    def check(self) -> None:
        if not isinstance(self.axis, SupportsIndex) or isinstance(self.axis, bool):
            raise ArgumentError(f"axis must be a whole number, not {self.axis!r}.")
        if self.weight is not None and factors(self.weight, "weight").ndim != 1:
            raise ArgumentError("weight must be one number per class.")
        if self.ignore_index is not None and not isinstance(self.ignore_index, SupportsIndex):
            raise ArgumentError(f"ignore_index must be a whole number or None, not {self.ignore_index!r}.")

    def weights(self, e: Emitter, u: LogProbabilities) -> ir.Value | None:
        """The class weights as a constant vector, if there are any."""
        if self.weight is None:
            return None
        count = known(shape_of(u.value, "the class axis")[u.axis])
        if count is not None and count != len(self.weight):
            raise ArgumentError(
                f"There are {len(self.weight)} class weights for {count} classes.", hint="Give one number per class."
            )
        return like(e, self.weight, u.value)

    def modulated(self, e: Emitter, loss: ir.Value) -> ir.Value:  # noqa: ARG002 - for subclasses
        """The loss of each label before weights, from its cross entropy."""
        return loss

    def by_index(self, e: Emitter, u: LogProbabilities, target: ir.Value, smoothing: float = 0.0) -> ir.Value:
        """Emit the loss for class numbers as labels; one that is neither a class nor ignored makes the loss NaN."""
        axis, weights = u.axis, self.weights(e, u)
        index = e.unsqueeze(target, [axis])
        count = e.dim(u.value, axis)
        inside = e.op(
            "And",
            e.compare("GreaterOrEqual", index, 0),
            e.compare("Less", index, count if isinstance(count, int) else e.squeeze(count, [0])),
        )
        outside: Any = float("nan")
        if self.ignore_index is not None:
            ignored = e.compare("Equal", index, self.ignore_index)
            inside = e.op("And", inside, e.op("Not", ignored))
            outside = e.where(ignored, e.scalar(0, u.value), float("nan"))
        safe = e.op("Mul", index, e.cast(inside, ir.DataType.INT64))
        loss = self.modulated(e, e.neg(u.pick(safe)))
        share = None if weights is None else e.op("Gather", weights, safe)
        if share is not None:
            loss = e.mul(loss, share)
        if smoothing:
            spread = u.dot(None if weights is None else u.along(weights))
            classes = e.size_as(count, u.value)
            loss = e.sub(e.mul(loss, 1 - smoothing), e.mul(spread, e.div(e.scalar(smoothing, u.value), classes)))
        loss = e.squeeze(e.where(inside, loss, outside), [axis])
        if self.reduction != "mean":
            return reduce(e, loss, self.reduction)
        counted = e.mask(inside, u.value) if share is None else e.where(inside, share, 0)
        return reduce(e, loss, "mean", e.op("ReduceSum", counted, keepdims=0))

    @abstractmethod
    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value: ...


@dataclass(frozen=True, eq=False)
class CrossEntropy(ClassLoss):
    """Cross entropy of logits.

    Args:
        label_smoothing: Share of every label that is distributed evenly over the classes.
        probabilities: Whether labels are probabilities, of the shape and dtype of the output, instead of class numbers.
    """

    label_smoothing: float = 0.0
    probabilities: bool = False

    checks: ClassVar = {"label_smoothing": share}

    def target(self, y: ir.Value) -> Spec:
        return Loss.target(self, y) if self.probabilities else super().target(y)

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        u = LogProbabilities.of_logits(e, e.wide(y), self.axis_of(y))
        if not self.probabilities:
            return self.by_index(e, u, target, self.label_smoothing)
        weights, share, target = self.weights(e, u), self.label_smoothing, e.wide(target)
        if share:
            even = e.div(e.scalar(share, u.value), e.size_as(e.dim(u.value, u.axis), u.value))
            target = e.add(e.mul(target, 1 - share), even)
        if weights is not None:
            target = e.mul(target, u.along(weights))
        loss = e.squeeze(e.neg(u.dot(target)), [u.axis])
        return reduce(e, loss, self.reduction)


@dataclass(frozen=True, eq=False)
class NLL(ClassLoss):
    """Negative log likelihood: cross entropy of log probabilities."""

    takes = "log-probabilities"

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        u = LogProbabilities(e, e.wide(y), None, self.axis_of(y))
        return self.by_index(e, u, target)


@dataclass(frozen=True, eq=False)
class KLDiv(Loss):
    """Sum of t (log t - y) as `torch.nn.functional.kl_div`, for an output of log-probabilities y.

    With a temperature T, output and labels are logits, and the loss is T^2 times the divergence of softmax(y / T) from
    softmax(target / T) (Hinton et al. 2015).

    Args:
        reduction: Also `"batchmean"`: the sum divided by the samples, which is the divergence as defined; `"mean"` divides
            by all entries, as PyTorch does.
        log_target: Whether labels are log-probabilities.
        temperature: For distillation; `None` for an output of log-probabilities.
        axis: Axis of the classes.
    """

    reductions: ClassVar[tuple[str, ...]] = ("mean", "batchmean", "sum", "none")
    log_target: bool = False
    temperature: float | None = None
    axis: int = 1

    checks: ClassVar = {"temperature": above_zero}

    def check(self) -> None:
        if self.temperature is not None and self.log_target:
            raise ArgumentError("log_target is for labels of log-probabilities; with a temperature they are logits.")

    @property
    def takes(self) -> Takes:
        return "log-probabilities" if self.temperature is None else "logits"

    def axis_of(self, y: ir.Value) -> int:
        return class_axis(y, self.axis)

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        axis = self.axis_of(y)
        logarithm, target = e.wide(y), e.wide(target)
        if self.temperature is not None:
            logarithm, target = (e.op("LogSoftmax", e.div(v, self.temperature), axis=axis) for v in (logarithm, target))
        logarithms = self.log_target or self.temperature is not None
        chance = e.op("Exp", target) if logarithms else target
        none = e.compare("Equal", chance, 0)  # 0 (log 0 - y) = 0, also where minus infinity masks a class
        own = target if logarithms else e.op("Log", e.where(none, 1, target))
        loss = e.mul(chance, e.where(none, 0, e.sub(own, logarithm)))
        if self.temperature is not None:
            loss = e.mul(loss, self.temperature**2)
        if self.reduction != "batchmean":
            return reduce(e, loss, self.reduction)
        return e.div(reduce(e, loss, "sum"), e.size_as(e.dim(y, 0), loss))
