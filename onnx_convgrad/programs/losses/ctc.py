"""Connectionist temporal classification (Graves et al. 2006), equal to `torch.nn.CTCLoss`.

With the extended labels l (a blank around every label) and log probabilities u, the paths to state s at frame t have

    alpha[t, s] = u[t, l[s]] + log sum exp (alpha[t - 1, s], alpha[t - 1, s - 1], alpha[t - 1, s - 2] unless a label repeats)

which a Scan computes. The rest of each path is a path of the reversed frames and labels, so the Scan computes it too, in a
second half of the batch. The gradient of the loss is minus the share of paths that emit a label at a frame: the walk sees
it as a constant factor of u, so that it never differentiates the Scan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.numbers import natural
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.loop_bodies import Carried, Layout, Slices, emit_loop, placeholder
from onnx_convgrad.programs.losses.elementwise import Loss, Spec, reduce, shape_of

_NEVER = -1e30
"""Number that stands for the logarithm of 0; finite, so that differences are not NaN."""


@dataclass(frozen=True, eq=False)
class CTC(Loss):
    """CTC loss of logits or log-probabilities `[N, T, classes]`, with labels `[N, S]` padded at their end by any number.

    A second input, `<target>_lengths` `[N]`, holds the lengths of the labels. Sums over samples are PyTorch's: the mean
    divides each by the length of its label first.

    Args:
        blank: The class that stands for no label.
        zero_infinity: Count a sample whose label is too long for its frames as 0 instead of infinity.
        time_first: Whether the output is `[T, N, classes]`.
        input_lengths: Whether there is a third input, `<target>_input_lengths` `[N]`, with the number of frames of each
            sample; without it, all frames count.
    """

    blank: int = 0
    zero_infinity: bool = False
    time_first: bool = False
    input_lengths: bool = False

    checks: ClassVar = {"blank": natural}

    takes = "logits"

    def target(self, y: ir.Value) -> Spec:
        shape = shape_of(y, "the CTC loss")
        if len(shape) != 3:
            raise ArgumentError(f"The output {y.name!r} has shape {shape}; the loss ctc takes [N, T, classes].")
        classes = known(shape[2])
        if classes is not None and self.blank >= classes:
            raise ArgumentError(f"The blank {self.blank} is not a class: the output {y.name!r} has {classes}.")
        return ir.DataType.INT64, ir.Shape([shape[int(self.time_first)], None])

    def more_targets(self, y: ir.Value) -> dict[str, Spec]:
        spec = ir.DataType.INT64, ir.Shape([shape_of(y, "the CTC loss")[int(self.time_first)]])
        return {"lengths": spec, **({"input_lengths": spec} if self.input_lengths else {})}

    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value, *lengths: ir.Value) -> ir.Value:
        if "Scan" in e.target.missing:
            raise ArgumentError(f"The loss ctc needs the operator Scan, which the target {e.target.name!r} lacks.")
        u = e.op("LogSoftmax", e.wide(y), axis=2)
        u = e.transpose(u, [1, 0, 2]) if self.time_first else u
        frames = e.dim(u, 1)
        every = e.ints([frames]) if isinstance(frames, int) else frames
        ends = lengths[1] if self.input_lengths else e.op("Expand", every, e.shape(lengths[0]))
        labels = _Labels.of(e, target, lengths[0], self.blank)
        where = e.op("Expand", e.unsqueeze(labels.states, [1]), e.concat([e.ints([1]), every, e.ints([1])], 0))
        chances = e.op("GatherElements", u, where, axis=2)  # [N, T, states]
        fixed = labels.masked(e, _constant(e, chances))
        cost, share = _paths(e, fixed, labels, ends)
        gain = e.cast_like(e.neg(share), u)
        passed = e.where(e.compare("Equal", gain, 0), 0, e.mul(gain, e.op("Max", chances, e.scalar(_NEVER, u))))
        passed = e.reduce_sum(passed, [1, 2], keepdims=False)
        apart = e.sub(passed, e.cast_like(_constant(e, passed), u))  # 0, with the gradient of the loss
        possible = e.compare("Less", cost, -_NEVER / 10)
        else_ = 0.0 if self.zero_infinity else float("inf")
        cost = e.cast_like(e.where(possible, cost, else_), u)
        loss = e.add(cost, e.where(possible, apart, 0))
        if self.reduction == "mean":
            loss = e.div(loss, e.cast_like(e.op("Max", lengths[0], e.const(1)), u))
        return reduce(e, loss, self.reduction)


def _constant(e: Emitter, value: ir.Value) -> ir.Value:
    """A value in float64 without its derivative: rounded to 2^-30, since the derivative of a rounded value is zero."""
    scaled = e.mul(e.cast(value, ir.DataType.DOUBLE), 2.0**30)
    return e.mul(e.op("Round", scaled), 2.0**-30)


@dataclass(frozen=True, slots=True)
class _Labels:
    """The extended labels of a batch.

    Attributes:
        states: `[N, 2 S + 1]`, with a blank around each label.
        counts: `[N]`, the number of states that a sample has.
        used: Whether a state is one of those.
        skips: 0 where a path may skip the blank before a state, else the logarithm of 0; float64.
    """

    states: ir.Value
    counts: ir.Value
    used: ir.Value
    skips: ir.Value

    @classmethod
    def of(cls, e: Emitter, target: ir.Value, lengths: ir.Value, blank: int) -> _Labels:
        place = e.arange(e.dim(target, 1))
        column = e.unsqueeze(lengths, [1])
        labels = e.op("Where", e.compare("Less", place, column), target, e.const(np.int64(blank)))
        blanks = e.op("Expand", e.const(np.int64(blank)), e.shape(target))
        both = e.concat([e.unsqueeze(blanks, [2]), e.unsqueeze(labels, [2])], 2)
        last = e.op("Expand", e.const(np.full((1, 1), blank)), e.shape(column))
        states = e.concat([e.op("Reshape", both, e.ints([0, -1])), last], 1)
        counts = e.add(e.op("Mul", lengths, e.const(2)), e.const(1))
        used = e.compare("Less", e.arange(e.dim(states, 1)), e.unsqueeze(counts, [1]))
        before = e.slice(e.concat([last, last, states], 1), [0], [-2], [1])
        free = e.op("And", _differ(e, states, e.const(np.int64(blank))), _differ(e, states, before))
        none, never = (e.const(np.float64(number)) for number in (0.0, _NEVER))
        return cls(states, counts, used, e.op("Where", free, none, never))

    def masked(self, e: Emitter, chances: ir.Value) -> ir.Value:
        """Log probabilities `[N, T, states]`, with the logarithm of 0 for the states that a sample lacks."""
        return e.op("Where", e.unsqueeze(self.used, [1]), e.op("Max", chances, e.scalar(_NEVER, chances)),
                    e.scalar(_NEVER, chances))  # fmt: skip


def _differ(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    return e.op("Not", e.compare("Equal", a, b))


def _paths(e: Emitter, chances: ir.Value, labels: _Labels, ends: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Minus the log probability of all paths `[N]`, and the share of them in each state `[N, T, states]`; float64."""

    def turned(value: ir.Value) -> ir.Value:
        """Reverse the frames and states that a sample has."""
        value = e.op("ReverseSequence", value, ends, batch_axis=0, time_axis=1)
        flat = e.transpose(value, [0, 2, 1])
        return e.transpose(e.op("ReverseSequence", flat, labels.counts, batch_axis=0, time_axis=1), [0, 2, 1])

    def reversed_skips() -> ir.Value:
        """From s the reversed labels skip to s + 2 where the labels skip from s + 2 to s."""
        flat = e.concat([e.slice(labels.skips, [2], [2**31], [1]), e.slice(labels.skips, [0], [2], [1])], 1)
        return e.op("ReverseSequence", flat, labels.counts, batch_axis=0, time_axis=1)

    both = e.transpose(e.concat([chances, turned(chances)], 0), [1, 0, 2])
    alpha = e.transpose(_scan(e, both, e.concat([labels.skips, reversed_skips()], 0)), [1, 0, 2])
    forward, backward = e.ops("Split", alpha, outputs=2, axis=0, num_outputs=2)
    backward = turned(e.typed(backward, chances))
    joint = e.sub(e.add(e.typed(forward, chances), backward), chances)
    first = e.slice(joint, [0], [1], [1])  # every path passes one state of the first frame
    total = _log_sum(e, e.squeeze(first, [1]), 1)
    share = e.op("Exp", e.sub(joint, e.unsqueeze(total, [2])))
    inside = e.compare("Less", e.arange(e.dim(chances, 1)), e.unsqueeze(ends, [1]))
    possible = e.compare("Greater", total, _NEVER / 10)
    counted = e.op("And", e.unsqueeze(inside, [2]), e.unsqueeze(possible, [2]))
    return e.neg(e.squeeze(total, [1])), e.where(counted, share, 0)


def _log_sum(e: Emitter, value: ir.Value, axis: int) -> ir.Value:
    most = e.reduce("ReduceMax", value, [axis])
    return e.add(most, e.op("Log", e.reduce_sum(e.op("Exp", e.sub(value, most)), [axis])))


def _scan(e: Emitter, chances: ir.Value, skips: ir.Value) -> ir.Value:
    """alpha for all frames `[T, N, states]`."""
    none, never = (e.scalar(number, skips) for number in (0.0, _NEVER))
    first = e.op("Where", e.compare("Equal", e.arange(e.dim(skips, 1)), 0), none, never)
    first, start = e.op("Expand", first, e.shape(skips)), len(e.emitted)
    before, frame = (placeholder(e, skips, skips.shape) for _ in range(2))
    padded = e.op("Pad", before, e.ints([0, 2, 0, 0]), never)
    one = e.slice(padded, [1], [-1], [1])
    two = e.add(e.slice(padded, [0], [-2], [1]), skips)
    most = e.op("Max", before, one, two)
    total = e.sum([e.op("Exp", e.sub(v, most)) for v in (before, one, two)])
    after = e.typed(e.add(frame, e.add(most, e.op("Log", total))), skips)
    _, (alphas,) = emit_loop(e, start, [Carried(first, before, after)], {frame: Slices(chances)}, [(after, Layout())])
    return e.typed(alphas, chances)
