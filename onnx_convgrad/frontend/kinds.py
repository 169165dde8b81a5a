"""Let a function from a model to a model return the kind of model that it was given."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import onnx
import onnx_ir as ir

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.collection import without_collections
from onnx_convgrad.base.limits import limits_of
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.ir.serialize import whole_proto

P = ParamSpec("P")
M = TypeVar("M", onnx.ModelProto, ir.Model)


class Transformation(Protocol[P]):
    """A function from a model to a model of the same kind; a path gives a proto, a loaded model what it was loaded from."""

    @overload
    def __call__(self, model: str | os.PathLike[str], *args: P.args, **kwargs: P.kwargs) -> onnx.ModelProto: ...
    @overload
    def __call__(self, model: Model, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def __call__(self, model: M, *args: P.args, **kwargs: P.kwargs) -> M: ...


class HasModel(Protocol):
    """A model with more that is known of it, which may be converted to a proto faster."""

    @property
    def model(self) -> ir.Model: ...
    def proto(self) -> onnx.ModelProto: ...


def transformation(function: Callable[Concatenate[AnyModel, P], ir.Model | HasModel]) -> Transformation[P]:
    """Return the result in the kind of the given model; for a path, a proto that holds all its weights.

    The limits of a loaded model hold inside.
    """

    @typed_errors
    @functools.wraps(function)
    def transform(model: AnyModel, *args: P.args, **kwargs: P.kwargs) -> onnx.ModelProto | ir.Model:
        with without_collections(), limits_of(model.limits if isinstance(model, Model) else None):
            result = function(model, *args, **kwargs)
            if isinstance(model, ir.Model) or (isinstance(model, Model) and model.kind is ir.Model):
                return result if isinstance(result, ir.Model) else result.model
            return whole_proto(result) if isinstance(result, ir.Model) else result.proto()

    return cast("Transformation[P]", transform)
