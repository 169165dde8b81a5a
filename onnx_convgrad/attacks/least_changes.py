"""Attacks that search for the least change of an input that misleads a classifier: DeepFool, Carlini and Wagner's."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.attacks.attack import Attack, Bounds, attack, state
from onnx_convgrad.base.numbers import positive, whole
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.loop_bodies import Layout, Slices, emit_loop, emit_repeat, placeholder
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import TargetLike
from onnx_convgrad.pipeline.scores import Label, ScoreArguments, one_hot

_NUMERIC = 1e-4, 1e-8
"""Numbers added to distances, so that steps cross the boundary, and to norms, which may be zero (as in foolbox)."""

_INSIDE = 0.999999
"""Factor that moves inputs at the bounds inside, where the inverse of tanh is finite (as in foolbox)."""

_BETAS, _TINY = (0.9, 0.999), 1e-8
"""Adam's decay rates and the number that it adds to roots."""


@transformation
def deepfool(
    model: AnyModel,
    *,
    steps: int = 50,
    candidates: int = 10,
    overshoot: float = 0.02,
    label: Label = None,
    bounds: Bounds = (0.0, 1.0),
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Attack a classifier by steps to the nearest boundary of its classes, as if scores were linear.

    The steps are a Loop inside the file, which ends when every sample is misclassified.

    Other arguments, result and errors as for `fgsm`.

    Args:
        steps: The most steps.
        candidates: The number of classes, those with the highest scores, whose boundaries are considered.
        overshoot: Share by which the change is enlarged, to cross the boundary.
        label: The class that the prediction is to leave, as for `fgsm`.

    Moosavi-Dezfooli, Fawzi, Frossard: DeepFool (2016), arXiv:1511.04599, algorithm 2.
    """
    steps, candidates = whole(steps, "steps"), whole(candidates, "candidates", 2)
    positive(overshoot, "overshoot")

    def write(x: Attack) -> ir.Value:
        e = x.e
        count = e.size_min(candidates, e.dim(x.scores.values, 1))
        ranking = _highest(e, x.scores.values, count)
        still = e.zeros_like(x.input)
        rest = e.slice(ranking, [1], [count], [1])  # [N, K]
        own = one_hot(e, e.squeeze(e.slice(ranking, [0], [1], [1]), [1]), x.scores.values)
        start = len(e.emitted)
        point, total = x.carried(x.input), x.carried(x.input)
        values = x.scores_at(point)
        done = x.fooled(values)
        step = _nearest_boundary(x, point, values, own, rest)
        following = e.add(total, step)
        moved = e.add(x.input, e.mul(following, 1 + float(overshoot)))
        moved = x.clipped(e.where(x.per_sample(done), point, moved))
        going = e.op("Not", _all(e, done))
        states = [state(e, x.input, point, moved), state(e, still, total, following)]
        return emit_repeat(e, start, steps, states, going=going)[0]

    return attack(model, write, ScoreArguments(label, of, input, target), targeted=False, bounds=bounds)


def _highest(e: Emitter, values: ir.Value, count: Dim) -> ir.Value:
    """The numbers of the classes with the highest scores, in order: `[N, count]`."""
    if "TopK" not in e.target.missing or not isinstance(count, int):
        return e.ops("TopK", values, e.vector([count]), outputs=2, axis=1)[1]
    places = []
    for _ in range(count):
        places.append(e.op("ArgMax", values, axis=1, keepdims=0))
        found = e.compare("Greater", one_hot(e, places[-1], values), 0)
        values = e.typed(e.where(found, e.scalar(-np.inf, values), values), values)
    return e.concat([e.unsqueeze(place, [1]) for place in places], 1)


def _nearest_boundary(x: Attack, point: ir.Value, values: ir.Value, own: ir.Value, rest: ir.Value) -> ir.Value:
    """The step from a point to the nearest boundary between the class `own` and those numbered `rest`, `[N, K]`."""
    e = x.e
    start = len(e.emitted)
    other = placeholder(e, rest, ir.Shape(list(rest.shape or ())[:1]))
    cotangent = e.sub(one_hot(e, other, values), own)
    slope = x.slope(point, values, cotangent)
    gap = e.typed(e.reduce_sum(e.mul(values, cotangent), [1], keepdims=False), x.norm(slope))
    _, (gaps, slopes) = emit_loop(
        e, start, [], {other: Slices(rest, Layout(1))}, [(gap, Layout(1)), (slope, Layout(1))]
    )
    axes = list(range(2, e.rank(slopes)))
    norms = e.add(e.reduce("ReduceL2", slopes, axes, keepdims=False), _NUMERIC[1])
    distances = e.div(e.op("Abs", gaps), norms)  # [N, K]
    best = e.op("ArgMin", distances, axis=1, keepdims=1)
    numbers = e.arange(e.dim(rest, 1))
    chosen = e.mask(e.compare("Equal", best, numbers), distances)
    factor = e.mul(chosen, e.div(e.add(distances, _NUMERIC[0]), norms))
    return x.like_input(e.reduce_sum(e.mul(slopes, e.unsqueeze(factor, axes)), [1], keepdims=False))


@transformation
def carlini_wagner(
    model: AnyModel,
    *,
    steps: int = 200,
    searches: int = 9,
    step: float = 0.01,
    confidence: float = 0.0,
    constant: float = 1e-3,
    label: Label = None,
    targeted: bool = False,
    bounds: Bounds = (0.0, 1.0),
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Attack a classifier by minimizing the squared Euclidean change plus a constant times a margin of the scores.

    The constant is searched for each sample: times ten until the attack succeeds, then by bisection. The change is
    written as a tanh, so that it keeps the bounds, and minimized by Adam. Both loops are inside the file.

    Other arguments and errors as for `fgsm`.

    Args:
        steps: Steps of Adam for each constant.
        searches: Number of constants.
        step: Learning rate of Adam.
        confidence: Margin of the scores by which the attack must succeed.
        constant: The first constant.

    Returns:
        What `fgsm` returns; where the attack fails, `adversarial` is the input.

    Carlini, Wagner: Towards Evaluating the Robustness of Neural Networks (2017), arXiv:1608.04644, section VI.A.
    """
    steps, searches = whole(steps, "steps"), whole(searches, "searches")
    for number, name in ((step, "step"), (constant, "constant")):
        positive(number, name, zero=False)
    positive(confidence, "confidence")

    def write(x: Attack) -> ir.Value:
        e, like = x.e, x.norm(x.input)
        search = _Search(x, steps, float(step), float(confidence))
        least = e.full_like(like, float(constant))
        nothing, infinite = e.zeros_like(like), e.full_like(like, np.inf)
        start = len(e.emitted)
        weight, lower, upper, best, length = (x.carried(v) for v in (like, like, like, x.input, like))
        found, better, shorter = search.minimized(weight, best, length)
        new_upper, new_lower = e.where(found, weight, upper), e.where(found, lower, weight)
        middle = e.mul(e.add(new_lower, new_upper), 0.5)
        following = e.where(e.op("IsInf", new_upper), e.mul(weight, 10), middle)
        states = [
            state(e, least, weight, following),
            state(e, nothing, lower, new_lower),
            state(e, infinite, upper, new_upper),
            state(e, x.input, best, better),
            state(e, infinite, length, shorter),
        ]
        return emit_repeat(e, start, searches, states)[3]

    return attack(model, write, ScoreArguments(label, of, input, target), targeted=targeted, bounds=bounds)


class _Search:
    """Minimization for one constant per sample, in the space of the inverse tanh."""

    def __init__(self, x: Attack, steps: int, rate: float, confidence: float) -> None:
        e = x.e
        self.x, self.steps, self.rate, self.confidence = x, steps, rate, confidence
        self.middle, self.half = e.mul(e.add(x.low, x.high), 0.5), e.mul(e.sub(x.high, x.low), 0.5)
        scaled = e.mul(e.div(e.sub(x.input, self.middle), self.half), _INSIDE)
        # this is Atanh, for which ONNX Runtime has no float64 kernel
        self.origin = x.like_input(e.mul(e.op("Log", e.div(e.add(scaled, 1), e.sub(1, scaled))), 0.5))
        self.rebuilt = x.like_input(e.add(e.mul(e.op("Tanh", self.origin), self.half), self.middle))
        self.still = e.zeros_like(x.input)

    def minimized(self, weight: ir.Value, best: ir.Value, length: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Take Adam's steps; return whether an attack was found, the shortest change so far, and its length."""
        x, e = self.x, self.x.e
        never = e.op("Less", weight, e.scalar(0, weight))
        start = len(e.emitted)
        number = placeholder(e, x.scores.label, ir.Shape([]))
        delta, mean, square = (x.carried(x.input) for _ in range(3))
        found, near, norm = x.carried(never), x.carried(x.input), x.carried(length)
        curve = x.like_input(e.op("Tanh", e.add(self.origin, delta)))
        point = x.like_input(e.add(e.mul(curve, self.half), self.middle))
        values = x.scores_at(point)
        slope = x.like_input(e.mul(self._slope(point, values, weight), e.mul(e.sub(1, e.square(curve)), self.half)))
        new_mean = e.add(e.mul(mean, _BETAS[0]), e.mul(slope, 1 - _BETAS[0]))
        new_square = e.add(e.mul(square, _BETAS[1]), e.mul(e.square(slope), 1 - _BETAS[1]))
        turn = e.add(e.cast(number, x.input.dtype or ir.DataType.FLOAT), 1)
        first, second = (e.sub(1, e.op("Pow", e.scalar(b, x.input), turn)) for b in _BETAS)
        root = e.add(e.op("Sqrt", e.div(new_square, second)), _TINY)
        moved = e.sub(delta, e.mul(e.div(e.div(new_mean, first), root), self.rate))
        success = x.fooled(values, self.confidence)
        change = x.norm(e.sub(point, x.input))
        closer = e.op("And", success, e.op("Less", change, norm))
        states = [
            state(e, self.still, delta, moved),
            state(e, self.still, mean, new_mean),
            state(e, self.still, square, new_square),
            state(e, never, found, e.op("Or", found, success)),
            state(e, best, near, e.where(x.per_sample(closer), point, near)),
            state(e, length, norm, e.where(closer, change, norm)),
        ]
        last = emit_repeat(e, start, self.steps, states, number=number)
        return last[3], last[4], last[5]

    def _slope(self, point: ir.Value, values: ir.Value, weight: ir.Value) -> ir.Value:
        """The gradient of the loss with respect to a point: c max(0, margin + confidence) + |point - input|^2."""
        x, e = self.x, self.x.e
        mask = x.scores.mask
        others = e.where(e.compare("Greater", mask, 0), e.scalar(-np.inf, values), values)
        rival = one_hot(e, e.op("ArgMax", others, axis=1, keepdims=0), values)
        cotangent = e.sub(rival, mask) if x.targeted else e.sub(mask, rival)
        margin = e.add(e.reduce_sum(e.mul(values, cotangent), [1], keepdims=False), self.confidence)
        share = e.mul(weight, e.mask(e.compare("Greater", margin, 0), weight))
        slope = x.slope(
            point, values, e.mul(cotangent, e.unsqueeze(e.cast(share, values.dtype or ir.DataType.FLOAT), [1]))
        )
        return e.add(slope, e.mul(e.sub(point, self.rebuilt), 2))


def _all(e: Emitter, conditions: ir.Value) -> ir.Value:
    """Whether all bools `[N]` are true; rank 0."""
    lowest = e.op("ReduceMin", e.cast(conditions, ir.DataType.INT32), e.ints([0]), keepdims=0)
    return e.cast(lowest, ir.DataType.BOOL)
