"""Let public functions raise no errors but those of this package."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar, cast

from onnx_convgrad.base.other_names import misfit
from onnx_convgrad.errors import ConvGradError, InternalError, LimitError, ModelError, RuleContractError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def typed_errors(function: F) -> F:
    """Turn every exception of a public `function`, but for a call that does not fit, into an error of this package.

    Of a class, all public methods are such functions. Warnings that a filter turns into exceptions pass as they are.

    Raises:
        TypeError: The arguments do not fit the signature.
        LimitError: There is not enough memory.
        ModelError: Something is nested too deeply for Python's stack.
        InternalError: Any exception that was not foreseen, which becomes its cause.
    """
    if isinstance(function, type):
        for name, method in vars(function).copy().items():
            if inspect.isfunction(method) and (name in ("__init__", "__call__") or not name.startswith("_")):
                setattr(function, name, typed_errors(method))
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as problem:
            warning = as_warning(problem)
            if warning is problem or is_callers(problem):
                raise
            if warning is not None:
                raise warning from None
            error, source = unforeseen(problem), problem.__cause__ or problem
            if isinstance(source, TypeError):
                signature = inspect.signature(function)
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as reason:
                    wrong = TypeError(misfit(function.__qualname__, signature, kwargs, f"{reason}"))
                    setattr(wrong, _MARK, True)  # it passes the other functions of this package that hand arguments on
                    raise wrong from None
            if isinstance(error, InternalError) and isinstance(source, (TypeError, ValueError, AttributeError)):
                raise InternalError(error.message, hint=_TYPES) from source
            if error is problem:
                raise
            raise error from problem

    return cast(F, call)


def as_warning(problem: BaseException | None) -> Warning | None:
    """The warning, turned into an exception by a filter, that is the cause of a failure."""
    while problem is not None and not isinstance(problem, Warning):
        problem = problem.__cause__
    return problem


_MARK = "_onnx_convgrad_of_caller"


def is_callers(problem: BaseException) -> bool:
    """Whether an exception comes from an object of the caller, see `CallersCode`."""
    return bool(getattr(problem, _MARK, False))


class CallersCode:
    """A block that runs an object of the caller: its exceptions pass `typed_errors` as they are.

    `owner` is the object; exceptions of this package's own objects are not marked.
    """

    __slots__ = ("own",)

    def __init__(self, owner: object) -> None:
        kind = owner if isinstance(owner, type) or inspect.isfunction(owner) else type(owner)
        self.own = kind.__module__.partition(".")[0] == "onnx_convgrad"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, problem: BaseException | None, trace: TracebackType | None) -> None:
        if problem is not None and not self.own:
            with contextlib.suppress(AttributeError):  # a class with slots
                setattr(problem, _MARK, True)


_END: Any = object()


def from_caller(owner: object, opened: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Iterate over an object of the caller, in blocks of `CallersCode`; `opened` starts the iteration."""
    with CallersCode(owner):
        items = opened()
    while True:
        with CallersCode(owner):
            item = next(items, _END)
        if item is _END:
            return
        yield item


_TYPES = "If the arguments have the documented types, please report it, with the model if you can share it."

_CORRECT = "Correct the shapes that the model declares and stores, or the attributes of the node."


def unforeseen(problem: Exception, where: str = "") -> ConvGradError:
    """The error of this package for an exception that nothing has caught; `where` names a node."""
    if isinstance(problem, RuleContractError) and problem.suspect:
        return ModelError(problem.suspect, hint=_CORRECT)
    if isinstance(problem, ConvGradError):
        return problem
    if isinstance(problem, MemoryError):
        return LimitError("There is not enough memory for this model.", hint="Use a machine with more memory.")
    if isinstance(problem, RecursionError):
        return ModelError("The model is nested too deeply, or an expression in it is.")
    text = f"{type(problem).__name__}: {problem}" if f"{problem}" else type(problem).__name__
    return InternalError(f"onnx_convgrad failed unexpectedly{f' at {where}' if where else ''} ({text}).")


def root_cause(problem: BaseException) -> str:
    """The message of the first error in a chain of errors."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    return f"{problem}".strip() or type(problem).__name__
