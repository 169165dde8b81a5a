"""Convolution gradients of numpy arrays, run by ONNX Runtime: the functions that PyTorch has, under their names.

=====================================  ================================================================================
`conv{1,2,3}d_input`, `_weight`        gradients of one convolution, as in `torch.nn.grad`
`conv_transpose{1,2,3}d_...`           the same of transposed convolutions
`conv{1,2,3}d_per_sample_grad`         gradients for weight and bias of every sample by itself; transposed too
`convolution`                          forward, `torch.convolution`
`convolution_backward`                 input, weight and bias at once, `torch.ops.aten.convolution_backward`
`convolution_double_backward`          the backward pass of that, `torch.ops.aten._convolution_double_backward`
`convolution_jvp`                      forward mode
=====================================  ================================================================================

The first call with certain shapes and arguments builds a small model by the rules and lowerings that `augment` uses, and
compiles it; later ones only run it. `onnx_convgrad.functional.convolution` says what all functions share.
"""

from onnx_convgrad.functional.convolution import (
    convolution,
    convolution_backward,
    convolution_double_backward,
    convolution_jvp,
)
from onnx_convgrad.functional.gradients import (
    conv1d_input,
    conv1d_per_sample_grad,
    conv1d_weight,
    conv2d_input,
    conv2d_per_sample_grad,
    conv2d_weight,
    conv3d_input,
    conv3d_per_sample_grad,
    conv3d_weight,
    conv_transpose1d_input,
    conv_transpose1d_per_sample_grad,
    conv_transpose1d_weight,
    conv_transpose2d_input,
    conv_transpose2d_per_sample_grad,
    conv_transpose2d_weight,
    conv_transpose3d_input,
    conv_transpose3d_per_sample_grad,
    conv_transpose3d_weight,
)

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
    "convolution",
    "convolution_backward",
    "convolution_double_backward",
    "convolution_jvp",
]
