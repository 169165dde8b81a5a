"""Let public functions raise no errors but those of this package."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from onnx_convgrad.errors import ArgumentError, ConvGradError, InternalError, LimitError, ModelError

F = TypeVar("F", bound=Callable[..., Any])


def typed_errors(function: F) -> F:
    """Turn every other exception of a public `function` into an error of this package.

    Raises:
        ArgumentError: The arguments do not fit the signature.
        LimitError: There is not enough memory.
        ModelError: Something is nested too deeply for Python's stack.
        InternalError: Any exception that was not foreseen, which becomes its cause.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ConvGradError:
            raise
        except Exception as problem:
            if isinstance(problem, TypeError):
                try:
                    inspect.signature(function).bind(*args, **kwargs)
                except TypeError as misfit:
                    raise ArgumentError(f"{function.__name__}: {misfit}.") from None
            raise unforeseen(problem) from problem

    return cast(F, call)


def unforeseen(problem: Exception, where: str = "") -> ConvGradError:
    """The error of this package for an exception that nothing has caught; `where` names a node."""
    if isinstance(problem, ConvGradError):
        return problem
    if isinstance(problem, MemoryError):
        return LimitError("There is not enough memory for this model.", hint="Use a machine with more memory.")
    if isinstance(problem, RecursionError):
        return ModelError("The model is nested too deeply, or an expression in it is.")
    text = f"{type(problem).__name__}: {problem}" if f"{problem}" else type(problem).__name__
    return InternalError(f"onnx_convgrad failed unexpectedly{f' at {where}' if where else ''} ({text}).")
