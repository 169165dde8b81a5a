"""Elementwise losses, equal to PyTorch's; the base class of all losses.

A loss emits plain nodes, whose gradient is left to the ordinary reverse walk. It is called with an `Emitter`, an output of
the model and its labels, and returns a value of the graph; any function of that form can be used in its place. float16 and
bfloat16 are widened to float32 first.

Args:
    y: The output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import Check, above_zero, check_fields, factors, flag
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.ir.dims import static_dims
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.shape_hints import input_shape_option
from onnx_convgrad.programs.losses.sample_weight import weighted

Reduction = Literal["mean", "batchmean", "sum", "none"]

Spec = tuple[ir.DataType, ir.Shape | None]
"""Dtype and shape of labels."""

Takes = Literal["", "logits", "binary logits", "log-probabilities", "probabilities"]
"""Kinds of numbers that losses take: any, logits of classes that exclude each other or of independent ones, logarithms, or
probabilities."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Loss(ABC):
    """A loss of one output. Called as `loss(e, y, target)`, it returns a scalar, or entries with the reduction `"none"`.

    A subclass may also return entries, which are reduced, or a pair `(total, count)`, of which one is divided by the other.

    Args:
        reduction: `"mean"`, `"sum"`, or `"none"`; with `"none"` the sum is differentiated.
        sample_weight: Multiply the loss of each sample by its weight, the input `sample_weight` `[N]`, behind the labels. A
            mean divides by the count of the loss without weights: sum(w l) / N, Keras' `sum_over_batch_size`.
    """

    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum", "none")
    reduction: Reduction = "mean"
    sample_weight: bool = False

    checks: ClassVar[Mapping[str, Check]] = {"sample_weight": flag}

    def __post_init__(self) -> None:
        check_names([self.reduction], self.reductions, "reduction")
        check_fields(self)
        self.check()

    def __init_subclass__(cls) -> None:
        """Let each call check that it gets the labels that the loss takes, and weigh samples."""
        super().__init_subclass__()
        if "__call__" in cls.__dict__:
            cls.__call__ = _with_targets(cls.__dict__["__call__"])  # type: ignore[method-assign]

    def check(self) -> None:  # noqa: B027 - not every loss has options
        """Raise `ArgumentError` for invalid options."""

    @property
    def takes(self) -> Takes:
        """The required meaning of the output's numbers."""
        return ""

    @property
    def also(self) -> Sequence[str]:
        """Names of the values of the model that the loss takes besides the output, before the labels."""
        return ()

    def axis_of(self, y: ir.Value) -> int:
        """The axis of the classes, for a loss that takes logits or log-probabilities of classes."""
        return len(shape_of(y, "the class axis")) - 1

    def target(self, y: ir.Value) -> Spec:
        """Dtype and shape of the labels for the output `y`; those of `y` by default."""
        return y.dtype or ir.DataType.FLOAT, y.shape

    def more_targets(self, y: ir.Value) -> dict[str, Spec]:  # noqa: ARG002 - most losses have one array of labels
        """Further labels: the input `<target>_<key>` for each key; the loss is called with them behind `target`."""
        return {}

    def label_count(self, y: ir.Value) -> int:
        """The number of arrays of labels."""
        return 1 + len(self.more_targets(y))

    def called(self, y: ir.Value) -> Loss:  # noqa: ARG002 - most losses compute themselves
        """The loss that says what the labels must be: this one, or the one that a function calls."""
        return self

    @abstractmethod
    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        """Emit the loss."""

    def to_json(self) -> dict[str, Any]:
        """The options that differ from their defaults, as JSON values."""
        changed = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray):
                value = value.tolist()
            if value != f.default:
                changed[f.name] = value
        return changed


class WrongTargetError(ArgumentError):
    """A loss was called with another kind of labels than it takes, of which `spec` is dtype and shape."""

    def __init__(self, loss: Loss, given: ir.Value, spec: Spec) -> None:
        name, self.loss, self.spec = type(loss).__name__, loss, spec
        texts = [f"{dtype and dtype.name} of shape {shape}" for dtype, shape in (spec, (given.dtype, given.shape))]
        super().__init__(
            f"The loss {name} takes labels of the type {texts[0]}, and the function of the loss gives it {texts[1]}.",
            hint="Convert them in the function, or state those that it takes: og.losses.Custom(function, dtype=, shape=).",
        )


def _with_targets(call: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that refuses numbers where it takes classes, classes where it takes numbers, and missing labels or weights."""

    @wraps(call)
    def checked(self: Loss, e: Emitter, y: ir.Value, *operands: ir.Value) -> Any:
        others: Sequence[ir.Value] = operands
        weighs = self.sample_weight and type(self).__call__ is checked  # not where a subclass calls its base
        if weighs:
            *others, weight = _with_weight(self, y, others)
        targets = others[len(self.also) :]
        if targets:
            spec, given = self.target(y), targets[0]
            classes = spec[0].is_integer()
            ranks = {len(shape) for shape in (spec[1], given.shape) if shape is not None}
            if given.dtype is not None and (given.dtype.is_integer() != classes or (classes and len(ranks) > 1)):
                raise WrongTargetError(self, given, spec)
            missing = list(self.more_targets(y))[len(targets) - 1 :]
            if missing:
                raise ArgumentError(
                    f"The loss {type(self).__name__} needs further labels: {', '.join(missing)}.",
                    hint="Use it by itself, as one of several losses, or in a subclass of og.losses.Loss with more_targets.",
                )
        result = call(self, e, y, *others)
        return weighted(e, result, weight, type(self).__name__) if weighs else result

    return checked


def _with_weight(loss: Loss, y: ir.Value, others: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """The operands of a loss behind the output, of which the last one is the weights of the samples."""
    if len(others) <= len(loss.also) + loss.label_count(y):
        raise ArgumentError(
            f"The loss {type(loss).__name__} has sample_weight=True, and gets no weights.",
            hint="Give them behind its labels, or leave sample_weight out of a loss that a function calls.",
        )
    return others


def reduce(e: Emitter, value: ir.Value, reduction: Reduction, count: ir.Value | None = None) -> ir.Value:
    """Reduce a value over all axes; a mean divides by `count` if given."""
    scalar = value.shape is not None and not value.shape
    if reduction == "none" or (scalar and count is None):
        return value
    if reduction == "mean" and count is None:
        return _number(e.op("ReduceMean", value, keepdims=0))
    total = value if scalar else _number(e.op("ReduceSum", value, keepdims=0))
    return total if reduction == "sum" or count is None else _number(e.div(total, count))


def _number(value: ir.Value) -> ir.Value:
    """A value that has no axes, also where the shape of what it was computed from is unknown."""
    value.shape = ir.Shape(())
    return value


def shape_of(y: ir.Value, why: str) -> ir.Shape:
    """The shape of an output; raises `ModelError` when even its rank is unknown."""
    if y.shape is None:
        raise ModelError(
            f"The rank of the output {y.name!r} is unknown, but needed for {why}.",
            hint=f"Give the shapes of the inputs, as in {input_shape_option(y.graph.inputs if y.graph else ())}.",
        )
    return y.shape


# -- regression --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MSE(Loss):
    """(y - target)^2."""

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        error = e.sub(e.wide(y), e.wide(target))
        if self.reduction == "none":
            return e.square(error)
        total = e.op("ReduceSumSquare", error, keepdims=0)  # its gradient is one product
        return total if self.reduction == "sum" else e.div(total, size(e, error))


@dataclass(frozen=True, eq=False)
class L1(Loss):
    """|y - target|."""

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        return reduce(e, e.op("Abs", e.sub(e.wide(y), e.wide(target))), self.reduction)


@dataclass(frozen=True, eq=False)
class Huber(Loss):
    """d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2), with d = y - target.

    Args:
        delta: The difference at which the square turns into a line; above 0.
    """

    delta: float = 1.0

    checks: ClassVar = {"delta": above_zero}

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        error = e.sub(e.wide(y), e.wide(target))
        size_ = e.op("Abs", error)
        near = e.mul(e.square(error), 0.5)
        far = e.mul(e.sub(size_, 0.5 * self.delta), self.delta)
        return reduce(e, e.where(e.compare("LessOrEqual", size_, self.delta), near, far), self.reduction)


# -- two classes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BCEWithLogits(Loss):
    """-(pos_weight t log s(y) + (1 - t) log(1 - s(y))), with the logistic function s and labels t in [0, 1].

    Computed as (1 - t) y + (1 + (pos_weight - 1) t) log(1 + exp(-y)), which neither overflows nor loses digits.

    Args:
        weight: Factor for each entry; broadcasts against the output.
        pos_weight: Factor for positive labels; broadcasts against the output.
    """

    weight: ArrayLike | None = None
    pos_weight: ArrayLike | None = None

    checks: ClassVar = {"weight": factors, "pos_weight": factors}

    takes = "binary logits"

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        y, target = e.wide(y), e.wide(target)
        tail = e.op("Softplus", e.neg(y))
        if self.pos_weight is not None:
            more = _factors(e, np.asarray(self.pos_weight, np.float64) - 1, y, "pos_weight")
            tail = e.mul(e.add(e.mul(target, more), 1), tail)
        loss = e.add(e.mul(e.sub(1, target), y), tail)
        if self.weight is not None:
            loss = e.mul(loss, _factors(e, self.weight, y, "weight"))
        return reduce(e, loss, self.reduction)


@dataclass(frozen=True, eq=False)
class BCE(Loss):
    """-(t log p + (1 - t) log(1 - p)) of an output p of probabilities, with labels t in [0, 1].

    For probabilities that are pooled or averaged; those of a Sigmoid itself lose fewer digits with `BCEWithLogits`. The
    logarithms are at least -100, as PyTorch's `BCELoss` has them; where p is exactly 0 or 1, its gradient is 0.

    Args:
        weight: Factor for each entry; broadcasts against the output.
    """

    weight: ArrayLike | None = None

    checks: ClassVar = {"weight": factors}

    takes = "probabilities"

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        y, target = e.wide(y), e.wide(target)
        there, absent = _logarithm(e, y), _logarithm(e, e.sub(1, y))
        loss = e.neg(e.add(e.mul(target, there), e.mul(e.sub(1, target), absent)))
        if self.weight is not None:
            loss = e.mul(loss, _factors(e, self.weight, y, "weight"))
        return reduce(e, loss, self.reduction)


def _logarithm(e: Emitter, p: ir.Value) -> ir.Value:
    """log p, at least -100; the constant -100, without a gradient, for 0."""
    tiny = e.scalar(1e-37, p)
    return e.where(e.compare("Greater", p, tiny), e.op("Log", e.op("Max", p, tiny)), -100)


def _factors(e: Emitter, numbers: ArrayLike, y: ir.Value, name: str) -> ir.Value:
    """Factors as a constant; raises `ArgumentError` if they do not broadcast against the known sizes of the output."""
    sizes, dims = np.shape(numbers), static_dims(y)
    fits = dims is None or (
        len(sizes) <= len(dims)
        and all(f == 1 or d in (None, f) for f, d in zip(reversed(sizes), reversed(dims), strict=False))
    )
    if not fits:
        shape = [d if d is not None else "?" for d in dims or ()]
        raise ArgumentError(f"{name} has shape {list(sizes)}, which does not broadcast against the output's {shape}.")
    return like(e, numbers, y)


# -- constants ---------------------------------------------------------------------------------------------------------


def like(e: Emitter, numbers: ArrayLike, y: ir.Value) -> ir.Value:
    """Constant numbers in the dtype of `y`."""
    return e.const(np.asarray(numbers, np.float64), y.dtype or ir.DataType.FLOAT)


def size(e: Emitter, value: ir.Value) -> ir.Value:
    """The number of entries as a scalar of `value`'s dtype; a constant if it is known."""
    dims = static_dims(value)
    if dims is not None and None not in dims:
        return e.scalar(float(np.prod(np.asarray(dims, np.int64))), value)
    return e.cast_like(e.op("Size", value), value)
