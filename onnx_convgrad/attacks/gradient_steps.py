"""Attacks of a given strength that follow the gradient of the cross entropy: FGSM and projected gradient descent."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.attacks.attack import SMALL, Attack, Bounds, attack, state
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import flag, positive, whole
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.ir.loop_bodies import emit_repeat
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import TargetLike
from onnx_convgrad.pipeline.scores import Label, ScoreArguments

NORMS = ("inf", "2")


@transformation
def fgsm(
    model: AnyModel,
    epsilon: float,
    *,
    label: Label = None,
    targeted: bool = False,
    norm: str = "inf",
    bounds: Bounds = (0.0, 1.0),
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Attack a classifier by one step of a given length along the gradient of the cross entropy.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        epsilon: Length of the step, in the units of the input.
        label: The class that the prediction is to leave: its number, `"input"` for a graph input `label` (int64 `[N]`), or
            `None` for the class with the highest score, sample by sample.
        targeted: The prediction is to become `label` instead.
        norm: `"inf"`: every number changes by epsilon. `"2"`: the change of a sample has the Euclidean norm epsilon.
        bounds: The smallest and the largest number of the input: numbers, or arrays that broadcast to it. Of normalized
            images they are `(0 - mean) / std` and `(1 - mean) / std`.
        of: The value with the scores `[N, C]`; by default the only floating output, or the logits before its Softmax.
        input: The input that is changed; by default the only floating one.
        target: As for `onnx_convgrad.augment`.

    Returns:
        The model with three more outputs: `adversarial`, of the input's shape and dtype; `success` (bool `[N]`, whether the
        prediction for it left, or became, the class) and `attacked_label`, int64 `[N]`.

    Raises:
        ArgumentError: An unknown name or option, an ambiguous input or output, or a single score per sample.
        ModelError: The model cannot be read or brought to opset 21.
        DifferentiationError: Some nodes cannot be differentiated; all are listed.

    Goodfellow, Shlens, Szegedy: Explaining and Harnessing Adversarial Examples (2015), arXiv:1412.6572.
    """
    positive(epsilon, "epsilon")
    check_names([norm], NORMS, "norm")

    def write(x: Attack) -> ir.Value:
        return x.clipped(x.e.add(x.input, x.e.mul(_direction(x, x.uphill(x.input), norm), float(epsilon))))

    return attack(model, write, ScoreArguments(label, of, input, target), targeted=targeted, bounds=bounds)


@transformation
def pgd(
    model: AnyModel,
    epsilon: float,
    *,
    steps: int = 40,
    step: float | None = None,
    momentum: float = 0.0,
    random_start: bool = False,
    seed: int = 0,
    label: Label = None,
    targeted: bool = False,
    norm: str = "inf",
    bounds: Bounds = (0.0, 1.0),
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Attack a classifier by steps along the gradient of the cross entropy, each projected into a ball around the input.

    The steps are a Loop inside the file.

    Other arguments, result and errors as for `fgsm`.

    Args:
        epsilon: Radius of the ball, in the units of the input.
        steps: Number of steps.
        step: Length of a step; by default `2.5 * epsilon / steps`.
        momentum: Share of the earlier directions that is kept. Above 0, gradients are divided by their L1 norms and added up
            (Dong et al., arXiv:1710.06081).
        random_start: Begin at a random point of the ball.
        seed: Seed of that. Runs after the first of a session draw other points.
        norm: `"inf"`: the ball limits each number, and steps follow the sign of the gradient. `"2"`: it limits the Euclidean
            norm of a sample's change, and steps follow the gradient, scaled to norm 1.

    Madry et al.: Towards Deep Learning Models Resistant to Adversarial Attacks (2018), arXiv:1706.06083.
    """
    positive(epsilon, "epsilon")
    steps, seed, random_start = whole(steps, "steps"), whole(seed, "seed", 0), flag(random_start, "random_start")
    length = 2.5 * epsilon / steps if step is None else step
    for number, name in ((length, "step"), (momentum, "momentum")):
        positive(number, name)
    check_names([norm], NORMS, "norm")

    def write(x: Attack) -> ir.Value:
        e = x.e
        first = x.clipped(e.add(x.input, _random(x, norm, epsilon, seed))) if random_start else x.input
        still = e.zeros_like(x.input)
        start = len(e.emitted)
        point, velocity = x.carried(x.input), x.carried(x.input)
        slope = x.uphill(point)
        if momentum:
            slope = e.add(e.mul(velocity, float(momentum)), x.scaled_to_one(slope, 1))
        moved = e.add(point, e.mul(_direction(x, slope, norm), float(length)))
        following = x.clipped(_projected(x, moved, norm, float(epsilon)))
        states = [state(e, first, point, following)]
        if momentum:
            states.append(state(e, still, velocity, slope))
        return emit_repeat(e, start, steps, states)[0]

    return attack(model, write, ScoreArguments(label, of, input, target), targeted=targeted, bounds=bounds)


def _direction(x: Attack, slope: ir.Value, norm: str) -> ir.Value:
    """The step of length 1 that raises the loss most."""
    if norm == "2":
        return x.scaled_to_one(slope, 2)
    above, below = (x.e.mask(x.e.compare(op, slope, 0), slope) for op in ("Greater", "Less"))
    return x.e.sub(above, below)  # not every target has Sign


def _projected(x: Attack, point: ir.Value, norm: str, epsilon: float) -> ir.Value:
    """The nearest point of the ball around the input."""
    e = x.e
    change = e.sub(point, x.input)
    if norm == "inf":
        change = e.op("Min", e.op("Max", change, e.scalar(-epsilon, change)), e.scalar(epsilon, change))
    else:
        length = e.op("Max", x.norm(change), e.scalar(SMALL, change))
        share = e.op("Min", e.div(e.scalar(epsilon, change), length), e.scalar(1, change))
        change = e.mul(change, x.per_sample(share))
    return e.add(x.input, change)


def _random(x: Attack, norm: str, epsilon: float, seed: int) -> ir.Value:
    """A change that is uniformly distributed in the ball."""
    e = x.e
    if norm == "inf":
        return e.op("RandomUniformLike", x.input, low=-float(epsilon), high=float(epsilon), seed=float(seed))
    axes = list(range(1, e.rank(x.input)))
    count = e.size_as(e.size_mul(1, *(e.dim(x.input, a) for a in axes)), x.input)
    one = e.reduce_sum(x.input, axes, keepdims=False)
    uniform = e.wide(e.op("RandomUniformLike", one, seed=float(seed) + 1))
    radius = e.cast_like(e.op("Pow", uniform, e.div(1, count)), x.input)
    direction = x.scaled_to_one(e.op("RandomNormalLike", x.input, seed=float(seed)), 2)
    return e.mul(direction, x.per_sample(e.mul(radius, float(epsilon))))
