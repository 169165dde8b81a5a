"""Convolutions by rank: the functions of `torch.nn.functional` and `torch.nn.grad`, also gradients of each sample.

Arrays, paddings, `lowering` and errors are as in `onnx_convgrad.functional.aten`.
"""

# mypy: disable-error-code="return-value"  # a declaration gives its arguments to the table

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from onnx_convgrad.functional.sessions import Array
from onnx_convgrad.functional.table import Numbers, Padding, by_rank
from onnx_convgrad.lowering.candidates import Choosing
from onnx_convgrad.runtime.providers import Providers
from onnx_convgrad.runtime.session_options import Options

__all__ = [
    "conv1d", "conv1d_input", "conv1d_per_sample_grad", "conv1d_weight",
    "conv2d", "conv2d_input", "conv2d_per_sample_grad", "conv2d_weight",
    "conv3d", "conv3d_input", "conv3d_per_sample_grad", "conv3d_weight",
    "conv_transpose1d", "conv_transpose1d_input", "conv_transpose1d_per_sample_grad", "conv_transpose1d_weight",
    "conv_transpose2d", "conv_transpose2d_input", "conv_transpose2d_per_sample_grad", "conv_transpose2d_weight",
    "conv_transpose3d", "conv_transpose3d_input", "conv_transpose3d_per_sample_grad", "conv_transpose3d_weight",
]  # fmt: skip


def _conv(
    input: ArrayLike,  # noqa: A002 - the names are PyTorch's
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    providers: Providers | None = None,
    options: Options | None = None,
) -> Array:
    """The convolution of `input` and `weight` plus `bias`: `torch.nn.functional.{0}`."""
    return locals()


def _conv_transpose(
    input: ArrayLike,  # noqa: A002
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
    *,
    providers: Providers | None = None,
    options: Options | None = None,
) -> Array:
    """The transposed convolution of `input` and `weight` plus `bias`: `torch.nn.functional.{0}`.

    The order of the arguments is PyTorch's, in which `dilation` is the last.
    """
    return locals()


def _input_gradient(
    input_size: Sequence[int],
    weight: ArrayLike,
    grad_output: ArrayLike,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    output_padding: Numbers = 0,
    *,
    lowering: Choosing = "auto",
    providers: Providers | None = None,
    options: Options | None = None,
) -> Array:
    """The gradient of {0} for its input, of shape `input_size`."""
    return locals()


def _weight_gradient(
    input: ArrayLike,  # noqa: A002
    weight_size: Sequence[int],
    grad_output: ArrayLike,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    output_padding: Numbers = 0,
    *,
    lowering: Choosing = "auto",
    providers: Providers | None = None,
    options: Options | None = None,
) -> Array:
    """The gradient of {0} for its weight, of shape `weight_size`."""
    return locals()


def _per_sample_gradient(  # noqa: D417 - the table describes the other parameters
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
    lowering: Choosing = "auto",
    providers: Providers | None = None,
    options: Options | None = None,
) -> tuple[Array, Array | None]:
    """The gradients of {0} for weight and bias of each sample, `[N, *weight]` and `[N, O]`.

    Without `bias` the second is `None`. Their sum over the samples is the gradient of the batch. Without a batch axis in
    the input the results have none either. Only the shape of the weight matters.

    Args:
        bias: Whether the convolution has a bias, whose gradients are then the second result.
    """
    return locals()


_FORWARD = ("convolution", "output")
conv1d, conv2d, conv3d = by_rank(_conv, "conv{}d", *_FORWARD)
conv_transpose1d, conv_transpose2d, conv_transpose3d = by_rank(
    _conv_transpose, "conv_transpose{}d", *_FORWARD, transposed=True
)
_INPUT = ("convolution_backward", "input")
conv1d_input, conv2d_input, conv3d_input = by_rank(_input_gradient, "conv{}d_input", *_INPUT)
conv_transpose1d_input, conv_transpose2d_input, conv_transpose3d_input = by_rank(
    _input_gradient, "conv_transpose{}d_input", *_INPUT, transposed=True
)
_WEIGHT = ("convolution_backward", "weight")
conv1d_weight, conv2d_weight, conv3d_weight = by_rank(_weight_gradient, "conv{}d_weight", *_WEIGHT)
conv_transpose1d_weight, conv_transpose2d_weight, conv_transpose3d_weight = by_rank(
    _weight_gradient, "conv_transpose{}d_weight", *_WEIGHT, transposed=True
)
_BOTH = ("convolution_backward", "weight", "bias")
conv1d_per_sample_grad, conv2d_per_sample_grad, conv3d_per_sample_grad = by_rank(
    _per_sample_gradient, "conv{}d_per_sample_grad", *_BOTH, per_sample=True
)
conv_transpose1d_per_sample_grad, conv_transpose2d_per_sample_grad, conv_transpose3d_per_sample_grad = by_rank(
    _per_sample_gradient, "conv_transpose{}d_per_sample_grad", *_BOTH, transposed=True, per_sample=True
)
