"""Losses of embeddings `[N, D]` with labels `[N]`: samples with one label belong together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnx_convgrad.base.numbers import above_zero, positive
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.programs.losses.elementwise import Loss, Spec, reduce, shape_of


@dataclass(frozen=True, eq=False)
class EmbeddingLoss(Loss):
    """Base class of these losses."""

    def target(self, y: ir.Value) -> Spec:
        shape = shape_of(y, "the labels")
        if len(shape) != 2:
            raise ArgumentError(
                f"The output {y.name!r} has shape {shape}; a loss of embeddings takes [N, D], one vector per sample.",
                hint="Name a value of this shape: loss={name: ...}.",
            )
        return ir.DataType.INT64, ir.Shape([shape[0]])


def _pairs(e: Emitter, y: ir.Value, target: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Two masks over pairs of samples, `[N, N]`: whether they are two with one label, and whether they are the same."""
    numbers = e.arange(e.dim(y, 0))
    same, itself = (e.compare("Equal", e.unsqueeze(v, [1]), e.unsqueeze(v, [0])) for v in (target, numbers))
    return e.op("And", same, e.op("Not", itself)), itself


@dataclass(frozen=True, eq=False)
class Triplet(EmbeddingLoss):
    """Triplet margin loss, max(d(a, p) - d(a, n) + margin, 0), of all triplets of a batch (Hermans et al. 2017, batch all).

    a and p are two samples with one label, n one with another; distances are those of
    `torch.nn.functional.triplet_margin_loss`. The mean is over all triplets, 0 if there are none.

    Args:
        margin: The distance by which other labels shall be farther.
        p: Exponent of the norm.
        eps: Added to each difference, as PyTorch does.
        swap: Use d(p, n) where it is smaller than d(a, n).
    """

    margin: float = 1.0
    p: float = 2.0
    eps: float = 1e-6
    swap: bool = False

    checks: ClassVar = {"margin": above_zero, "p": above_zero, "eps": positive}

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        y = e.wide(y)
        positives, itself = _pairs(e, y, target)
        others = e.op("Not", e.op("Or", positives, itself))
        apart = e.add(e.sub(e.unsqueeze(y, [1]), e.unsqueeze(y, [0])), self.eps)
        if self.p == 2:
            distance = e.op("Sqrt", e.reduce_sum(e.square(apart), [2], keepdims=False))
        else:
            powers = e.op("Pow", e.op("Abs", apart), float(self.p))
            distance = e.op("Pow", e.reduce_sum(powers, [2], keepdims=False), 1 / float(self.p))
        far = e.unsqueeze(distance, [1])
        if self.swap:
            far = e.op("Min", far, e.unsqueeze(distance, [0]))
        loss = e.op("Relu", e.add(e.sub(e.unsqueeze(distance, [2]), far), self.margin))
        valid = e.op("And", e.unsqueeze(positives, [2]), e.unsqueeze(others, [1]))
        loss = e.where(valid, loss, 0)
        if self.reduction != "mean":
            return reduce(e, loss, self.reduction)
        count = e.op("ReduceSum", e.mask(valid, y), keepdims=0)
        return reduce(e, loss, "mean", e.op("Max", count, e.scalar(1, y)))


@dataclass(frozen=True, eq=False)
class Contrastive(EmbeddingLoss):
    """Supervised contrastive loss (Khosla et al. 2020); with two samples per label it is NT-Xent (Chen et al. 2020).

    Each entry is the loss of one sample: the mean, over the others with its label, of the cross entropy of the cosine
    similarities to all others, divided by the temperature. The mean is over samples that have others with their label.

    Args:
        temperature: Divides the similarities.
    """

    temperature: float = 0.1

    checks: ClassVar = {"temperature": above_zero}

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        y = e.wide(y)
        positives, itself = _pairs(e, y, target)
        squares = e.reduce_sum(e.square(y), [1])
        unit = e.div(y, e.op("Sqrt", e.op("Max", squares, e.scalar(1e-24, y))))
        similar = e.div(e.matmul(unit, e.swap_last(unit)), self.temperature)
        chances = e.op("LogSoftmax", e.where(itself, -1e30, similar), axis=1)
        total = e.reduce_sum(e.where(positives, chances, 0), [1], keepdims=False)
        count = e.reduce_sum(e.mask(positives, y), [1], keepdims=False)
        loss = e.neg(e.div(total, e.op("Max", count, e.scalar(1, y))))
        if self.reduction != "mean":
            return reduce(e, loss, self.reduction)
        counted = e.op("ReduceSum", e.mask(e.compare("Greater", count, 0), y), keepdims=0)
        return reduce(e, loss, "mean", e.op("Max", counted, e.scalar(1, y)))
