"""Blame an invalid model, rather than this package, for an unexpected error."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import onnx
import onnx_ir as ir

from onnx_convgrad.base.boundary import unforeseen
from onnx_convgrad.base.limits import limits_of
from onnx_convgrad.errors import ConvGradError, ModelError, RuleContractError
from onnx_convgrad.frontend.usable import has_known_operands

_UNDECLARED = "Field 'shape' of 'type' is required"

F = TypeVar("F", bound=Callable[..., Any])


def judged(function: F) -> F:
    """Make `function`, whose first argument is a model, raise `ModelError` if it fails for a model that ONNX refuses.

    Other unexpected exceptions become `InternalError`. The limits that apply inside are the keyword `limits`, or those of
    the options that follow the model.
    The checker runs only after a failure, so that models which it refuses for trifles are accepted.
    """

    @functools.wraps(function)
    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = kwargs.get("limits") or (getattr(args[0], "limits", None) if args else None)
        try:
            with limits_of(chosen):
                return function(model, *args, **kwargs)
        except Exception as problem:
            if isinstance(problem, ConvGradError) and not isinstance(problem, RuleContractError):
                raise
            if isinstance(problem, (MemoryError, RecursionError)):
                raise unforeseen(problem) from problem
            complaint = _complaint(model)
            if complaint is not None:
                raise ModelError(f"The model is not valid: {complaint}") from problem
            if isinstance(problem, ConvGradError):
                raise
            raise unforeseen(problem) from problem

    return cast(F, checked)


def root_cause(problem: BaseException) -> str:
    """The message of the first error in a chain of errors."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    return f"{problem}".strip() or type(problem).__name__


def checker_complaint(model: onnx.ModelProto | str) -> str | None:
    """The first objection of onnx.checker to a model or file."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as problem:
        return " ".join(str(problem).split())
    return None


def inference_complaint(model: onnx.ModelProto) -> str | None:
    """The first node to which ONNX's strict shape inference objects."""
    try:
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except onnx.shape_inference.InferenceError as problem:
        return " ".join(str(problem).split())
    return None


def _complaint(model: Any) -> str | None:
    try:
        if isinstance(model, (str, os.PathLike)):
            proto = onnx.load(model, load_external_data=False)
        else:
            proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
        if not has_known_operands(ir.from_proto(proto)):
            return None
        complaint = checker_complaint(os.fspath(model) if isinstance(model, (str, os.PathLike)) else proto)
        if complaint is None or _UNDECLARED not in complaint:
            return complaint
        # an output without a declared shape, which no runtime requires: look for other faults
        return inference_complaint(proto)
    except Exception:  # noqa: BLE001 - the checker cannot read the model, so it has no objection to it
        return None
