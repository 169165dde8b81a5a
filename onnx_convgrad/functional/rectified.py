"""A convolution with what follows it in networks, as one step: ReLU, and an addition before it; and their gradients.

The functions are named for ATen's `cudnn_convolution_relu` and `cudnn_convolution_add_relu`, and run on the CPU too, where
ONNX Runtime fuses the operators into one. Their gradients read the result, not the values before the ReLU, which need not
be kept. Arrays, paddings, `lowering` and errors are as in `onnx_convgrad.functional.aten`; complex arrays are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.functional.aten import Mask
from onnx_convgrad.functional.by_rank import Numbers, Padding
from onnx_convgrad.functional.calls import Function
from onnx_convgrad.functional.sessions import Array
from onnx_convgrad.lowering.candidates import Choosing
from onnx_convgrad.runtime.providers import Providers
from onnx_convgrad.runtime.session_options import Options

__all__ = [
    "convolution_add_relu",
    "convolution_add_relu_backward",
    "convolution_relu",
    "convolution_relu_backward",
]

_OPERANDS = {"input": "input", "weight": "weight"}
_SEEDED = {"grad_output": "output", "output": "output", **_OPERANDS}
_RELU = Function("convolution_relu", {**_OPERANDS, "bias": "bias"}, ("output",))
_ADD_RELU = Function("convolution_add_relu", {**_OPERANDS, "z": "output", "bias": "bias"}, ("output",))
_RELU_BACKWARD = Function("convolution_relu_backward", _SEEDED, ("input", "weight", "bias"))
_ADD_RELU_BACKWARD = Function("convolution_add_relu_backward", _SEEDED, ("input", "weight", "z", "bias"))


@typed_errors
def convolution_relu(
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
    """relu(convolution + bias): `torch.cudnn_convolution_relu`. Arguments as for `convolution`.

    >>> import numpy as np
    >>> convolution_relu(np.array([[[1.0, -2.0, 3.0]]]), np.ones((1, 1, 1)), np.ones(1))
    array([[[2., 0., 4.]]])
    """
    window = (stride, padding, dilation, False, 0, groups)
    (output,) = _RELU((input, weight, bias), window, providers=providers, options=options)
    return output  # type: ignore[no-any-return]


@typed_errors
def convolution_add_relu(
    input: ArrayLike,  # noqa: A002
    weight: ArrayLike,
    z: ArrayLike,
    alpha: float | None = None,
    bias: ArrayLike | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    providers: Providers | None = None,
    options: Options | None = None,
) -> Array:
    """relu(convolution + bias + alpha z): `torch.cudnn_convolution_add_relu`. Other arguments as for `convolution`.

    >>> import numpy as np
    >>> x = np.array([[[1.0, -2.0, 3.0]]])
    >>> convolution_add_relu(x, np.ones((1, 1, 1)), x, 2.0)
    array([[[3., 0., 9.]]])

    Args:
        z: Of the shape of the output.
        alpha: A number; `None` for 1.
        input: The data, `[N, C, *]`, or `[C, *]` for one sample.
        weight: The kernels.
        bias: `[O]`.
        stride: Step of the window: a number, or one per spatial axis.
        padding: Zeros at both ends of each axis: a number, one per axis, `"valid"` or `"same"`.
        dilation: Distance of the taps of the kernel: a number, or one per axis.
        groups: Number of groups that the channels are divided into.
        providers: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.
        options: Options of the session, for example `{"tf32": False}`.
    """
    window = (stride, padding, dilation, False, 0, groups)
    arrays = (input, weight, z, bias)
    (output,) = _ADD_RELU(arrays, window, alpha=alpha, providers=providers, options=options)
    return output  # type: ignore[no-any-return]


@typed_errors
def convolution_relu_backward(
    grad_output: ArrayLike,
    output: ArrayLike,
    input: ArrayLike,  # noqa: A002
    weight: ArrayLike,
    bias_sizes: Sequence[int] | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    output_mask: Mask = (True, True, True),
    *,
    lowering: Choosing = "auto",
    providers: Providers | None = None,
    options: Options | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of `convolution_relu` for input, weight and bias.

    `output` is its result, which says where the derivative is zero, and `grad_output` the gradient for it. The other
    arguments are as for `convolution_backward`.

    >>> import numpy as np
    >>> x, w = np.array([[[1.0, -2.0, 3.0]]]), np.ones((1, 1, 1))
    >>> y = convolution_relu(x, w)
    >>> convolution_relu_backward(np.ones((1, 1, 3)), y, x, w)
    (array([[[1., 0., 1.]]]), array([[[4.]]]), array([2.]))

    Args:
        output: The result of `convolution_relu`.
        grad_output: Cotangent of the output, `[N, O, *]` or `[O, *]`.
        input: The data, `[N, C, *]`, or `[C, *]` for one sample.
        weight: The kernels, `[O, C / groups, *]`.
        bias_sizes: `[O]`, which is only checked.
        stride: Step of the window: a number, or one per spatial axis.
        padding: Zeros at both ends of each axis: a number, one per axis, `"valid"` or `"same"`.
        dilation: Distance of the taps of the kernel: a number, or one per axis.
        groups: Number of groups that the channels are divided into.
        output_mask: Which results to compute; the others are `None`.
        lowering: `"auto"`, `"exact"`, `"fast"`, the name of a lowering, or a mapping from operators to lowerings; see
            `augment`.
        providers: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.
        options: Options of the session, for example `{"tf32": False}`.
    """
    window = (stride, padding, dilation, False, 0, groups)
    arrays, sizes = (grad_output, output, input, weight), (None, None, bias_sizes)
    return _RELU_BACKWARD(
        arrays, window, sizes=sizes, mask=output_mask, lowering=lowering, providers=providers, options=options
    )


@typed_errors
def convolution_add_relu_backward(
    grad_output: ArrayLike,
    output: ArrayLike,
    input: ArrayLike,  # noqa: A002
    weight: ArrayLike,
    alpha: float | None = None,
    bias_sizes: Sequence[int] | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    output_mask: Mask = (True, True, True, True),
    *,
    lowering: Choosing = "auto",
    providers: Providers | None = None,
    options: Options | None = None,
) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    """The gradients of `convolution_add_relu` for input, weight, z and bias; arguments as for `convolution_relu_backward`.

    >>> import numpy as np
    >>> x, w = np.array([[[1.0, -2.0, 3.0]]]), np.ones((1, 1, 1))
    >>> y = convolution_add_relu(x, w, x, 2.0)
    >>> dx, dw, dz, db = convolution_add_relu_backward(np.ones((1, 1, 3)), y, x, w, 2.0)
    >>> dz
    array([[[2., 0., 2.]]])

    Args:
        alpha: The factor of z; `None` for 1.
        output: The result of `convolution_add_relu`.
        grad_output: Cotangent of the output, `[N, O, *]` or `[O, *]`.
        input: The data, `[N, C, *]`, or `[C, *]` for one sample.
        weight: The kernels, `[O, C / groups, *]`.
        bias_sizes: `[O]`, which is only checked.
        stride: Step of the window: a number, or one per spatial axis.
        padding: Zeros at both ends of each axis: a number, one per axis, `"valid"` or `"same"`.
        dilation: Distance of the taps of the kernel: a number, or one per axis.
        groups: Number of groups that the channels are divided into.
        output_mask: Which results to compute; the others are `None`.
        lowering: `"auto"`, `"exact"`, `"fast"`, the name of a lowering, or a mapping from operators to lowerings; see
            `augment`.
        providers: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.
        options: Options of the session, for example `{"tf32": False}`.
    """
    window = (stride, padding, dilation, False, 0, groups)
    return _ADD_RELU_BACKWARD(
        (grad_output, output, input, weight),
        window,
        sizes=(None, None, bias_sizes),
        mask=output_mask,
        lowering=lowering,
        alpha=alpha,
        providers=providers,
        options=options,
    )
