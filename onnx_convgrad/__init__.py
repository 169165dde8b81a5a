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

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from onnx_convgrad.base.version import __version__ as __version__

if TYPE_CHECKING:
    from onnx_convgrad import (
        attacks,
        attribution,
        callbacks,
        curvature,
        data,
        distributed,
        errors,
        federated,
        functional,
        jax,
        losses,
        metrics,
        optim,
        schedules,
        torch,
        transforms,
    )
    from onnx_convgrad.api import augment, explain, grad, hessian, hvp, jacobian, jvp, save, session, vjp, vmap
    from onnx_convgrad.base.limits import Limits
    from onnx_convgrad.errors import ConvGradError
    from onnx_convgrad.evaluation.evaluate import evaluate
    from onnx_convgrad.evaluation.predict import predict
    from onnx_convgrad.frontend.load import load
    from onnx_convgrad.frontend.model import Model
    from onnx_convgrad.pipeline.options import Memory, Target
    from onnx_convgrad.programs.build import build_training
    from onnx_convgrad.programs.precision import MixedPrecision
    from onnx_convgrad.programs.privacy import Privacy
    from onnx_convgrad.programs.program import TrainingProgram
    from onnx_convgrad.training.trainer import Trainer

_NAMES = {
    "api": "augment explain grad hessian hvp jacobian jvp save session vjp vmap",
    "base.limits": "Limits",
    "errors": "ConvGradError",
    "evaluation.evaluate": "evaluate",
    "evaluation.predict": "predict",
    "frontend.load": "load",
    "frontend.model": "Model",
    "pipeline.options": "Memory Target",
    "programs.build": "build_training",
    "programs.precision": "MixedPrecision",
    "programs.privacy": "Privacy",
    "programs.program": "TrainingProgram",
    "training.trainer": "Trainer",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "ConvGradError",
    "Limits",
    "Memory",
    "MixedPrecision",
    "Model",
    "Privacy",
    "Target",
    "Trainer",
    "TrainingProgram",
    "attacks",
    "attribution",
    "augment",
    "build_training",
    "callbacks",
    "curvature",
    "data",
    "distributed",
    "errors",
    "evaluate",
    "explain",
    "federated",
    "functional",
    "grad",
    "hessian",
    "hvp",
    "jacobian",
    "jax",
    "jvp",
    "load",
    "losses",
    "metrics",
    "optim",
    "predict",
    "save",
    "schedules",
    "session",
    "torch",
    "transforms",
    "vjp",
    "vmap",
]
_MODULES = {*__all__} - {*_HOME}


def __getattr__(name: str) -> Any:  # Any: a function, a class or a module
    if name in _HOME:
        return getattr(importlib.import_module(f"onnx_convgrad.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"onnx_convgrad.{name}")
    return _refuse(__name__, __all__, name)


def _refuse(module: str, names: Sequence[str], name: str) -> NoReturn:
    """Raise the error for an attribute that a module lacks."""
    if name.startswith("_"):  # Python looks for such names by itself, during imports too
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    from onnx_convgrad.base.other_names import no_attribute

    raise no_attribute(module, name, names)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Let a public module refuse unknown names with a remedy; Python sets it here when it has been imported."""
        if name in _MODULES and isinstance(value, ModuleType):
            members = getattr(value, "__all__", ())
            vars(value).setdefault("__getattr__", functools.partial(_refuse, value.__name__, members))
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
