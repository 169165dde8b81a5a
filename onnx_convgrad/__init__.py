"""Build gradients of ONNX models as ONNX models: symbolic backward graphs out of plain `ai.onnx` operators.

Everything is imported on first use, so that `python -m onnx_convgrad --help` answers at once.
"""

# The block below comes first. It needs only modules that the interpreter has loaded by itself
import os
import sys

if sys.argv[:1] == ["-m"] and "onnx_convgrad" in sys.orig_argv[-len(sys.argv)]:
    try:  # `python -m` has put the current folder there, whose files would pass for modules that are imported later
        if sys.path[:1] == [os.getcwd()]:  # noqa: PTH109
            del sys.path[0]
    except OSError:  # the folder is gone, and so is not in the path
        pass

import importlib
from typing import TYPE_CHECKING, Any

from onnx_convgrad.base.version import __version__

if TYPE_CHECKING:
    from onnx_convgrad import attacks, callbacks, curvature, data, explainers, functional, losses, metrics, optim
    from onnx_convgrad.api import (
        augment,
        explain,
        grad,
        hessian,
        hvp,
        jacobian,
        jvp,
        lower_gradient_ops,
        replace_head,
        save,
        session,
        vjp,
        vmap,
    )
    from onnx_convgrad.base.limits import Limits
    from onnx_convgrad.errors import (
        ArgumentError,
        CheckpointError,
        ConvGradError,
        DifferentiationError,
        DivergenceError,
        ExecutionError,
        InternalError,
        LimitError,
        LoweringError,
        ModelError,
        RuleContractError,
    )
    from onnx_convgrad.evaluation.calibration import unfold_batchnorm
    from onnx_convgrad.evaluation.evaluate import evaluate
    from onnx_convgrad.evaluation.mapper import Mapper
    from onnx_convgrad.evaluation.predict import predict
    from onnx_convgrad.frontend.load import load
    from onnx_convgrad.frontend.model import Model
    from onnx_convgrad.pipeline.report import Report
    from onnx_convgrad.programs.build import build_training
    from onnx_convgrad.programs.device import DeviceProgram, optimize_for_device
    from onnx_convgrad.programs.privacy import Privacy
    from onnx_convgrad.programs.program import TrainingProgram
    from onnx_convgrad.quantization.insert import insert_quantizers
    from onnx_convgrad.quantization.quantize import quantize
    from onnx_convgrad.surgery.adapters.add import add_adapters
    from onnx_convgrad.surgery.adapters.files import load_adapters
    from onnx_convgrad.surgery.adapters.merge import merge_adapters
    from onnx_convgrad.surgery.groupnorm import replace_batchnorm
    from onnx_convgrad.training.trainer import Trainer

_NAMES = {
    "surgery.adapters.add": "add_adapters",
    "surgery.adapters.files": "load_adapters",
    "surgery.adapters.merge": "merge_adapters",
    "api": "augment explain grad hessian hvp jacobian jvp lower_gradient_ops replace_head save session vjp vmap",
    "base.limits": "Limits",
    "errors": "ArgumentError CheckpointError ConvGradError DifferentiationError DivergenceError ExecutionError "
    "InternalError LimitError LoweringError ModelError RuleContractError",
    "frontend.load": "load",
    "frontend.model": "Model",
    "pipeline.report": "Report",
    "quantization.insert": "insert_quantizers",
    "quantization.quantize": "quantize",
    "evaluation.calibration": "unfold_batchnorm",
    "programs.build": "build_training",
    "programs.program": "TrainingProgram",
    "programs.device": "DeviceProgram optimize_for_device",
    "programs.privacy": "Privacy",
    "surgery.groupnorm": "replace_batchnorm",
    "evaluation.evaluate": "evaluate",
    "evaluation.mapper": "Mapper",
    "evaluation.predict": "predict",
    "training.trainer": "Trainer",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = (
    "attacks",
    "callbacks",
    "curvature",
    "data",
    "explainers",
    "functional",
    "jax",
    "losses",
    "metrics",
    "optim",
    "torch",
)

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "ConvGradError",
    "DeviceProgram",
    "DifferentiationError",
    "DivergenceError",
    "ExecutionError",
    "InternalError",
    "LimitError",
    "Limits",
    "LoweringError",
    "Mapper",
    "Model",
    "ModelError",
    "Privacy",
    "Report",
    "RuleContractError",
    "Trainer",
    "TrainingProgram",
    "__version__",
    "add_adapters",
    "attacks",
    "augment",
    "build_training",
    "callbacks",
    "curvature",
    "data",
    "evaluate",
    "explain",
    "explainers",
    "functional",
    "grad",
    "hessian",
    "hvp",
    "insert_quantizers",
    "jacobian",
    "jvp",
    "load",
    "load_adapters",
    "losses",
    "lower_gradient_ops",
    "merge_adapters",
    "metrics",
    "optim",
    "optimize_for_device",
    "predict",
    "quantize",
    "replace_batchnorm",
    "replace_head",
    "save",
    "session",
    "unfold_batchnorm",
    "vjp",
    "vmap",
]


def __getattr__(name: str) -> Any:  # Any: a function, a class or a module
    if name in _HOME:
        return getattr(importlib.import_module(f"onnx_convgrad.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"onnx_convgrad.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
