"""Check the shapes and numbers of a call by PyTorch's conventions, and combine them into one convolution.

The messages have the words of ATen's checks (`Convolution.cpp`), name both numbers, and are raised in the same order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.geometry import ConvSpec, Window, same_padding, transposed_sizes

Sizes = tuple[int, ...]


def checked(
    input_size: Any,
    weight_size: Any,
    numbers: Mapping[str, Any],
    *,
    transposed: bool,
    rank: int | None = None,
) -> tuple[ConvSpec, bool]:
    """The convolution of a call, and whether its input has a batch axis.

    The numbers are `stride`, `padding`, `dilation`, `groups` and, if the function has it, `output_padding`, as passed.
    `rank` is the number of spatial axes, if the function is for one.

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
    strides = _per_axis(numbers["stride"], axes, "stride")
    dilations = _per_axis(numbers["dilation"], axes, "dilation")
    extra = _per_axis(numbers.get("output_padding", 0), axes, "output_padding")
    groups = _integer(numbers["groups"], "groups")
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
    full = data if batched else (1, *data)
    begin, end = _padding(numbers["padding"], axes, strides, dilations, weight, transposed=transposed)
    _check_channels(full, weight, groups, transposed=transposed)
    _check_sizes(full, weight)
    win = Window(strides, dilations, begin, end, groups)
    return (_transposed(full, weight, win, extra) if transposed else _plain(full, weight, win, extra)), batched


# -- reading -----------------------------------------------------------------------------------------------------------


_TOO_FAR = 2**31
"""Smallest step or padding that is refused: ONNX Runtime computes its product with a size in 64 bits."""


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


def _check_channels(data: Sizes, weight: Sizes, groups: int, *, transposed: bool) -> None:
    first, channels = weight[0], data[1]
    if first < groups:
        raise ArgumentError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, but got weight of size"
            f" {list(weight)} instead."
        )
    if first % groups:
        raise ArgumentError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, but got weight of"
            f" size [{list(weight)}] instead."
        )
    wanted = first if transposed else weight[1] * groups
    if channels != wanted:
        kind = "transposed=1" if transposed else f"groups={groups}"
        raise ArgumentError(
            f"Given {kind}, weight of size {list(weight)}, expected input{list(data)} to have {wanted} channels, but got"
            f" {channels} channels instead."
        )


def _check_sizes(data: Sizes, weight: Sizes) -> None:
    if 0 in data[2:] and data[0] and data[1]:
        raise ArgumentError(
            f"Only zero batch or zero channel inputs are supported, but got input shape: {list(data)}.",
            hint="Its spatial sizes must be at least 1.",
        )
    if 0 in weight[2:]:
        raise ArgumentError(f"kernel size should be greater than zero, but got weight of size {list(weight)}.")


def _plain(data: Sizes, weight: Sizes, win: Window, extra: Sizes) -> ConvSpec:
    padded = [x + b + e for x, b, e in zip(data[2:], win.begin, win.end, strict=True)]
    spans = [d * (k - 1) + 1 for k, d in zip(weight[2:], win.dilations, strict=True)]
    if any(x < span for x, span in zip(padded, spans, strict=True)):
        raise ArgumentError(
            f"Calculated padded input size per channel: {_by(padded)}. Kernel size: {_by(spans)}. Kernel size can't be"
            " greater than actual input size."
        )
    if any(extra):
        raise ArgumentError(
            f"output_padding is for transposed convolutions, but got output_padding={list(extra)} with transposed=False;"
            " only 0 fits."
        )
    return ConvSpec.layer(data, weight, win)


def _transposed(data: Sizes, weight: Sizes, win: Window, extra: Sizes) -> ConvSpec:
    """Output padding is padding at the end that is left out, or that is negative."""
    if any(more >= max(s, d) for more, s, d in zip(extra, win.strides, win.dilations, strict=True)):
        named = (("output_padding", extra, 0), ("stride", win.strides, 1), ("dilation", win.dilations, 1))
        steps = [f"{name}_{axis}: {size}" for name, own, fill in named for axis, size in _planar(own, fill)]
        raise ArgumentError(
            f"output padding must be smaller than either stride or dilation, but got {' '.join(steps)}."
        )
    win = win.padded(win.begin, tuple(e - more for e, more in zip(win.end, extra, strict=True)))
    sizes = transposed_sizes(data[2:], weight[2:], win)
    if min(sizes) < 1:
        before, after = ([size for _, size in _planar(own, 1)] for own in (data[2:], sizes))
        raise ArgumentError(
            f"Given input size per channel: {_by(before)}. Calculated output size per channel: {_by(after)}. Output size"
            " is too small."
        )
    return ConvSpec.layer(data, weight, win, transposed=True)


def _by(sizes: Iterable[int]) -> str:
    return f"({' x '.join(map(str, sizes))})"


def _planar(values: Sequence[int], fill: int) -> list[tuple[str, int]]:
    """The values by the names of their axes; PyTorch computes one axis as a plane, whose height has the value `fill`."""
    whole = (fill, *values) if len(values) == 1 else tuple(values)
    return list(zip(("depth", "height", "width")[-len(whole) :], whole, strict=True))
