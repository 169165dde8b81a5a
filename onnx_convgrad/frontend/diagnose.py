"""Blame an invalid model, rather than this package, for an unexpected error."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import onnx
import onnx_ir as ir

from onnx_convgrad.base.boundary import is_callers, unforeseen
from onnx_convgrad.base.child import python_command
from onnx_convgrad.base.collection import without_collections
from onnx_convgrad.base.limits import Limits, limits_of
from onnx_convgrad.errors import InternalError, ModelError, RuleContractError
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.frontend.usable import has_known_operands

_UNTYPED = (ValueError, RuntimeError, IndexError)
"""Errors that onnx's C++ code raises besides its own."""

_UNDECLARED = "Field 'shape' of 'type' is required"

F = TypeVar("F", bound=Callable[..., Any])


def judged(function: F) -> F:
    """Make `function`, whose first argument is a model, raise `ModelError` if it fails for a model that ONNX refuses.

    Other unexpected exceptions become `InternalError`. The limits that apply inside are those of a loaded model, or the
    keyword `limits`. The checker runs only after a failure, so that models which it refuses for trifles are accepted.
    """

    @functools.wraps(function)
    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        given = getattr(model, "limits", None), kwargs.get("limits")
        try:
            limits = next((limits for limits in given if isinstance(limits, Limits)), None)
            with limits_of(limits), without_collections():
                return function(model, *args, **kwargs)
        except Exception as problem:
            if is_callers(problem):
                raise
            error = unforeseen(problem)
            # a contract without a suspect was broken by somebody's own rule, not by the model
            if isinstance(error, InternalError) or (isinstance(problem, RuleContractError) and problem.suspect):
                complaint = _complaint(model)
                if complaint is not None:
                    raise ModelError(f"The model is not valid: {complaint}") from problem
            if error is problem:
                raise
            raise error from problem

    return cast(F, checked)


def checker_complaint(model: onnx.ModelProto | str) -> str | None:
    """The first objection of onnx.checker to a model or file."""
    return _complaint_of(lambda: onnx.checker.check_model(model, full_check=True))


def inference_complaint(model: onnx.ModelProto) -> str | None:
    """The first node to which ONNX's strict shape inference objects."""
    return _complaint_of(lambda: onnx.shape_inference.infer_shapes(model, strict_mode=True))


def _complaint_of(check: Callable[[], object]) -> str | None:
    try:
        check()
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, *_UNTYPED) as problem:
        return " ".join(str(problem).split())
    return None


def _complaint(model: Any) -> str | None:
    """The objection of ONNX, or else of ONNX Runtime, to a model."""
    try:
        path = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
        if path is not None:
            proto = onnx.load(path, load_external_data=False)
        else:
            graph = model.source if isinstance(model, Model) else model
            proto = ir.to_proto(graph) if isinstance(graph, ir.Model) else graph
        complaint = None
        if has_known_operands(_nodes(proto)):
            complaint = checker_complaint(path or proto)
            if complaint is not None and _UNDECLARED in complaint:
                # an output without a declared shape, which no runtime requires: look for other faults
                complaint = inference_complaint(proto)
        foreign = {node.domain for node in _nodes(proto)} - _OF_RUNTIME - {f.domain for f in proto.functions}
        return complaint or (None if foreign else _runtime_complaint(path or proto))
    except Exception:  # noqa: BLE001 - the checker cannot read the model, so it has no objection to it
        return None


def _nodes(proto: onnx.ModelProto) -> Iterator[ir.Node]:
    return ir.from_proto(proto).graph.all_nodes()


_OF_RUNTIME = frozenset(("", "ai.onnx", "ai.onnx.ml", "com.microsoft"))
"""Domains whose operators ONNX Runtime knows. It refuses others, right or wrong."""

_LOAD = """
import sys
import onnxruntime as ort
ort.set_default_logger_severity(4)
state = ort.capi.onnxruntime_pybind11_state
try:
    ort.InferenceSession(sys.argv[1] or sys.stdin.buffer.read(), providers=["CPUExecutionProvider"])
except (state.Fail, state.InvalidArgument, state.InvalidGraph, state.RuntimeException) as problem:
    sys.exit(" ".join(str(problem).split()))
"""


def _runtime_complaint(model: onnx.ModelProto | str) -> str | None:
    """The objection of ONNX Runtime to a model, loaded by another process, which it may end; `None` without a runtime."""
    if importlib.util.find_spec("onnxruntime") is None or not sys.executable:
        return None
    path, data = (model, b"") if isinstance(model, str) else ("", model.SerializeToString())
    done = subprocess.run(  # noqa: S603 - our own program
        python_command(_LOAD, path), input=data, capture_output=True, check=False, timeout=_PATIENCE
    )
    if done.returncode < 0:
        return "ONNX Runtime does not survive loading it."
    return done.stderr.decode(errors="replace").strip() or None if done.returncode == 1 else None


_PATIENCE = 10
"""Seconds that ONNX Runtime gets to load a model."""
