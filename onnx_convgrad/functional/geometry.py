"""Check the arguments of a call by PyTorch's conventions and combine them into one `Geometry`.

The messages have the words of ATen's checks (`Convolution.cpp`), name both numbers, and are raised in the same order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.geometry import Window, same_padding

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Geometry(Window):
    """One convolution, transposed or not, with a batch axis and explicit padding.

    Shapes: input `[N, C, *]`; weight `[O, C / group, *]`, transposed `[C, O / group, *]`; output `[N, O, *]`.
    """

    transposed: bool
    input: Sizes
    weight: Sizes
    output_padding: Sizes

    @property
    def features(self) -> int:
        """Channels of the output, and size of the bias."""
        return self.weight[1] * self.group if self.transposed else self.weight[0]

    @property
    def spans(self) -> Sizes:
        """Rows that the kernel spans on each axis."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.weight[2:], self.dilations, strict=True))

    @property
    def padded_size(self) -> Sizes:
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
            sizes = ((x - span) // s + 1 for x, span, s in zip(self.padded_size, self.spans, self.strides, strict=True))
        return (self.input[0], self.features, *sizes)

    @property
    def empty(self) -> bool:
        """Whether no product of input and weight reaches the output: a size is zero, or the padding trims everything."""
        if 0 in (*self.input, *self.weight, *self.output):
            return True
        axes = zip(self.input[2:], self.strides, self.spans, self.begin, strict=True)
        return self.transposed and any((x - 1) * s + span <= begin for x, s, span, begin in axes)

    @property
    def multiplications(self) -> int:
        """Multiplications of the direct sum."""
        points = self.input if self.transposed else self.output
        return math.prod(self.weight[1:]) * math.prod(points)

    @property
    def index_range(self) -> int:
        """The most elements that the input, with its padding, or the output has."""
        whole = self.input if self.transposed else (*self.input[:2], *self.padded_size)
        return max(math.prod(whole), math.prod(self.output))

    def shape(self, name: str) -> Sizes:
        """The shape of `input`, `weight`, `bias`, `output` or what is added to it, `z`."""
        return (self.features,) if name == "bias" else getattr(self, "output" if name == "z" else name)

    def per_sample(self) -> Geometry:
        """The convolution of one sample in which every sample is a group, so that each has its own weight."""
        batch, channels, *size = self.input
        weight = (batch * self.weight[0], *self.weight[1:])
        return replace(self, input=(1, batch * channels, *size), weight=weight, group=batch * self.group)


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
    """Return the geometry, and whether the input has a batch axis.

    Raises:
        ArgumentError: PyTorch refuses the arguments too; or `padding="same"` of a transposed convolution.
    """
    name = f"conv{'_transpose' * transposed}"
    weight = _sizes(weight_size, "weight_size")
    data = _sizes(input_size, "input_size")
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
    if len(data) not in (axes + 1, axes + 2):
        if rank is not None:
            raise ArgumentError(
                f"Expected {axes + 1}D (unbatched) or {axes + 2}D (batched) input to {name}{axes}d, but got input of size:"
                f" {list(data)}."
            )
        raise ArgumentError(
            f"Expected {axes + 2}-dimensional input for {axes + 2}-dimensional weight {list(weight)},"
            f" but got {len(data)}-dimensional input of size {list(data)} instead.",
            hint=f"{name}{axes}d takes {axes + 1} dimensions (one sample) or {axes + 2} (a batch).",
        )
    batched = len(data) == axes + 2
    begin, end = _padding(padding, axes, strides, dilations, weight, transposed=transposed)
    full = data if batched else (1, *data)
    geometry = Geometry(strides, dilations, begin, end, groups, transposed, full, weight, extra)
    _check_channels(geometry)
    _check_sizes(geometry)
    return geometry, batched


# -- reading -----------------------------------------------------------------------------------------------------------


_TOO_FAR = 2**31
"""Smallest step or padding that is refused: ONNX Runtime computes their products with a size in 64 bits."""


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
    if math.prod(max(size, 1) for size in sizes) >= 2**62:
        raise ArgumentError(f"{name} has more elements than any machine can hold: {list(sizes)}.")
    if min(sizes, default=0) < 0:
        raise ArgumentError(f"{name} must not be negative, but got {list(sizes)}: {min(sizes)} is less than 0.")
    return sizes


def _per_axis(value: Any, rank: int, name: str) -> Sizes:
    """Return one number per spatial axis; a single number, alone or in a sequence, is repeated."""
    try:
        values = tuple(map(operator.index, value if isinstance(value, Iterable) else (value,)))
    except TypeError:
        raise ArgumentError(f"{name} must be an integer or a sequence of integers, not {value!r}.") from None
    if len(values) not in (1, rank):
        raise ArgumentError(
            f"expected {name} to be a single integer value or a list of {rank} values to match the convolution"
            f" dimensions, but got {name}={list(values)}, which has {len(values)}."
        )
    if max(map(abs, values)) >= _TOO_FAR:
        raise ArgumentError(f"{name} must be less than {_TOO_FAR:,}, but got {name}={list(values)}.")
    return values * (rank // len(values))


def _padding(
    padding: Any, rank: int, strides: Sizes, dilations: Sizes, weight: Sizes, *, transposed: bool
) -> tuple[Sizes, Sizes]:
    """Return the padding at the beginning and the end; the end has the larger half of an odd `"same"` padding."""
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
    spans = [d * (k - 1) + 1 for k, d in zip(weight[2:], dilations, strict=True)]
    begin, end = zip(*(same_padding(1, span, 1, upper=True) for span in spans), strict=True)
    return begin, end


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_signs(strides: Sizes, dilations: Sizes, extra: Sizes, groups: int) -> None:
    for values, least, message in (
        (strides, 1, "non-positive stride is not supported, but got stride="),
        (dilations, 1, "dilation should be greater than zero, but got "),
        (extra, 0, "negative output_padding is not supported, but got output_padding="),
    ):
        if min(values) < least:
            raise ArgumentError(f"{message}{list(values)}: {min(values)} is less than {least}.")
    if groups < 1:
        raise ArgumentError(f"non-positive groups is not supported, but got groups={groups}: it is less than 1.")


def _check_channels(g: Geometry) -> None:
    sizes, first, channels = list(g.weight), g.weight[0], g.input[1]
    if first < g.group:
        raise ArgumentError(
            f"Given groups={g.group}, expected weight to be at least {g.group} at dimension 0, but got weight of size"
            f" {sizes} instead."
        )
    if first % g.group:
        raise ArgumentError(
            f"Given groups={g.group}, expected weight to be divisible by {g.group} at dimension 0, but got weight of"
            f" size [{sizes}] instead."
        )
    wanted = first if g.transposed else g.weight[1] * g.group
    if channels != wanted:
        kind = "transposed=1" if g.transposed else f"groups={g.group}"
        raise ArgumentError(
            f"Given {kind}, weight of size {sizes}, expected input{list(g.input)} to have {wanted} channels, but got"
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
        if any(x < span for x, span in zip(g.padded_size, g.spans, strict=True)):
            raise ArgumentError(
                f"Calculated padded input size per channel: {sizes(g.padded_size)}. Kernel size: {sizes(g.spans)}. Kernel"
                " size can't be greater than actual input size."
            )
        if any(g.output_padding):
            raise ArgumentError(
                f"output_padding is for transposed convolutions, but got output_padding={list(g.output_padding)} with"
                " transposed=False; only 0 fits."
            )
        return
    if any(extra >= max(s, d) for extra, s, d in zip(g.output_padding, g.strides, g.dilations, strict=True)):
        named = (("output_padding", g.output_padding, 0), ("stride", g.strides, 1), ("dilation", g.dilations, 1))
        steps = [f"{name}_{axis}: {size}" for name, own, fill in named for axis, size in _planar(own, fill)]
        raise ArgumentError(
            f"output padding must be smaller than either stride or dilation, but got {' '.join(steps)}."
        )
    if min(g.output[2:]) < 1:
        before, after = ([size for _, size in _planar(shape[2:], 1)] for shape in (g.input, g.output))
        raise ArgumentError(
            f"Given input size per channel: {sizes(before)}. Calculated output size per channel: {sizes(after)}. Output"
            " size is too small."
        )


def _planar(values: Sequence[int], fill: int) -> list[tuple[str, int]]:
    """The values by the names of their axes; PyTorch computes one axis as a plane, whose height has the value `fill`."""
    whole = (fill, *values) if len(values) == 1 else tuple(values)
    return list(zip(("depth", "height", "width")[-len(whole) :], whole, strict=True))
