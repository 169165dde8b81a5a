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
it; later calls only run it.

Conventions of all functions:

- Arrays are numpy arrays of one dtype: float16, bfloat16 (of the package ml_dtypes), float32, float64, complex64 or
  complex128. Results have the same. Halves are computed in float32 and rounded once, except float16 on CUDA.
- Results are in the memory format of the operands: if the channels of the input or the weight (without an input, of
  `grad_output` or the weight) are innermost in memory, those of all results are. The shapes stay as they are.
- Gradients of complex arrays are PyTorch's: dL/d(re) + i dL/d(im). Functions with a ReLU refuse complex arrays.
- A convolution with 2^31 or more elements in an operand is computed in parts of the batch.
- `ArgumentError` is raised where PyTorch refuses the arguments, `ExecutionError` where ONNX Runtime or a provider is missing
  or fails; the `snippet` of a failure is a program that reproduces it with numpy and ONNX Runtime alone.
"""

from onnx_convgrad.functional import functions
from onnx_convgrad.functional.functions import *  # noqa: F403 - its __all__ lists them
from onnx_convgrad.functional.table import explain

__all__ = ["explain"]
__all__ += functions.__all__
