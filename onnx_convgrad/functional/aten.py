"""Convolutions of any rank with the arguments of ATen: forward, backward, double backward, forward mode.

Conventions of all functions:

- Arrays are numpy arrays of one dtype: float16, bfloat16 (of the package ml_dtypes), float32, float64, complex64 or
  complex128. Results have the same. Halves are computed in float32 and rounded once, except float16 on CUDA.
- `input` is `[N, C, *]` or, for one sample, `[C, *]`, with one to three spatial axes; `weight` is `[O, C / groups, *]`, or
  `[C, O / groups, *]` if `transposed`; the output, and `grad_output`, is `[N, O, *]` or `[O, *]`.
- `stride`, `padding`, `dilation`, `output_padding`: a number, or one per axis. `padding` may be `"valid"`, or `"same"`
  for an untransposed convolution without a stride.
- Results are in the memory format of the operands: if the channels of the input or the weight (without an input, of
  `grad_output` or the weight) are innermost in memory, those of all results are. The shapes stay as they are.
- Gradients of complex arrays are PyTorch's: dL/d(re) + i dL/d(im).
- `lowering`: how gradients are computed, as in `onnx_convgrad.augment`: `"auto"`, `"exact"`, `"fast"`, or a mapping from
  operators to lowerings; also the name of one lowering, for the operators that have it. `explain` lists them.
- A convolution with 2^31 or more elements in an operand is computed in parts of the batch.
- `providers`: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default. `options`: options of the
  session, for example `{"tf32": False}`.
- `ArgumentError` is raised where PyTorch refuses the arguments, `ExecutionError` where ONNX Runtime or a provider is missing
  or fails; the `snippet` of a failure is a program that reproduces it with numpy and ONNX Runtime alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.functional.by_rank import Numbers, Padding
from onnx_convgrad.functional.calls import Function
from onnx_convgrad.functional.sessions import Array
from onnx_convgrad.lowering.candidates import Choosing
from onnx_convgrad.runtime.providers import Providers
from onnx_convgrad.runtime.session_options import Options

__all__ = ["convolution", "convolution_backward", "convolution_double_backward", "convolution_jvp"]

Mask = Sequence[bool]

_CONVOLUTION = Function("convolution", {"input": "input", "weight": "weight", "bias": "bias"}, ("output",))
_OPERANDS = {"input": "input", "weight": "weight", "grad_output": "output"}
_BACKWARD = Function("convolution_backward", _OPERANDS, ("input", "weight", "bias"))
_DIRECTIONS = {"input_direction": "input", "weight_direction": "weight", "bias_direction": "bias"}
_DOUBLE = Function("convolution_double_backward", {**_OPERANDS, **_DIRECTIONS}, ("output", "input", "weight"))
_JVP = Function("convolution_jvp", {"input": "input", "weight": "weight", **_DIRECTIONS}, ("output",))


@typed_errors
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

    Args:
        input: `[N, C, *]`, or `[C, *]` for one sample, with one to three spatial axes.
        weight: `[O, C / groups, *]`, or `[C, O / groups, *]` if transposed.
        bias: `[O]`.
        stride: Step of the window: a number, or one per spatial axis.
        padding: Zeros at both ends of each axis: a number, one per axis, `"valid"` (none), or `"same"` for an
            untransposed convolution without a stride.
        dilation: Distance of the taps of the kernel: a number, or one per axis.
        transposed: Whether the convolution is a transposed one.
        output_padding: Rows added at the end of the output of a transposed convolution: a number, or one per axis.
        groups: Number of groups that the channels are divided into.
        lowering: `"auto"`, `"exact"`, `"fast"`, the name of a lowering, or a mapping from operators to lowerings; see
            `augment`.
        providers: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.
        options: Options of the session, for example `{"tf32": False}`.
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    (output,) = _CONVOLUTION((input, weight, bias), window, providers=providers, options=options)
    return output  # type: ignore[no-any-return]


@typed_errors
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

    Args:
        grad_output: Cotangent of the output, `[N, O, *]` or `[O, *]`.
        input: `[N, C, *]`, or `[C, *]` for one sample, with one to three spatial axes.
        weight: `[O, C / groups, *]`, or `[C, O / groups, *]` if transposed.
        bias_sizes: `[O]`, which is only checked.
        stride: Step of the window: a number, or one per spatial axis.
        padding: Zeros at both ends of each axis: a number, one per axis, `"valid"` (none), or `"same"` for an
            untransposed convolution without a stride.
        dilation: Distance of the taps of the kernel: a number, or one per axis.
        transposed: Whether the convolution is a transposed one.
        output_padding: Rows added at the end of the output of a transposed convolution: a number, or one per axis.
        groups: Number of groups that the channels are divided into.
        output_mask: Which results to compute; the others are `None`.
        lowering: `"auto"`, `"exact"`, `"fast"`, the name of a lowering, or a mapping from operators to lowerings; see
            `augment`.
        providers: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.
        options: Options of the session, for example `{"tf32": False}`.
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    arrays, sizes = (input, weight, grad_output), (None, None, bias_sizes)
    return _BACKWARD(
        arrays, window, sizes=sizes, mask=output_mask, lowering=lowering, providers=providers, options=options
    )


@typed_errors
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

    `ggI`, `ggW` and `ggb` are the cotangents of the gradients for input, weight and bias, `None` for zero; `gO` is the
    `grad_output` of the backward pass. The results are the gradients for gO, input and weight, zero where no cotangent
    reaches them.

    Args:
        ggI: Cotangent of the input's gradient; `None` for zero.
        ggW: Cotangent of the weight's gradient.
        ggb: Cotangent of the bias's gradient.
        gO: The `grad_output` of the backward pass.
        weight: `[O, C / groups, *]`, or `[C, O / groups, *]` if transposed.
        input: `[N, C, *]`, or `[C, *]` for one sample, with one to three spatial axes.
        stride: Step of the window: a number, or one per spatial axis.
        padding: Zeros at both ends of each axis: a number, one per axis, `"valid"` (none), or `"same"` for an
            untransposed convolution without a stride.
        dilation: Distance of the taps of the kernel: a number, or one per axis.
        transposed: Whether the convolution is a transposed one.
        output_padding: Rows added at the end of the output of a transposed convolution: a number, or one per axis.
        groups: Number of groups that the channels are divided into.
        output_mask: Which results to compute; the others are `None`.
        lowering: `"auto"`, `"exact"`, `"fast"`, the name of a lowering, or a mapping from operators to lowerings; see
            `augment`.
        providers: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.
        options: Options of the session, for example `{"tf32": False}`.
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    arrays = (input, weight, gO, ggI, ggW, ggb)
    return _DOUBLE(arrays, window, mask=output_mask, lowering=lowering, providers=providers, options=options)


@typed_errors
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

    Args:
        input: `[N, C, *]`, or `[C, *]` for one sample, with one to three spatial axes.
        weight: `[O, C / groups, *]`, or `[C, O / groups, *]` if transposed.
        input_tangent: Direction of the input, of its shape; `None` for zero.
        weight_tangent: Direction of the weight.
        bias_tangent: Direction of the bias, `[O]`.
        stride: Step of the window: a number, or one per spatial axis.
        padding: Zeros at both ends of each axis: a number, one per axis, `"valid"` (none), or `"same"` for an
            untransposed convolution without a stride.
        dilation: Distance of the taps of the kernel: a number, or one per axis.
        transposed: Whether the convolution is a transposed one.
        output_padding: Rows added at the end of the output of a transposed convolution: a number, or one per axis.
        groups: Number of groups that the channels are divided into.
        lowering: `"auto"`, `"exact"`, `"fast"`, the name of a lowering, or a mapping from operators to lowerings; see
            `augment`.
        providers: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.
        options: Options of the session, for example `{"tf32": False}`.
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    arrays = (input, weight, input_tangent, weight_tangent, bias_tangent)
    (output,) = _JVP(arrays, window, lowering=lowering, providers=providers, options=options)
    return output  # type: ignore[no-any-return]
