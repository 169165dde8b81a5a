"""Lowerings: ways of computing an abstract gradient operator with plain ones.

A lowering is a function with named requirements; a requirement answers with the reason when it does not hold. Choosing
is never a rule's: `candidates` prices every lowering that applies, and `lower` takes the cheapest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Decorator, F, load_rules
from onnx_convgrad.base.run_once import once
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.targets import Target

__all__ = [
    "Lowering",
    "Query",
    "Reader",
    "Requirement",
    "Spec",
    "lowering",
    "lowerings",
    "lowerings_of",
    "reader_of",
    "spec_builder",
]


class Spec(Protocol):
    """What an operator's lowerings need to know about one node: frozen, hashable, printed as one line."""

    def hinted(self) -> Self:
        """The same with every unknown size at a typical one."""


@dataclass(frozen=True, slots=True)
class Query:
    """What a requirement looks at.

    Attributes:
        typical: `spec` with every unknown size at a typical one.
        training: Whether the graph trains, on a batch that is never empty.
        present: Which operands there are, by position.
        constant: Positions of the operands that are known when the model is loaded, for targets that make use of it.
        ends: Whether the result is an output of the graph.
    """

    spec: Any
    typical: Any
    dtype: ir.DataType
    target: Target
    training: bool = False
    present: tuple[bool, ...] = ()
    constant: tuple[int, ...] = ()
    ends: bool = False


Requirement = Callable[[Query], str | None]
"""Answers `None` when it holds, else the reason why not."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """One way of computing an abstract operator with plain ones."""

    op_type: str
    name: str
    emit: Callable[[Emitter, Call, Any], ir.Value]
    requires: tuple[Requirement, ...]
    exact: bool
    summary: str


@dataclass(frozen=True, slots=True)
class Reader:
    """How the spec of an operator is read off a node, and which of its shapes each operand has."""

    build: Callable[[Call], Any]
    operands: tuple[str, ...]


_LOWERINGS: dict[str, dict[str, Lowering]] = {}
_SPECS: dict[str, Reader] = {}


def lowering(op_type: str, name: str, *, requires: Sequence[Requirement] = (), exact: bool = True) -> Decorator:
    """Declare a lowering of an operator: `emit(e, call, spec) -> value`.

    `exact=False` says that it rounds more than a direct sum does: `lowering="exact"` leaves it out.
    """

    def decorate(function: F) -> F:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        entry = Lowering(op_type, name, function, tuple(requires), exact, summary)
        _LOWERINGS.setdefault(op_type, {})[name] = entry
        return function

    return decorate


def spec_builder(op_type: str, operands: Sequence[str]) -> Decorator:
    """Declare how the spec of an operator is read off a node.

    `operands` names, per operand of the operator, the property of the spec that holds its shape.
    """

    def decorate(function: F) -> F:
        _SPECS[op_type] = Reader(function, tuple(operands))
        return function

    return decorate


@once
def _load_built_in() -> None:
    """Import the built-in lowerings, once."""
    importlib.import_module("onnx_convgrad.lowering").load()


def lowerings() -> dict[str, dict[str, Lowering]]:
    """All lowerings: operator -> name -> lowering."""
    load_rules()
    _load_built_in()
    return _LOWERINGS


def lowerings_of(op_type: str) -> Mapping[str, Lowering]:
    """The lowerings of one operator that are declared so far: for modules that derive others from them."""
    return _LOWERINGS[op_type]


def reader_of(op_type: str) -> Reader:
    """How the spec of an operator is read off a node."""
    return _SPECS[op_type]
