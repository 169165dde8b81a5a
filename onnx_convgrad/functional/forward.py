"""Convolutions by rank, with the signatures of `torch.nn.functional`.

Arrays, paddings and errors are as in `onnx_convgrad.functional.aten`.
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from onnx_convgrad.functional.by_rank import RANKS, Numbers, Padding, by_rank
from onnx_convgrad.functional.calls import Function
from onnx_convgrad.functional.sessions import Array
from onnx_convgrad.runtime.providers import Providers
from onnx_convgrad.runtime.session_options import Options

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]

_ARRAYS = {"input": "input", "weight": "weight", "bias": "bias"}
_FORWARD = {rank: Function("convolution", _ARRAYS, ("output",), rank=rank) for rank in RANKS}


def _conv(
    rank: int,
    transposed: bool,
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
    """The convolution of `input` and `weight` plus `bias`: `torch.nn.functional.{0}`.

    Arguments as for `convolution`.
    """
    window = (stride, padding, dilation, transposed, 0, groups)
    (output,) = _FORWARD[rank]((input, weight, bias), window, providers=providers, options=options)
    return output  # type: ignore[no-any-return]


def _conv_transpose(
    rank: int,
    transposed: bool,
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

    Arguments as for `convolution`; their order is PyTorch's, in which `dilation` is the last.
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    (output,) = _FORWARD[rank]((input, weight, bias), window, providers=providers, options=options)
    return output  # type: ignore[no-any-return]


conv1d, conv2d, conv3d = by_rank(_conv, "conv{}d")
conv_transpose1d, conv_transpose2d, conv_transpose3d = by_rank(_conv_transpose, "conv_transpose{}d", transposed=True)
