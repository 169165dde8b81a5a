"""Single gradients by rank: the functions of `torch.nn.grad`, also for transposed convolutions and for each sample.

Arrays, paddings, `lowering` and errors are as in `onnx_convgrad.functional.aten`. Each function is written once for
all ranks, plain and transposed.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from onnx_convgrad.base.numbers import flag
from onnx_convgrad.functional.by_rank import RANKS, Numbers, Padding, by_rank
from onnx_convgrad.functional.calls import Function
from onnx_convgrad.functional.sessions import Array
from onnx_convgrad.lowering.candidates import Choosing
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

_BY_INPUT = {"weight": "weight", "grad_output": "output"}
_BY_WEIGHT = {"input": "input", "grad_output": "output"}
_INPUT = {rank: Function("convolution_backward", _BY_INPUT, ("input",), rank=rank) for rank in RANKS}
_WEIGHT = {rank: Function("convolution_backward", _BY_WEIGHT, ("weight",), rank=rank) for rank in RANKS}
_BY_BOTH = {"input": "input", **_BY_INPUT}
_PER_SAMPLE = {
    rank: Function("convolution_backward", _BY_BOTH, ("weight", "bias"), per_sample=True, rank=rank) for rank in RANKS
}


def _input_gradient(
    rank: int,
    transposed: bool,
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
    """The gradient of {0} for its input, of shape `input_size`.

    Args:
        input_size: Shape of the input, with or without a batch axis.
        weight: `[O, C / groups, *]`, or `[C, O / groups, *]` if transposed.
        grad_output: Cotangent of the output, `[N, O, *]` or `[O, *]`.
        stride: Step of the window: a number, or one per spatial axis.
        padding: Zeros at both ends of each axis: a number, one per axis, `"valid"` (none), or `"same"` for an
            untransposed convolution without a stride.
        dilation: Distance of the taps of the kernel: a number, or one per axis.
        groups: Number of groups that the channels are divided into.
        output_padding: Rows added at the end of the output of a transposed convolution: a number, or one per axis.
        lowering: `"auto"`, `"exact"`, `"fast"`, the name of a lowering, or a mapping from operators to lowerings; see
            `augment`.
        providers: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.
        options: Options of the session, for example `{{"tf32": False}}`.
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    sizes = (input_size, None, None)
    (gradient,) = _INPUT[rank](
        (weight, grad_output), window, sizes=sizes, lowering=lowering, providers=providers, options=options
    )
    return gradient  # type: ignore[no-any-return]


def _weight_gradient(
    rank: int,
    transposed: bool,
    input: ArrayLike,  # noqa: A002 - the names are PyTorch's
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
    """The gradient of {0} for its weight, of shape `weight_size`.

    Args:
        input: `[N, C, *]`, or `[C, *]` for one sample, with one to three spatial axes.
        weight_size: Shape of the weight.
        grad_output: Cotangent of the output, `[N, O, *]` or `[O, *]`.
        stride: Step of the window: a number, or one per spatial axis.
        padding: Zeros at both ends of each axis: a number, one per axis, `"valid"` (none), or `"same"` for an
            untransposed convolution without a stride.
        dilation: Distance of the taps of the kernel: a number, or one per axis.
        groups: Number of groups that the channels are divided into.
        output_padding: Rows added at the end of the output of a transposed convolution: a number, or one per axis.
        lowering: `"auto"`, `"exact"`, `"fast"`, the name of a lowering, or a mapping from operators to lowerings; see
            `augment`.
        providers: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.
        options: Options of the session, for example `{{"tf32": False}}`.
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    sizes = (None, weight_size, None)
    (gradient,) = _WEIGHT[rank](
        (input, grad_output), window, sizes=sizes, lowering=lowering, providers=providers, options=options
    )
    return gradient  # type: ignore[no-any-return]


def _per_sample_gradient(
    rank: int,
    transposed: bool,
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
        input: `[N, C, *]`, or `[C, *]` for one sample, with one to three spatial axes.
        weight: `[O, C / groups, *]`, or `[C, O / groups, *]` if transposed.
        grad_output: Cotangent of the output, `[N, O, *]` or `[O, *]`.
        stride: Step of the window: a number, or one per spatial axis.
        padding: Zeros at both ends of each axis: a number, one per axis, `"valid"` (none), or `"same"` for an
            untransposed convolution without a stride.
        dilation: Distance of the taps of the kernel: a number, or one per axis.
        groups: Number of groups that the channels are divided into.
        bias: Whether the convolution has a bias, whose gradients are then the second result.
        output_padding: Rows added at the end of the output of a transposed convolution: a number, or one per axis.
        lowering: `"auto"`, `"exact"`, `"fast"`, the name of a lowering, or a mapping from operators to lowerings; see
            `augment`.
        providers: `"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.
        options: Options of the session, for example `{{"tf32": False}}`.
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    mask = (True, flag(bias, "bias"))
    return _PER_SAMPLE[rank](
        (input, weight, grad_output), window, mask=mask, lowering=lowering, providers=providers, options=options
    )


conv1d_input, conv2d_input, conv3d_input = by_rank(_input_gradient, "conv{}d_input")
conv1d_weight, conv2d_weight, conv3d_weight = by_rank(_weight_gradient, "conv{}d_weight")
conv1d_per_sample_grad, conv2d_per_sample_grad, conv3d_per_sample_grad = by_rank(
    _per_sample_gradient, "conv{}d_per_sample_grad"
)
conv_transpose1d_input, conv_transpose2d_input, conv_transpose3d_input = by_rank(
    _input_gradient, "conv_transpose{}d_input", transposed=True
)
conv_transpose1d_weight, conv_transpose2d_weight, conv_transpose3d_weight = by_rank(
    _weight_gradient, "conv_transpose{}d_weight", transposed=True
)
conv_transpose1d_per_sample_grad, conv_transpose2d_per_sample_grad, conv_transpose3d_per_sample_grad = by_rank(
    _per_sample_gradient, "conv_transpose{}d_per_sample_grad", transposed=True
)
