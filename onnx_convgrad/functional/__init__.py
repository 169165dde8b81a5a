"""Convolutions of numpy arrays and their gradients, run by ONNX Runtime: PyTorch's functions under their names.

| functions | what they compute |
|---|---|
| `conv{1,2,3}d`, `conv_transpose{1,2,3}d` | forward, as in `torch.nn.functional` |
| `conv{1,2,3}d_input`, `conv{1,2,3}d_weight` | gradients of one convolution, as in `torch.nn.grad` |
| `conv_transpose{1,2,3}d_...` | the same for transposed convolutions |
| `conv{1,2,3}d_per_sample_grad` | gradients for weight and bias of every sample; also transposed |
| `convolution` | forward, `torch.convolution` |
| `convolution_backward` | input, weight and bias at once, `torch.ops.aten.convolution_backward` |
| `convolution_double_backward` | its own backward pass, `torch.ops.aten._convolution_double_backward` |
| `convolution_jvp` | forward mode |
| `convolution_relu`, `convolution_add_relu` | with a ReLU, named as in `torch.cudnn_convolution_relu` |
| `convolution_relu_backward`, ... | their gradients |
| `explain` | which lowering a call takes, and why |

The first call with certain shapes and arguments builds a small model with the rules and lowerings of `augment`, and compiles
it; later calls only run it. The conventions of all functions are in `onnx_convgrad.functional.aten`.
"""

from onnx_convgrad.functional import aten, by_rank
from onnx_convgrad.functional.aten import *  # noqa: F403 - its __all__ lists them
from onnx_convgrad.functional.by_rank import *  # noqa: F403
from onnx_convgrad.functional.table import explain

__all__ = ["explain"]
__all__ += aten.__all__
__all__ += by_rank.__all__
