"""Bound the work and the memory that the numbers in a file, or the arrays of a caller, can ask for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields

from onnx_convgrad.errors import ArgumentError, LimitError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most work and memory that a model may ask for while its gradients are built.

    The number of nodes and the size of the weights in the file itself are not limited; what grows with a number in the
    file is. Raise a limit for a model that you trust.

    Attributes:
        nodes: Nodes in the graph once functions are inlined and loops are written out.
        constant_bytes: Bytes of one constant that the file does not hold but asks for: a sparse tensor in its dense form,
            the matrix of a Resize or a DFT.
        depth: Levels of nested graphs, and of functions that call one another.

    Raises:
        ArgumentError: A limit is not a whole number above 0.
    """

    nodes: int = 50_000
    constant_bytes: int = 2**28
    depth: int = 60

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(f"The limit {field.name} must be a whole number above 0, not {value!r}.")


_DEFAULT = Limits()
_CURRENT: ContextVar[Limits | None] = ContextVar("limits", default=None)


def limits() -> Limits:
    """The limits of the transformation that is running, or the default ones."""
    return _CURRENT.get() or _DEFAULT


@contextlib.contextmanager
def limits_of(chosen: Limits | None) -> Iterator[None]:
    """Apply `chosen` limits inside the `with` block; `None` keeps those that hold."""
    token = _CURRENT.set(chosen or _CURRENT.get())
    try:
        yield
    finally:
        _CURRENT.reset(token)


def check_limit(name: str, wanted: int, what: str) -> None:
    """Raise `LimitError` if `wanted` exceeds the limit `name`; `what` says who asks for it and begins the sentence."""
    allowed = getattr(limits(), name)
    if wanted > allowed:
        unit = name.replace("_", " ")
        amount = f"{wanted:,}" if wanted < 10**15 else f"{wanted:.1e}" if wanted < 10**300 else "more than 1e300"
        raise LimitError(
            f"{what} asks for {amount} {unit}, and at most {allowed:,} are allowed.",
            hint=f"If you trust the model, raise the limit: limits=onnx_convgrad.Limits({name}=...), or --limit {name}=....",
        )


def machine_bytes() -> float:
    """Bytes of the machine's memory; infinity if the system does not report it (Windows)."""
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(getattr(os, "sysconf_names", ())):
        return float("inf")
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
