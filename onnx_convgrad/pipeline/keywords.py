"""Show the shared keywords of the transformations in their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import ParamSpec, TypeVar

from onnx_convgrad.pipeline.options import Options

P = ParamSpec("P")
R = TypeVar("R")


def keywords(settings: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let `inspect.signature` show the keywords of a TypedDict, with the defaults of `Options`, instead of `**settings`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, default = inspect.signature(function), {field.name: field.default for field in fields(Options)}
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default.get(name), annotation=kind.__forward_arg__
            )
            for name, kind in settings.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return function

    return decorate
