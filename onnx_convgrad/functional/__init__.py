"""Convolutions of numpy arrays and their gradients, run by ONNX Runtime: PyTorch's functions under their names.

| functions | what they compute |
|---|---|

The first call with certain shapes and arguments builds a small model with the rules and lowerings of `augment`, and compiles
it; later calls only run it. The conventions of all functions are in `onnx_convgrad.functional.aten`.
"""

from onnx_convgrad.functional import aten, forward, gradients, rectified
from onnx_convgrad.functional.aten import *  # noqa: F403 - its __all__ lists them
from onnx_convgrad.functional.explanation import explain
from onnx_convgrad.functional.forward import *  # noqa: F403
from onnx_convgrad.functional.gradients import *  # noqa: F403
from onnx_convgrad.functional.rectified import *  # noqa: F403

__all__ = ["explain"]
__all__ += aten.__all__
__all__ += forward.__all__
__all__ += gradients.__all__
__all__ += rectified.__all__
