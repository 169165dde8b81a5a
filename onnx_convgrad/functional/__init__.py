"""Convolution gradients of numpy arrays, run by ONNX Runtime: PyTorch's functions under their names.

| functions | what they compute |
|---|---|
| `conv{1,2,3}d_input`, `conv{1,2,3}d_weight` | gradients of one convolution, as in `torch.nn.grad` |
| `conv_transpose{1,2,3}d_...` | the same for transposed convolutions |
| `conv{1,2,3}d_per_sample_grad` | gradients for weight and bias of every sample; also transposed |
| `convolution` | the convolution itself, `torch.convolution` |
| `convolution_backward` | input, weight and bias at once, `torch.ops.aten.convolution_backward` |
| `convolution_double_backward` | its own backward pass, `torch.ops.aten._convolution_double_backward` |
| `convolution_jvp` | forward mode |

The first call with certain shapes and arguments builds a small model with the rules and lowerings of `augment`, and compiles
it; later calls only run it. The conventions of all functions are in `onnx_convgrad.functional.convolution`.
"""

from onnx_convgrad.functional import gradients
from onnx_convgrad.functional.convolution import (
    convolution,
    convolution_backward,
    convolution_double_backward,
    convolution_jvp,
)
from onnx_convgrad.functional.gradients import *  # noqa: F403 - its __all__ lists them

__all__ = ["convolution", "convolution_backward", "convolution_double_backward", "convolution_jvp"]
__all__ += gradients.__all__
