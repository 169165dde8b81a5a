"""The public functions: those of any rank have the arguments of ATen, the others those of `torch.nn`."""

# ruff: noqa: A002, FBT002, N803 - the names and their order are PyTorch's
# A declaration gives its arguments to the table, which gives the results.
# mypy: disable-error-code="return-value"

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from onnx_convgrad.functional.sessions import Array
from onnx_convgrad.functional.table import Mask, Numbers, Padding, by_rank, function
from onnx_convgrad.lowering.candidates import Choosing
from onnx_convgrad.runtime.providers import Providers
from onnx_convgrad.runtime.session_options import SessionOptionsLike

# Tables of names and signatures.
# fmt: off
__all__ = [
    "conv1d", "conv1d_input", "conv1d_per_sample_grad", "conv1d_weight",
    "conv2d", "conv2d_input", "conv2d_per_sample_grad", "conv2d_weight",
    "conv3d", "conv3d_input", "conv3d_per_sample_grad", "conv3d_weight",
    "conv_transpose1d", "conv_transpose1d_input", "conv_transpose1d_per_sample_grad", "conv_transpose1d_weight",
    "conv_transpose2d", "conv_transpose2d_input", "conv_transpose2d_per_sample_grad", "conv_transpose2d_weight",
    "conv_transpose3d", "conv_transpose3d_input", "conv_transpose3d_per_sample_grad", "conv_transpose3d_weight",
    "convolution", "convolution_add_relu", "convolution_add_relu_backward", "convolution_backward",
    "convolution_double_backward", "convolution_jvp", "convolution_relu", "convolution_relu_backward",
]


@function("output")
def convolution(
    input: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Numbers = 1, padding: Padding = 0,
    dilation: Numbers = 1, transposed: bool = False, output_padding: Numbers = 0, groups: int = 1,
    *, providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> Array:
    """The convolution, or the transposed one: `torch.convolution`.

    >>> import numpy as np
    >>> convolution(np.ones((1, 1, 3, 3)), np.ones((1, 1, 2, 2)))
    array([[[[4., 4.],
             [4., 4.]]]])
    """
    return locals()


@function("input", "weight", "bias")
def convolution_backward(
    grad_output: ArrayLike, input: ArrayLike, weight: ArrayLike, bias_sizes: Sequence[int] | None = None,
    stride: Numbers = 1, padding: Padding = 0, dilation: Numbers = 1, transposed: bool = False,
    output_padding: Numbers = 0, groups: int = 1, output_mask: Mask = (True, True, True),
    *, lowering: Choosing = "auto", providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients for input, weight and bias: `torch.ops.aten.convolution_backward`.

    Results that `output_mask` excludes are not computed and are `None`. `bias_sizes`, `[O]`, is only checked; `[0]`, which
    ATen's graphs have for a convolution without bias, is ignored.

    >>> import numpy as np
    >>> x, w = np.ones((1, 1, 3)), np.ones((2, 1, 2))
    >>> dx, dw, db = convolution_backward(np.ones((1, 2, 2)), x, w, output_mask=(True, False, True))
    >>> dx, dw, db
    (array([[[2., 4., 2.]]]), None, array([2., 2.]))
    """
    return locals()


@function("output", "input", "weight")
def convolution_double_backward(
    ggI: ArrayLike | None, ggW: ArrayLike | None, ggb: ArrayLike | None, gO: ArrayLike, weight: ArrayLike,
    input: ArrayLike, stride: Numbers = 1, padding: Padding = 0, dilation: Numbers = 1, transposed: bool = False,
    output_padding: Numbers = 0, groups: int = 1, output_mask: Mask = (True, True, True),
    *, lowering: Choosing = "auto", providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """The backward pass of `convolution_backward`: `torch.ops.aten._convolution_double_backward`.

    The results are the gradients for gO, input and weight, zero where no cotangent reaches them.
    """
    return locals()


@function("output")
def convolution_jvp(
    input: ArrayLike, weight: ArrayLike, input_tangent: ArrayLike | None = None,
    weight_tangent: ArrayLike | None = None, bias_tangent: ArrayLike | None = None, stride: Numbers = 1,
    padding: Padding = 0, dilation: Numbers = 1, transposed: bool = False, output_padding: Numbers = 0,
    groups: int = 1,
    *, lowering: Choosing = "auto", providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> Array:
    """Forward mode: the derivative of the output along tangents of input, weight and bias; `None` is a zero tangent.

    >>> import numpy as np
    >>> x, w = np.ones((1, 1, 3)), np.ones((1, 1, 2))
    >>> convolution_jvp(x, w, input_tangent=x, weight_tangent=w)
    array([[[4., 4.]]])
    """
    return locals()


@function("output")
def convolution_relu(
    input: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Numbers = 1, padding: Padding = 0,
    dilation: Numbers = 1, groups: int = 1,
    *, providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> Array:
    """relu(convolution + bias): `torch.cudnn_convolution_relu`, on the CPU too, where it is one fused node.

    >>> import numpy as np
    >>> convolution_relu(np.array([[[1.0, -2.0, 3.0]]]), np.ones((1, 1, 1)), np.ones(1))
    array([[[2., 0., 4.]]])
    """
    return locals()


@function("output")
def convolution_add_relu(
    input: ArrayLike, weight: ArrayLike, z: ArrayLike, alpha: float | None = None, bias: ArrayLike | None = None,
    stride: Numbers = 1, padding: Padding = 0, dilation: Numbers = 1, groups: int = 1,
    *, providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> Array:
    """relu(convolution + bias + alpha z): `torch.cudnn_convolution_add_relu`.

    >>> import numpy as np
    >>> x = np.array([[[1.0, -2.0, 3.0]]])
    >>> convolution_add_relu(x, np.ones((1, 1, 1)), x, 2.0)
    array([[[3., 0., 9.]]])
    """
    return locals()


@function("input", "weight", "bias")
def convolution_relu_backward(
    grad_output: ArrayLike, output: ArrayLike, input: ArrayLike, weight: ArrayLike,
    bias_sizes: Sequence[int] | None = None, stride: Numbers = 1, padding: Padding = 0, dilation: Numbers = 1,
    groups: int = 1, output_mask: Mask = (True, True, True),
    *, lowering: Choosing = "auto", providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of `convolution_relu` for input, weight and bias.

    `output` is its result, which says where the derivative is zero: the values before the ReLU need not be kept.

    >>> import numpy as np
    >>> x, w = np.array([[[1.0, -2.0, 3.0]]]), np.ones((1, 1, 1))
    >>> y = convolution_relu(x, w)
    >>> convolution_relu_backward(np.ones((1, 1, 3)), y, x, w)
    (array([[[1., 0., 1.]]]), array([[[4.]]]), array([2.]))
    """
    return locals()


@function("input", "weight", "z", "bias")
def convolution_add_relu_backward(
    grad_output: ArrayLike, output: ArrayLike, input: ArrayLike, weight: ArrayLike, alpha: float | None = None,
    bias_sizes: Sequence[int] | None = None, stride: Numbers = 1, padding: Padding = 0, dilation: Numbers = 1,
    groups: int = 1, output_mask: Mask = (True, True, True, True),
    *, lowering: Choosing = "auto", providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    """The gradients of `convolution_add_relu` for input, weight, z and bias, from its result `output`.

    >>> import numpy as np
    >>> x, w = np.array([[[1.0, -2.0, 3.0]]]), np.ones((1, 1, 1))
    >>> y = convolution_add_relu(x, w, x, 2.0)
    >>> dx, dw, dz, db = convolution_add_relu_backward(np.ones((1, 1, 3)), y, x, w, 2.0)
    >>> dz
    array([[[2., 0., 2.]]])
    """
    return locals()


# -- by rank -----------------------------------------------------------------------------------------------------------


def _conv(
    input: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Numbers = 1, padding: Padding = 0,
    dilation: Numbers = 1, groups: int = 1,
    *, providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> Array:
    """The convolution of `input` and `weight` plus `bias`: `torch.nn.functional.{0}`."""
    return locals()


def _conv_transpose(
    input: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Numbers = 1, padding: Numbers = 0,
    output_padding: Numbers = 0, groups: int = 1, dilation: Numbers = 1,
    *, providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> Array:
    """The transposed convolution of `input` and `weight` plus `bias`: `torch.nn.functional.{0}`.

    The order of the arguments is PyTorch's, in which `dilation` is the last.
    """
    return locals()


def _input_gradient(
    input_size: Sequence[int], weight: ArrayLike, grad_output: ArrayLike, stride: Numbers = 1, padding: Padding = 0,
    dilation: Numbers = 1, groups: int = 1, output_padding: Numbers = 0,
    *, lowering: Choosing = "auto", providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> Array:
    """The gradient of {0} for its input, of shape `input_size`."""
    return locals()


def _weight_gradient(
    input: ArrayLike, weight_size: Sequence[int], grad_output: ArrayLike, stride: Numbers = 1, padding: Padding = 0,
    dilation: Numbers = 1, groups: int = 1, output_padding: Numbers = 0,
    *, lowering: Choosing = "auto", providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> Array:
    """The gradient of {0} for its weight, of shape `weight_size`."""
    return locals()


def _per_sample_gradient(
    input: ArrayLike, weight: ArrayLike, grad_output: ArrayLike, stride: Numbers = 1, padding: Padding = 0,
    dilation: Numbers = 1, groups: int = 1, bias: bool = True, output_padding: Numbers = 0,
    *, lowering: Choosing = "auto", providers: Providers | None = None, options: SessionOptionsLike | None = None,
) -> tuple[Array, Array | None]:
    """The gradients of {0} for weight and bias of each sample, `[N, *weight]` and `[N, O]`.

    Without `bias` the second is `None`. Their sum over the samples is the gradient of the batch. Without a batch axis in
    the input the results have none either. Only the shape of the weight matters.

    Args:
        bias: Whether the convolution has a bias, whose gradients are then the second result.
    """
    return locals()


conv1d, conv2d, conv3d = by_rank(_conv, "conv{}d", "convolution", "output")
conv_transpose1d, conv_transpose2d, conv_transpose3d = by_rank(
    _conv_transpose, "conv_transpose{}d", "convolution", "output", transposed=True
)
conv1d_input, conv2d_input, conv3d_input = by_rank(_input_gradient, "conv{}d_input", "convolution_backward", "input")
conv_transpose1d_input, conv_transpose2d_input, conv_transpose3d_input = by_rank(
    _input_gradient, "conv_transpose{}d_input", "convolution_backward", "input", transposed=True
)
conv1d_weight, conv2d_weight, conv3d_weight = by_rank(
    _weight_gradient, "conv{}d_weight", "convolution_backward", "weight"
)
conv_transpose1d_weight, conv_transpose2d_weight, conv_transpose3d_weight = by_rank(
    _weight_gradient, "conv_transpose{}d_weight", "convolution_backward", "weight", transposed=True
)
conv1d_per_sample_grad, conv2d_per_sample_grad, conv3d_per_sample_grad = by_rank(
    _per_sample_gradient, "conv{}d_per_sample_grad", "convolution_backward", "weight", "bias", per_sample=True
)
conv_transpose1d_per_sample_grad, conv_transpose2d_per_sample_grad, conv_transpose3d_per_sample_grad = by_rank(
    _per_sample_gradient, "conv_transpose{}d_per_sample_grad", "convolution_backward", "weight", "bias",
    transposed=True, per_sample=True,
)
