"""Write a function once and make it for one, two and three spatial axes, plain or transposed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.errors import ArgumentError

__all__ = ["RANKS", "Made", "Numbers", "Padding", "by_rank"]

Numbers = int | Sequence[int]
Padding = int | Sequence[int] | str
P = ParamSpec("P")
R = TypeVar("R")
Made = tuple[Callable[P, R], Callable[P, R], Callable[P, R]]

RANKS = (1, 2, 3)


def by_rank(function: Callable[Concatenate[int, bool, P], R], name: str, *, transposed: bool = False) -> Made[P, R]:
    """Make the functions for one, two and three spatial axes.

    Args:
        function: Takes the number of axes, whether the convolution is transposed, and the arguments of the made functions.
            In its docstring `{0}` stands for the operator. Only transposed ones have the parameter `output_padding`.
        name: Of the made functions; `{}` stands for the number of axes.
        transposed: Whether the convolution is transposed.
    """

    def bound(rank: int) -> Callable[P, R]:
        def of_rank(*args: P.args, **kwargs: P.kwargs) -> R:
            if not transposed and "output_padding" in kwargs:
                raise ArgumentError(f"{of_rank.__name__}() got an unexpected keyword argument 'output_padding'.")
            return function(rank, transposed, *args, **kwargs)

        own = list(inspect.signature(function).parameters.values())[2:]
        own = [p for p in own if transposed or p.name != "output_padding"]
        of_rank.__signature__ = inspect.signature(function).replace(parameters=own)  # type: ignore[attr-defined]
        of_rank.__name__ = of_rank.__qualname__ = name.format(rank)
        of_rank.__doc__ = (function.__doc__ or "").format(f"conv{'_transpose' * transposed}{rank}d")
        kept = {*(p.name for p in own), "return"}
        of_rank.__annotations__ = {k: v for k, v in function.__annotations__.items() if k in kept}
        return typed_errors(of_rank)

    return bound(1), bound(2), bound(3)
