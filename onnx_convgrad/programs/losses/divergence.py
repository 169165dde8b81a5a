"""Kullback-Leibler divergence, also for distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnx_convgrad.base.numbers import above_zero
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.programs.losses.cross_entropy import class_axis
from onnx_convgrad.programs.losses.elementwise import Loss, Takes, reduce


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
        if self.log_target or self.temperature is not None:
            loss = e.mul(e.op("Exp", target), e.sub(target, logarithm))
        else:
            there = e.compare("Greater", target, 0)  # 0 log 0 = 0
            entropy = e.mul(target, e.op("Log", e.where(there, target, 1)))
            loss = e.sub(entropy, e.mul(target, logarithm))
        if self.temperature is not None:
            loss = e.mul(loss, self.temperature**2)
        if self.reduction != "batchmean":
            return reduce(e, loss, self.reduction)
        return e.div(reduce(e, loss, "sum"), e.size_as(e.dim(y, 0), loss))
