"""What the arguments of one call mean: PyTorch's conventions checked and settled into one frozen value.

Each message has the words of ATen's own check (`Convolution.cpp`), names both numbers, and is raised in the same order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnx_convgrad.errors import ArgumentError

__all__ = ["Geometry", "settle"]

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """One convolution, transposed or not, with a batch axis and explicit padding.

    Shapes: input `[N, C, *]`; weight `[O, C / groups, *]`, transposed `[C, O / groups, *]`; output `[N, O, *]`.
    """

    transposed: bool
    input: Sizes
    weight: Sizes
    strides: Sizes
    begin: Sizes
    end: Sizes
    dilations: Sizes
    output_padding: Sizes
    groups: int

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.strides)

    @property
    def features(self) -> int:
        """Channels of the output, and entries of the bias."""
        return self.weight[1] * self.groups if self.transposed else self.weight[0]

    @property
    def spans(self) -> Sizes:
        """Rows that the kernel covers on each axis."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.weight[2:], self.dilations, strict=True))

    @property
    def padded(self) -> Sizes:
        """Spatial sizes of the input with its padding."""
        return tuple(x + b + e for x, b, e in zip(self.input[2:], self.begin, self.end, strict=True))

    @property
    def output(self) -> Sizes:
        """Shape of the result."""
        sizes: Iterable[int]
        if self.transposed:
            axes = zip(self.input[2:], self.strides, self.begin, self.end, self.spans, self.output_padding, strict=True)
            sizes = ((x - 1) * s - b - e + span + extra for x, s, b, e, span, extra in axes)
        else:
            sizes = ((x - span) // s + 1 for x, span, s in zip(self.padded, self.spans, self.strides, strict=True))
        return (self.input[0], self.features, *sizes)

    @property
    def empty(self) -> bool:
        """Whether no product of an input and a weight reaches an output: a size is zero, or padding cuts all away."""
        if 0 in (*self.input, *self.weight, *self.output):
            return True
        axes = zip(self.input[2:], self.strides, self.spans, self.begin, strict=True)
        return self.transposed and any((x - 1) * s + span <= begin for x, s, span, begin in axes)

    @property
    def multiplications(self) -> int:
        """How many the direct sum takes."""
        points = self.input if self.transposed else self.output
        return math.prod(self.weight[1:]) * math.prod(points)

    def shape(self, name: str) -> Sizes:
        """The shape of `input`, `weight`, `bias` or `output`."""
        return (self.features,) if name == "bias" else getattr(self, name)

    def per_sample(self) -> Geometry:
        """The convolution of one sample that holds all samples as groups of their own, so that each has its weight."""
        batch, channels, *size = self.input
        weight = (batch * self.weight[0], *self.weight[1:])
        return replace(self, input=(1, batch * channels, *size), weight=weight, groups=batch * self.groups)


def settle(
    input_size: Sequence[int],
    weight_size: Sequence[int],
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
    rank: int | None = None,
) -> tuple[Geometry, bool]:
    """The geometry, and whether the input has a batch axis.

    Raises:
        ArgumentError: Something that PyTorch refuses too; or `padding="same"` of a transposed convolution.
    """
    name = f"conv{'_transpose' * transposed}"
    weight = _sizes(weight_size, "weight_size")
    given = _sizes(input_size, "input_size")
    if len(weight) < 3:
        raise ArgumentError(f"weight should have at least three dimensions, but got weight of size {list(weight)}.")
    axes = len(weight) - 2
    if axes > 3 or (rank is not None and axes != rank):
        wanted = f"{rank + 2}-dimensional weight" if rank else "weight of 3 to 5 dimensions"
        raise ArgumentError(f"Expected {wanted}, but got {axes + 2}-dimensional weight of size {list(weight)}.")
    strides = _per_axis(stride, axes, "stride")
    dilations = _per_axis(dilation, axes, "dilation")
    extra = _per_axis(output_padding, axes, "output_padding")
    groups = _integer(groups, "groups")
    _check_signs(strides, dilations, extra, groups)
    if len(given) not in (axes + 1, axes + 2):
        raise ArgumentError(
            f"Expected {axes + 2}-dimensional input for {axes + 2}-dimensional weight {list(weight)},"
            f" but got {len(given)}-dimensional input of size {list(given)} instead.",
            hint=f"{name}{axes}d takes {axes + 1} dimensions (one sample) or {axes + 2} (a batch).",
        )
    batched = len(given) == axes + 2
    begin, end = _padding(padding, axes, strides, dilations, weight, transposed=transposed)
    full = given if batched else (1, *given)
    found = Geometry(transposed, full, weight, strides, begin, end, dilations, extra, groups)
    _check_channels(found)
    _check_sizes(found)
    return found, batched


# -- reading -----------------------------------------------------------------------------------------------------------


def _integer(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} must be an integer, not {value!r}.") from None


def _sizes(value: Any, name: str) -> Sizes:
    try:
        sizes = tuple(map(operator.index, value))
    except TypeError:
        raise ArgumentError(f"{name} must be a sequence of integers, not {value!r}.") from None
    if min(sizes, default=0) < 0:
        raise ArgumentError(f"{name} must not be negative, but got {list(sizes)}: {min(sizes)} is less than 0.")
    return sizes


def _per_axis(value: Any, rank: int, name: str) -> Sizes:
    """One number per spatial axis: a single one, alone or in a sequence, stands for all."""
    try:
        values = tuple(map(operator.index, value if isinstance(value, Iterable) else (value,)))
    except TypeError:
        raise ArgumentError(f"{name} must be an integer or a sequence of integers, not {value!r}.") from None
    if len(values) not in (1, rank):
        raise ArgumentError(
            f"expected {name} to be a single integer value or a list of {rank} values to match the convolution"
            f" dimensions, but got {name}={list(values)}, which has {len(values)}."
        )
    return values * (rank // len(values))


def _padding(
    padding: Any, rank: int, strides: Sizes, dilations: Sizes, weight: Sizes, *, transposed: bool
) -> tuple[Sizes, Sizes]:
    """Rows added at the beginning and the end; of an odd `"same"` padding the end has the larger half."""
    if not isinstance(padding, str):
        both = _per_axis(padding, rank, "padding")
        if min(both) < 0:
            raise ArgumentError(
                f"negative padding is not supported, but got padding={list(both)}: {min(both)} is less than 0."
            )
        return both, both
    if padding == "valid":
        return (0,) * rank, (0,) * rank
    if padding != "same":
        raise ArgumentError(f"Invalid padding string: {padding!r}, should be one of 'valid', 'same'.")
    if transposed:
        raise ArgumentError("padding='same' is not supported for transposed convolutions.", hint="Give numbers.")
    if max(strides) > 1:
        raise ArgumentError(
            f"padding='same' is not supported for strided convolutions: stride={list(strides)}, but {max(strides)} is"
            " more than 1."
        )
    totals = [d * (k - 1) for k, d in zip(weight[2:], dilations, strict=True)]
    return tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_signs(strides: Sizes, dilations: Sizes, extra: Sizes, groups: int) -> None:
    for values, least, said in (
        (strides, 1, "non-positive stride is not supported, but got stride="),
        (dilations, 1, "dilation should be greater than zero, but got dilation="),
        (extra, 0, "negative output_padding is not supported, but got output_padding="),
    ):
        if min(values) < least:
            raise ArgumentError(f"{said}{list(values)}: {min(values)} is less than {least}.")
    if groups < 1:
        raise ArgumentError(f"non-positive groups is not supported, but got groups={groups}: it is less than 1.")


def _check_channels(g: Geometry) -> None:
    sizes, first, channels = list(g.weight), g.weight[0], g.input[1]
    if first < g.groups:
        raise ArgumentError(
            f"Given groups={g.groups}, expected weight to be at least {g.groups} at dimension 0, but got weight of size"
            f" {sizes} instead."
        )
    if first % g.groups:
        raise ArgumentError(
            f"Given groups={g.groups}, expected weight to be divisible by {g.groups} at dimension 0, but got weight of"
            f" size {sizes} instead."
        )
    wanted = first if g.transposed else g.weight[1] * g.groups
    if channels != wanted:
        given = "transposed=1" if g.transposed else f"groups={g.groups}"
        raise ArgumentError(
            f"Given {given}, weight of size {sizes}, expected input {list(g.input)} to have {wanted} channels, but got"
            f" {channels} channels instead."
        )


def _check_sizes(g: Geometry) -> None:
    def sizes(values: Iterable[int]) -> str:
        return f"({' x '.join(map(str, values))})"

    if 0 in g.input[2:] and g.input[0] and g.input[1]:
        raise ArgumentError(
            f"Only zero batch or zero channel inputs are supported, but got input shape: {list(g.input)}.",
            hint="Its spatial sizes must be at least 1.",
        )
    if 0 in g.weight[2:]:
        raise ArgumentError(f"kernel size should be greater than zero, but got weight of size {list(g.weight)}.")
    if not g.transposed:
        if any(x < span for x, span in zip(g.padded, g.spans, strict=True)):
            raise ArgumentError(
                f"Calculated padded input size per channel: {sizes(g.padded)}. Kernel size: {sizes(g.spans)}. Kernel size"
                " can't be greater than actual input size."
            )
        if any(g.output_padding):
            raise ArgumentError(
                f"output_padding is for transposed convolutions, but got output_padding={list(g.output_padding)} with"
                " transposed=False; only 0 fits."
            )
        return
    for extra, s, d in zip(g.output_padding, g.strides, g.dilations, strict=True):
        if extra >= max(s, d):
            raise ArgumentError(
                f"output padding must be smaller than either stride or dilation, but got output_padding={extra} with"
                f" stride={s} and dilation={d}."
            )
    if min(g.output[2:]) < 1:
        raise ArgumentError(
            f"Given input size per channel: {sizes(g.input[2:])}. Calculated output size per channel:"
            f" {sizes(g.output[2:])}. Output size is too small."
        )
