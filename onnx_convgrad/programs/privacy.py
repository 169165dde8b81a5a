"""Differentially private gradients (DP-SGD): clipped per sample by ghost norms, with noise, in the graphs themselves.

Abadi et al. 2016, arXiv:1607.00133. The gradient of each sample is scaled down to norm C and the sum gets Gaussian noise:

    g = (sum over n of min(1, C / |g[n]|) g[n] + sigma C z) / L,   z ~ N(0, 1), L the expected number of samples

The norms come from one backward pass that keeps no gradient of a sample (Li et al. 2022, arXiv:2110.05679), and the sum
from a second one, whose cotangent is multiplied by the factors. The noise is a hash of a state, as the masks of Dropout are,
so that a run can be resumed; who knows the seed can subtract it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.walk import backward_per_sample, data_inputs
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.base.numbers import above_zero, check_fields, positive, share
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.memory.late_views import late_zero, read_late
from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.losses.elementwise import Loss
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.masks import Masks, initial_state

NOISE, EXPECTED = "noise_state", "expected_batch"
"""Slots of the state: the state of the noise, and the number of samples that the sum is divided by."""

_TINY = 1e-6
"""Added to norms that are divided by, as in Opacus."""

_ON_GPU = ("cuda", "webgpu")
"""Targets on which sizes that a kernel computes would hold up the GPU; CUDA graphs refuse them."""

_APART = 0x6E6F6973
"""Number mixed into the seed of the noise, so that it does not depend on the masks of Dropout."""


@dataclass(frozen=True, slots=True)
class Privacy:
    """Training with differential privacy (DP-SGD).

    For `build_training(..., privacy=...)`.

    Args:
        noise: Standard deviation of noise: a multiple of the norm that gradients are clipped to. 0 clips without noise,
            which protects nothing.
        max_norm: Norm to which the gradient of each sample is clipped, over all parameters together.
        delta: Probability with which the guarantee may fail. `fit` reports epsilon for it. Well below one divided
            by the number of samples.

    Raises:
        ArgumentError: A number is out of range.
    """

    noise: float
    max_norm: float = 1.0
    delta: float = 1e-5

    checks: ClassVar = {
        "noise": positive,
        "max_norm": above_zero,
        "delta": partial(share, zero=False, one=False),
    }

    def __post_init__(self) -> None:
        check_fields(self)


def private_options(manifest: Manifest) -> Privacy | None:
    """The options of private training of a program, or `None`."""
    given = manifest.options.get("privacy")
    return None if given is None else Privacy(**given)


def first_noise(seed: int | Sequence[int]) -> int:
    """The initial state of the noise for a seed or several."""
    return initial_state([_APART, *([seed] if isinstance(seed, int) else seed)])


# -- clipping ----------------------------------------------------------------------------------------------------------


def _has_samples(e: Emitter, entries: ir.Value, y: ir.Value) -> bool:
    """Whether entries have an axis of samples: no reduction has left one number, with or without axes of size 1."""
    if not e.rank(entries, "the loss of each sample"):
        return False
    return e.dim(entries, 0) != 1 or not y.shape or y.shape[0] == 1


def sample_losses(e: Emitter, loss: Loss, y: ir.Value, targets: Sequence[ir.Value]) -> ir.Value:
    """The loss of each sample, `[N]`: the mean of its entries, or their sum if the loss is one."""
    entries: object = replace(loss, reduction="none")(e, y, *targets)
    if not isinstance(entries, ir.Value) or not _has_samples(e, entries, y):
        raise ArgumentError(
            f"Private training needs the loss of each sample, and {type(loss).__name__} computes one number for all.",
            hint="Let the loss function return one number per sample, or more, without reducing them.",
        )
    axes = list(range(1, e.rank(entries, "the loss of each sample")))
    if not axes:
        return entries
    operator = "ReduceMean" if loss.reduction == "mean" else "ReduceSum"
    return e.reduce(operator, entries, axes, keepdims=False)


def clipped_gradients(
    e: Emitter, total: ir.Value, outputs: Sequence[ir.Value], parameters: Mapping[str, ir.Value], max_norm: float
) -> dict[str, ir.Value]:
    """The sum of the clipped gradients of all samples, for each parameter that the loss depends on.

    `total` is the sum of the losses of all samples, and `outputs` are the values that these read.

    Raises:
        DifferentiationError: The network or the loss mixes samples, or has a parameter whose gradients per sample are not
            known; all such nodes are listed.
    """
    read = list(dict.fromkeys(outputs))
    sources = dict.fromkeys([*parameters.values(), *read])
    found = backward_per_sample(e, {total: e.full_like(total, 1)}, sources, data_inputs(e.graph, sources))
    slopes = {y: found.gradients[y] for y in read if y in found.gradients}
    squares = found.squared_norms()
    # The runtime computes the first operand first: in the order of the backward pass, cotangents are freed early.
    own = [squares[v] for v in reversed(list(parameters.values())) if v in squares]
    if not own:
        return {}
    norm = e.op("Sqrt", e.sum(own))
    factor = e.op("Min", e.div(max_norm, e.add(norm, _TINY)), e.scalar(1, norm))
    e.repeat()  # masks and slopes of the first pass would otherwise be kept for the second one, here and by the runtime
    cotangents = {y: e.typed(_scaled(e, slope, factor, found.batch.of(y).axis), y) for y, slope in slopes.items()}
    zero, start = late_zero(e, [factor]), len(e.emitted)
    total_gradients = backward(e, cotangents, dict.fromkeys(parameters.values()))
    if e.target.name not in _ON_GPU:
        read_late(e, e.emitted[start:], zero, keep={*parameters.values(), *cotangents.values()})
    return {name: total_gradients[v] for name, v in parameters.items() if v in total_gradients}


def _scaled(e: Emitter, slope: ir.Value, factor: ir.Value, axis: int) -> ir.Value:
    """The cotangent of a value times the factor of each sample."""
    behind = e.rank(slope, "the factors of its samples") - 1 - axis
    return e.mul(slope, e.unsqueeze(factor, list(range(1, 1 + behind))))


# -- noise -------------------------------------------------------------------------------------------------------------


def add_noise(
    draft: Draft, manifest: Manifest, privacy: Privacy, gradients: Mapping[str, ir.Value], state: Mapping[str, ir.Value]
) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:
    """The private gradients, from the clipped sums, and the next values of the state by name."""
    e, names = draft.e, (manifest.slot(NOISE), manifest.slot(EXPECTED))
    noise, expected = (state[name] for name in names)
    with draft.named("privacy"):
        following = dict(zip(names, (e.add(noise, 1), e.op("Identity", expected)), strict=True))
        masks = Masks(e, noise, 2 * len(gradients))
        private = {}
        for i, (name, total) in enumerate(gradients.items()):
            if privacy.noise:
                drawn = gaussian(e, masks.bits(total, 2 * i), masks.bits(total, 2 * i + 1))
                drawn = e.mul(e.reshape_like(drawn, total), privacy.noise * privacy.max_norm)
                total = e.add(total, e.cast_like(drawn, total))  # noqa: PLW2901
            private[name] = e.div(total, e.cast_like(expected, total))
    return private, following


def gaussian(e: Emitter, first: ir.Value, second: ir.Value) -> ir.Value:
    """Standard normal numbers from two int32 values of random bits each (Box and Muller 1958), float32.

    sqrt(-2 log u) cos(2 pi v); u is at least 2^-33, so that the greatest is 6.8.
    """
    unit, angle = (e.mul(e.cast(bits, ir.DataType.FLOAT), 2.0**-32) for bits in (first, second))
    u = e.op("Max", e.add(unit, 0.5), e.const(np.float32(2.0**-33)))
    return e.mul(e.op("Sqrt", e.mul(e.op("Log", u), -2.0)), e.op("Cos", e.mul(angle, 2 * math.pi)))
