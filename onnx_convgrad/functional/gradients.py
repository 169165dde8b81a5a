"""One gradient at a time, by rank: the functions of `torch.nn.grad`, the same for transposed convolutions, and per sample.

Arrays, paddings and errors are as in `onnx_convgrad.functional.convolution`. Each function is written once for all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from numpy.typing import ArrayLike

from onnx_convgrad.functional.calls import Function
from onnx_convgrad.functional.sessions import Array
from onnx_convgrad.runtime.providers import Providers
from onnx_convgrad.runtime.session_options import Options

__all__ = [
    "conv1d_input",
    "conv1d_per_sample_grad",
    "conv1d_weight",
    "conv2d_input",
    "conv2d_per_sample_grad",
    "conv2d_weight",
    "conv3d_input",
    "conv3d_per_sample_grad",
    "conv3d_weight",
    "conv_transpose1d_input",
    "conv_transpose1d_per_sample_grad",
    "conv_transpose1d_weight",
    "conv_transpose2d_input",
    "conv_transpose2d_per_sample_grad",
    "conv_transpose2d_weight",
    "conv_transpose3d_input",
    "conv_transpose3d_per_sample_grad",
    "conv_transpose3d_weight",
]

Numbers = int | Sequence[int]
Padding = int | Sequence[int] | str
P = ParamSpec("P")
R = TypeVar("R")
Made = tuple[Callable[P, R], Callable[P, R], Callable[P, R]]

_RANKS = (1, 2, 3)
_BY_INPUT = {"weight": "weight", "grad_output": "output"}
_BY_WEIGHT = {"input": "input", "grad_output": "output"}
_INPUT = {rank: Function("convolution_backward", _BY_INPUT, ("input",), rank=rank) for rank in _RANKS}
_WEIGHT = {rank: Function("convolution_backward", _BY_WEIGHT, ("weight",), rank=rank) for rank in _RANKS}
_PER_SAMPLE = {
    rank: Function(
        "convolution_backward",
        {"input": "input", "weight": "weight", "grad_output": "output"},
        ("weight", "bias"),
        per_sample=True,
        rank=rank,
    )
    for rank in _RANKS
}


def _by_rank(name: str, function: Callable[Concatenate[int, P], R]) -> Made[P, R]:
    """The function for one, two and three spatial axes; `{}` in the name and the docstring is the rank."""

    def bound(rank: int) -> Callable[P, R]:
        def gradient(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(rank, *args, **kwargs)

        whole = inspect.signature(function)
        rest = list(whole.parameters.values())[1:]
        gradient.__signature__ = whole.replace(parameters=rest)  # type: ignore[attr-defined]
        gradient.__name__ = gradient.__qualname__ = name.format(rank)
        gradient.__doc__ = (function.__doc__ or "").format(rank)
        gradient.__annotations__ = {k: v for k, v in function.__annotations__.items() if k != "rank"}
        return gradient

    return bound(1), bound(2), bound(3)


def _input_gradient(
    rank: int,
    input_size: Sequence[int],
    weight: ArrayLike,
    grad_output: ArrayLike,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    providers: Providers | None = None,
    options: Options | None = None,
) -> Array:
    """The gradient of conv{0}d for its input, of shape `input_size`: `torch.nn.grad.conv{0}d_input`."""
    window = (stride, padding, dilation, False, 0, groups)
    sizes = (input_size, None, None)
    (found,) = _INPUT[rank]((weight, grad_output), window, sizes=sizes, providers=providers, options=options)
    return found  # type: ignore[no-any-return]


def _weight_gradient(
    rank: int,
    input: ArrayLike,  # noqa: A002 - the names are PyTorch's
    weight_size: Sequence[int],
    grad_output: ArrayLike,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    providers: Providers | None = None,
    options: Options | None = None,
) -> Array:
    """The gradient of conv{0}d for its weight, of shape `weight_size`: `torch.nn.grad.conv{0}d_weight`."""
    window = (stride, padding, dilation, False, 0, groups)
    sizes = (None, weight_size, None)
    (found,) = _WEIGHT[rank]((input, grad_output), window, sizes=sizes, providers=providers, options=options)
    return found  # type: ignore[no-any-return]


def _per_sample_gradient(
    rank: int,
    input: ArrayLike,  # noqa: A002
    weight: ArrayLike,
    grad_output: ArrayLike,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    bias: bool = True,  # noqa: FBT002
    *,
    providers: Providers | None = None,
    options: Options | None = None,
) -> tuple[Array, Array | None]:
    """The gradients of conv{0}d for weight and bias of each sample by itself, `[N, *weight]` and `[N, O]`.

    Without `bias` the second is `None`. They sum over samples to those of the batch. For one sample, without a batch axis,
    they have none either. The weight counts only by its shape.
    """
    window = (stride, padding, dilation, False, 0, groups)
    return _PER_SAMPLE[rank](
        (input, weight, grad_output), window, mask=(True, bool(bias)), providers=providers, options=options
    )


def _transposed_input_gradient(
    rank: int,
    input_size: Sequence[int],
    weight: ArrayLike,
    grad_output: ArrayLike,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    output_padding: Numbers = 0,
    *,
    providers: Providers | None = None,
    options: Options | None = None,
) -> Array:
    """The gradient of conv_transpose{0}d for its input, of shape `input_size`."""
    window = (stride, padding, dilation, True, output_padding, groups)
    sizes = (input_size, None, None)
    (found,) = _INPUT[rank]((weight, grad_output), window, sizes=sizes, providers=providers, options=options)
    return found  # type: ignore[no-any-return]


def _transposed_weight_gradient(
    rank: int,
    input: ArrayLike,  # noqa: A002
    weight_size: Sequence[int],
    grad_output: ArrayLike,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    output_padding: Numbers = 0,
    *,
    providers: Providers | None = None,
    options: Options | None = None,
) -> Array:
    """The gradient of conv_transpose{0}d for its weight, of shape `weight_size`."""
    window = (stride, padding, dilation, True, output_padding, groups)
    sizes = (None, weight_size, None)
    (found,) = _WEIGHT[rank]((input, grad_output), window, sizes=sizes, providers=providers, options=options)
    return found  # type: ignore[no-any-return]


def _transposed_per_sample_gradient(
    rank: int,
    input: ArrayLike,  # noqa: A002
    weight: ArrayLike,
    grad_output: ArrayLike,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    bias: bool = True,  # noqa: FBT002
    output_padding: Numbers = 0,
    *,
    providers: Providers | None = None,
    options: Options | None = None,
) -> tuple[Array, Array | None]:
    """The gradients of conv_transpose{0}d for weight and bias of each sample: see `conv{0}d_per_sample_grad`."""
    window = (stride, padding, dilation, True, output_padding, groups)
    return _PER_SAMPLE[rank](
        (input, weight, grad_output), window, mask=(True, bool(bias)), providers=providers, options=options
    )


conv1d_input, conv2d_input, conv3d_input = _by_rank("conv{}d_input", _input_gradient)
conv1d_weight, conv2d_weight, conv3d_weight = _by_rank("conv{}d_weight", _weight_gradient)
conv1d_per_sample_grad, conv2d_per_sample_grad, conv3d_per_sample_grad = _by_rank(
    "conv{}d_per_sample_grad", _per_sample_gradient
)
conv_transpose1d_input, conv_transpose2d_input, conv_transpose3d_input = _by_rank(
    "conv_transpose{}d_input", _transposed_input_gradient
)
conv_transpose1d_weight, conv_transpose2d_weight, conv_transpose3d_weight = _by_rank(
    "conv_transpose{}d_weight", _transposed_weight_gradient
)
conv_transpose1d_per_sample_grad, conv_transpose2d_per_sample_grad, conv_transpose3d_per_sample_grad = _by_rank(
    "conv_transpose{}d_per_sample_grad", _transposed_per_sample_gradient
)
