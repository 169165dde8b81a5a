"""Explanations by gradients at many points, in a loop inside the file: SmoothGrad, integrated gradients, occlusion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.attribution.explanation import Explanation, explanation
from onnx_convgrad.attribution.layers import spatial_axes
from onnx_convgrad.base.numbers import factors, flag, positive, whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.loop_bodies import Slices, emit_sums, placeholder
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.composed import new_input
from onnx_convgrad.pipeline.options import TargetLike
from onnx_convgrad.pipeline.scores import Label, ScoreArguments


@transformation
def smooth_grad(
    model: AnyModel,
    *,
    label: Label = None,
    samples: int = 25,
    noise: float = 0.15,
    noise_input: bool = False,
    seed: int = 0,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Explain a prediction by the mean of gradients at inputs with noise, which is less ragged than one gradient.

    Other arguments, result and errors as for `saliency`.

    Args:
        samples: Number of noisy inputs whose gradients are averaged.
        noise: Standard deviation of noise: a share of the range (largest minus smallest number) of each sample.
        noise_input: Whether to add a graph input `noise` of shape `[samples, *input]` as it is, in place of drawn noise.
        seed: Seed of the noise. Runs after the first of a session draw different noise.

    Smilkov et al.: SmoothGrad (2017), arXiv:1706.03825.
    """
    samples, seed = whole(samples, "samples"), whole(seed, "seed", 0)
    positive(noise, "noise")
    flag(noise_input, "noise_input")

    def write(x: Explanation) -> Mapping[str, ir.Value]:
        e, image = x.e, x.input
        axes = list(range(1, e.rank(image)))
        if noise_input:
            assert image.shape is not None
            turns = new_input(e, "noise", image.dtype or ir.DataType.FLOAT, ir.Shape([samples, *image.shape]))
        else:
            turns = e.const(np.zeros(samples), image.dtype)
            spread = e.sub(e.reduce("ReduceMax", image, axes), e.reduce("ReduceMin", image, axes))
            scale = e.mul(spread, float(noise))
        zeros, start = e.zeros_like(image), len(e.emitted)
        added = turn = placeholder(e, image, image.shape if noise_input else ir.Shape([]))
        if not noise_input:
            added = e.mul(e.typed(e.op("RandomNormalLike", image, seed=float(seed)), image), scale)
        point = e.typed(e.add(image, added), image)
        total = emit_sums(e, start, {turn: Slices(turns)}, [(zeros, x.gradient_at(point))])[0]
        return {"attribution": e.div(total, samples)}

    return explanation(model, write, ScoreArguments(label, of, input, target))


@transformation
def integrated_gradients(
    model: AnyModel,
    *,
    label: Label = None,
    baseline: Any = 0.0,
    steps: int = 50,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Explain a prediction by the gradient, integrated along the straight line from a baseline to the input.

    The attributions of a sample add up to the difference of its score from that of the baseline, but for the error of the
    quadrature (Gauss and Legendre's), which is an output.

    Other arguments and errors as for `saliency`.

    Args:
        baseline: An input without information: a number, an array that broadcasts to the input, or `"input"` for a graph
            input `baseline` of the input's shape.
        steps: Number of points between baseline and input.

    Returns:
        The model with three more outputs: `attribution`, of the input's shape and dtype, `convergence_delta` (`[N]`, the sum
        of a sample's attributions minus the difference of the scores) and `explained_label`, int64 `[N]`.

    Sundararajan, Taly, Yan: Axiomatic Attribution for Deep Networks (2017), arXiv:1703.01365.
    """
    steps = whole(steps, "steps")

    def write(x: Explanation) -> Mapping[str, ir.Value]:
        e, image = x.e, x.input
        base = _baseline(e, image, baseline)
        way = e.sub(image, base)
        nodes, weights = np.polynomial.legendre.leggauss(steps)
        zeros, start = e.zeros_like(image), len(e.emitted)
        share, weight = (placeholder(e, image, ir.Shape([])) for _ in range(2))
        point = e.typed(e.add(base, e.mul(share, way)), image)
        scanned = {
            share: Slices(e.const((nodes + 1) / 2, image.dtype)),
            weight: Slices(e.const(weights / 2, image.dtype)),
        }
        mean = emit_sums(e, start, scanned, [(zeros, e.mul(x.gradient_at(point), weight))])[0]
        attribution = e.mul(way, mean)
        axes = list(range(1, e.rank(image)))
        rise = e.sub(x.scores.selected(e), x.score_at(base))
        delta = e.sub(e.reduce_sum(attribution, axes, keepdims=False), rise)
        return {"attribution": attribution, "convergence_delta": delta}

    return explanation(model, write, ScoreArguments(label, of, input, target))


@transformation
def occlusion(
    model: AnyModel,
    *,
    label: Label = None,
    window: int | Sequence[int] = 8,
    stride: int | Sequence[int] | None = None,
    baseline: Any = 0.0,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Explain a prediction by what its score loses where a window of the input is covered.

    It needs no gradient, and one forward pass for each position of the window.

    Other arguments as for `saliency`.

    Args:
        window: Size of the window that is covered, along the spatial axes of the input. One number for all, or one for each.
            An input `[N, F]` has the axis F. Channels are covered together.
        stride: Distance of two positions of the window; by default half of it. It is at most the window.
        baseline: What covers the input: a number, an array that broadcasts to the input, or `"input"` for a graph input
            `baseline` of the input's shape.

    Returns:
        The model with two more outputs: `attribution`, of the input's shape and dtype: the mean loss of the windows over
        each number; and `explained_label`, int64 `[N]`.

    Raises:
        ArgumentError: An unknown name or option, or an ambiguous input or output.
        ModelError: The model cannot be read or brought to opset 21.

    Zeiler, Fergus: Visualizing and Understanding Convolutional Networks (2013), arXiv:1311.2901, section 4.2.
    """
    windows = _sizes(window, "window")
    strides = [(n + 1) // 2 for n in windows] if stride is None else _sizes(stride, "stride")

    def write(x: Explanation) -> Mapping[str, ir.Value]:
        axes = spatial_axes(x.e, x.input)
        for name, numbers in (("window", windows), ("stride", strides)):
            if len(numbers) not in (1, len(axes)):
                raise ArgumentError(f"{name} has {len(numbers)} numbers for {len(axes)} spatial axes.")
        sizes, steps = ((numbers * len(axes))[: len(axes)] for numbers in (windows, strides))
        for size, step in zip(sizes, steps, strict=True):
            if step > size:
                raise ArgumentError(
                    f"A stride of {step} leaves gaps between windows of {size}.", hint="Make it smaller."
                )
        return {"attribution": _occluded(x, axes, sizes, steps, baseline)}

    return explanation(model, write, ScoreArguments(label, of, input, target))


def _sizes(numbers: int | Sequence[int], name: str) -> list[int]:
    """One number, or one for each axis, as a list."""
    several = isinstance(numbers, Iterable) and not isinstance(numbers, str)
    return [whole(n, name) for n in (numbers if several else [numbers])]  # type: ignore[union-attr]


def _occluded(x: Explanation, axes: list[int], sizes: list[int], steps: list[int], baseline: Any) -> ir.Value:
    """The mean loss of score of the windows over each number."""
    e, image = x.e, x.input
    base, before = _baseline(e, image, baseline), x.scores.selected(e)
    counts = []  # of the positions that together cover each axis
    for axis, size, step in zip(axes, sizes, steps, strict=True):
        left = e.size_max(e.size_sub(e.dim(image, axis), size), 0)
        counts.append(e.size_add(e.size_div(e.size_add(left, step - 1), step), 1))
    counted = e.arange(e.size_mul(*counts))
    uncovered = e.op(
        "Expand", e.scalar(0, image), e.vector([e.dim(image, a) if a in axes else 1 for a in range(e.rank(image))])
    )
    zeros, start = e.zeros_like(image), len(e.emitted)
    number = placeholder(e, counted, ir.Shape([]))
    rest, masks = number, []
    for axis, size, step, count in reversed(list(zip(axes, sizes, steps, counts, strict=True))):
        length = e.const(np.int64(count)) if isinstance(count, int) else e.squeeze(count, [0])
        first = e.op("Mul", e.op("Mod", rest, length), e.const(np.int64(step)))
        rest = e.op("Div", rest, length)
        places = e.unsqueeze(e.arange(e.dim(image, axis)), list(range(1, e.rank(image) - axis)))
        behind = e.op("Add", first, e.const(np.int64(size)))
        masks.append(e.op("And", e.op("GreaterOrEqual", places, first), e.op("Less", places, behind)))
    covered = reduce(lambda a, b: e.op("And", a, b), masks)
    loss = e.sub(before, x.score_at(e.typed(e.where(covered, base, image), image)))
    own = e.unsqueeze(e.cast(loss, image.dtype or ir.DataType.FLOAT), list(range(1, e.rank(image))))
    cover = e.mask(covered, image)
    spread = e.typed(e.expand(e.mul(own, cover), image), image)
    total, count_of = emit_sums(e, start, {number: Slices(counted)}, [(zeros, spread), (uncovered, cover)])
    return e.div(total, count_of)


def _baseline(e: Emitter, image: ir.Value, baseline: Any) -> ir.Value:
    """The baseline, of the shape of the input."""
    if isinstance(baseline, str) and baseline == "input":
        return new_input(e, "baseline", image.dtype or ir.DataType.FLOAT, image.shape)
    numbers = factors(baseline, "baseline")
    sizes, own = [known(d) for d in image.shape or ()], numbers.shape
    if image.shape is not None and (
        len(own) > len(sizes) or any(d not in (1, size or d) for d, size in zip(own[::-1], sizes[::-1], strict=False))
    ):
        raise ArgumentError(f"A baseline of shape {own} does not broadcast to {image.name!r}, which is {image.shape}.")
    return e.expand(e.const(numbers, image.dtype), image)
