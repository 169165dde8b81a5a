"""Errors that nobody foresaw are nearly always those of a model that ONNX does not allow: then it is what is blamed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import onnx
import onnx_ir as ir

from onnx_convgrad.errors import ConvGradError, ModelError, RuleContractError

__all__ = ["judged", "root_cause"]

_UNDECLARED = "Field 'shape' of 'type' is required"

F = TypeVar("F", bound=Callable[..., Any])


def judged(function: F) -> F:
    """A function of a model that raises `ModelError` where it would fail for what ONNX's checker objects to.

    The checker runs after a failure only, so that models which it refuses for trifles are taken as they are.
    """

    @functools.wraps(function)
    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(model, *args, **kwargs)
        except Exception as problem:
            if isinstance(problem, ConvGradError) and not isinstance(problem, RuleContractError):
                raise
            complaint = _complaint(model)
            if complaint is None:
                raise
            raise ModelError(f"The model is not valid: {complaint}") from problem

    return cast(F, checked)


def root_cause(problem: BaseException) -> str:
    """What the first of a chain of errors says."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    return f"{problem}".strip() or type(problem).__name__


def _complaint(model: Any) -> str | None:
    given = os.fspath(model) if isinstance(model, (str, os.PathLike)) else model
    try:
        onnx.checker.check_model(ir.to_proto(given) if isinstance(given, ir.Model) else given, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as problem:
        said = " ".join(str(problem).split())
        return said if _UNDECLARED not in said else _complaint_of_inference(given)
    except Exception:  # noqa: BLE001 - what the checker cannot look at, it does not object to
        return None
    return None


def _complaint_of_inference(model: Any) -> str | None:
    """What is wrong besides that an output has no declared shape, which no runtime asks for."""
    if not isinstance(model, (str, onnx.ModelProto)):
        model = ir.to_proto(model)
    try:
        proto = onnx.load(model, load_external_data=False) if isinstance(model, str) else model
        onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    except onnx.shape_inference.InferenceError as problem:
        return " ".join(str(problem).split())
    return None
