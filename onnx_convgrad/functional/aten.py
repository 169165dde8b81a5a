"""Convolutions of any rank with the arguments of ATen: forward, backward, double backward, forward mode; with a ReLU.

Conventions of all functions:

- Arrays are numpy arrays of one dtype: float16, bfloat16 (of the package ml_dtypes), float32, float64, complex64 or
  complex128. Results have the same. Halves are computed in float32 and rounded once, except float16 on CUDA.
- `input` is `[N, C, *]` or, for one sample, `[C, *]`, with one to three spatial axes; `weight` is `[O, C / groups, *]`, or
  `[C, O / groups, *]` if `transposed`; the output, and `grad_output`, is `[N, O, *]` or `[O, *]`.
- `stride`, `padding`, `dilation`, `output_padding`: a number, or one per axis. `padding` may be `"valid"`, or `"same"`
  for an untransposed convolution without a stride.
- Results are in the memory format of the operands: if the channels of the input or the weight (without an input, of
  `grad_output` or the weight) are innermost in memory, those of all results are. The shapes stay as they are.
- Gradients of complex arrays are PyTorch's: dL/d(re) + i dL/d(im). Functions with a ReLU refuse complex arrays.
- `lowering`: how gradients are computed, as in `onnx_convgrad.augment`: `"auto"`, `"exact"`, `"fast"`, or a mapping from
  operators to lowerings; also the name of one lowering, for the operators that have it. `explain` lists them.
- A convolution with 2^31 or more elements in an operand is computed in parts of the batch.
- `providers`: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default. `options`: options of the
  session, for example `{"tf32": False}`.
- `ArgumentError` is raised where PyTorch refuses the arguments, `ExecutionError` where ONNX Runtime or a provider is missing
  or fails; the `snippet` of a failure is a program that reproduces it with numpy and ONNX Runtime alone.
"""

# mypy: disable-error-code="return-value"  # a declaration gives its arguments to the table

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from onnx_convgrad.functional.sessions import Array
from onnx_convgrad.functional.table import Mask, Numbers, Padding, function
from onnx_convgrad.lowering.candidates import Choosing
from onnx_convgrad.runtime.providers import Providers
from onnx_convgrad.runtime.session_options import Options

__all__ = [
    "convolution",
    "convolution_add_relu",
    "convolution_add_relu_backward",
    "convolution_backward",
    "convolution_double_backward",
    "convolution_jvp",
    "convolution_relu",
    "convolution_relu_backward",
]


@function("output")
def convolution(
    input: ArrayLike,  # noqa: A002 - the names are PyTorch's
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    transposed: bool = False,  # noqa: FBT002
    output_padding: Numbers = 0,
    groups: int = 1,
    *,
    providers: Providers | None = None,
    options: Options | None = None,
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
    grad_output: ArrayLike,
    input: ArrayLike,  # noqa: A002
    weight: ArrayLike,
    bias_sizes: Sequence[int] | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    transposed: bool = False,  # noqa: FBT002
    output_padding: Numbers = 0,
    groups: int = 1,
    output_mask: Mask = (True, True, True),
    *,
    lowering: Choosing = "auto",
    providers: Providers | None = None,
    options: Options | None = None,
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
    ggI: ArrayLike | None,  # noqa: N803 - the names are ATen's
    ggW: ArrayLike | None,  # noqa: N803
    ggb: ArrayLike | None,
    gO: ArrayLike,  # noqa: N803
    weight: ArrayLike,
    input: ArrayLike,  # noqa: A002
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    transposed: bool = False,  # noqa: FBT002
    output_padding: Numbers = 0,
    groups: int = 1,
    output_mask: Mask = (True, True, True),
    *,
    lowering: Choosing = "auto",
    providers: Providers | None = None,
    options: Options | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """The backward pass of `convolution_backward`: `torch.ops.aten._convolution_double_backward`.

    The results are the gradients for gO, input and weight, zero where no cotangent reaches them.
    """
    return locals()


@function("output")
def convolution_jvp(
    input: ArrayLike,  # noqa: A002
    weight: ArrayLike,
    input_tangent: ArrayLike | None = None,
    weight_tangent: ArrayLike | None = None,
    bias_tangent: ArrayLike | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    transposed: bool = False,  # noqa: FBT002
    output_padding: Numbers = 0,
    groups: int = 1,
    *,
    lowering: Choosing = "auto",
    providers: Providers | None = None,
    options: Options | None = None,
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
    """relu(convolution + bias): `torch.cudnn_convolution_relu`, on the CPU too, where it is one fused node.

    >>> import numpy as np
    >>> convolution_relu(np.array([[[1.0, -2.0, 3.0]]]), np.ones((1, 1, 1)), np.ones(1))
    array([[[2., 0., 4.]]])
    """
    return locals()


@function("output")
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
    """relu(convolution + bias + alpha z): `torch.cudnn_convolution_add_relu`.

    >>> import numpy as np
    >>> x = np.array([[[1.0, -2.0, 3.0]]])
    >>> convolution_add_relu(x, np.ones((1, 1, 1)), x, 2.0)
    array([[[3., 0., 9.]]])
    """
    return locals()


@function("input", "weight", "bias")
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
    """The gradients of `convolution_add_relu` for input, weight, z and bias, from its result `output`.

    >>> import numpy as np
    >>> x, w = np.array([[[1.0, -2.0, 3.0]]]), np.ones((1, 1, 1))
    >>> y = convolution_add_relu(x, w, x, 2.0)
    >>> dx, dw, dz, db = convolution_add_relu_backward(np.ones((1, 1, 3)), y, x, w, 2.0)
    >>> dz
    array([[[2., 0., 2.]]])
    """
    return locals()
