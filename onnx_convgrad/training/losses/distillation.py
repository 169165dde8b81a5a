"""Distillation: the divergence from the predictions of a teacher, both softened by a temperature."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.base.numbers import positive, whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.training.losses.elementwise import Loss, Takes, reduce, shape_of, wide


@dataclass(frozen=True, eq=False)
class Distillation(Loss):
    """T^2 KL(softmax(target / T) || softmax(y / T)) of logits, with T the temperature. The target are the teacher's logits.

    Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015): the factor T^2 keeps the size of the
    gradients. For [N, classes] the mean is that of PyTorch's `kl_div` with `reduction="batchmean"`.

    Args:
        temperature: Above 0; the larger, the more the small probabilities count.
        axis: Axis of the classes.
    """

    temperature: float = 4.0
    axis: int = 1

    def check(self) -> None:
        positive(self.temperature, "temperature", zero=False)
        whole(self.axis, "axis", -8)

    @property
    def takes(self) -> Takes:
        return "logits"

    def axis_of(self, y: ir.Value) -> int:
        rank = len(shape_of(y, "the class axis"))
        if not -rank <= self.axis < rank:
            raise ArgumentError(
                f"The output {y.name!r} has {rank} axes, and the loss has its classes along {self.axis}."
            )
        return self.axis % rank

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        axis = self.axis_of(y)
        own, wanted = (e.op("LogSoftmax", e.div(wide(e, value), self.temperature), axis=axis) for value in (y, target))
        apart = e.mul(e.op("Exp", wanted), e.sub(wanted, own))
        sums = e.reduce_sum(apart, [axis], keepdims=False)
        return reduce(e, e.mul(sums, self.temperature**2), self.reduction)
