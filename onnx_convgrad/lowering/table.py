"""The table of lowerings: how abstract gradient operators are computed with plain ones.

A lowering is a function that emits plain nodes, with requirements; a requirement returns the reason where it does not hold.
`candidates` prices every lowering that applies, and `lower` takes the cheapest.

Third parties add lowerings to the same table, for built-in operators or their own, in a module that is loaded with their
rules (entry-point group `onnx_convgrad.rules`)::

    from onnx_convgrad.lowering.table import lowering, needs

    pointwise = needs(lambda spec: spec.pointwise, "the kernel is not 1x1")

    @lowering("ConvInputGrad", "my_gemm", requires=[pointwise])
    def my_gemm(e, n, spec):  # the first line of its docstring is what `onnx-convgrad rules` prints
        return e.matmul(...)

A lowering states no cost: it is emitted into an empty graph with typical sizes, and its nodes are priced. Another operator
needs a `spec_builder` too. Built-in lowerings are listed in `onnx_convgrad.lowering`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Decorator, F, guarded, load_rules
from onnx_convgrad.base.numbers import positive
from onnx_convgrad.base.run_once import once
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.targets import TargetInfo
from onnx_convgrad.lowering import MODULES

__all__ = [
    "Lowering",
    "Query",
    "Reader",
    "Requirement",
    "Spec",
    "lowering",
    "lowerings",
    "lowerings_of",
    "needs",
    "reader_of",
    "spec_builder",
]


class Spec(Protocol):
    """The sizes and attributes of one node that its lowerings need: frozen, hashable, printed as one line."""

    def hinted(self) -> Self:
        """This node with a typical number for every unknown size, for the cost model."""


@dataclass(frozen=True, slots=True)
class Query:
    """One node to be lowered, as requirements and the cost model see it.

    Attributes:
        typical: `spec` with every unknown size replaced by a typical one.
        training: Whether the graph trains, on a batch that is never empty.
        present: Whether each operand is present, by position.
        constant: Positions of the operands that are known when the model is loaded, for targets that make use of it.
        ends: Whether the result is an output of the graph.
        forward: Whether the model itself computes the result, not one of its derivatives.
    """

    spec: Any
    typical: Any
    dtype: ir.DataType
    target: TargetInfo
    training: bool = False
    present: tuple[bool, ...] = ()
    constant: tuple[int, ...] = ()
    ends: bool = False
    forward: bool = False


Requirement = Callable[[Query], str | None]
"""Returns `None` where it holds, else the reason."""


def needs(holds: Callable[[Any], object], reason: str | Callable[[Any], str]) -> Requirement:
    """A requirement of the spec: `holds(spec)`, else the reason, which may depend on the spec."""

    def requirement(q: Query) -> str | None:
        if holds(q.spec):
            return None
        return reason if isinstance(reason, str) else reason(q.spec)

    return requirement


# Any: each operator has its own spec.
Rounding = float | Callable[[Any], float]
"""Rounding errors as a multiple of those of a direct sum: a number, or a function of the spec."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """One way of computing an abstract operator with plain ones."""

    op_type: str
    name: str
    emit: Callable[[Emitter, Call, Any], ir.Value]
    requires: tuple[Requirement, ...]
    rounding: Rounding
    summary: str

    @property
    def exact(self) -> bool:
        """Whether it rounds no more than a direct sum."""
        return not callable(self.rounding) and self.rounding <= 1

    def rounds(self, spec: Any) -> float:
        """The rounding errors of the lowering, as a multiple of those of a direct sum."""
        return self.rounding(spec) if callable(self.rounding) else self.rounding


@dataclass(frozen=True, slots=True)
class Reader:
    """Builds the spec of an operator from a node; names the property of the spec that holds each operand's shape."""

    build: Callable[[Call], Any]
    operands: tuple[str, ...]


_LOWERINGS: dict[str, dict[str, Lowering]] = {}
_SPECS: dict[str, Reader] = {}


def lowering(op_type: str, name: str, *, requires: Sequence[Requirement] = (), rounding: Rounding = 1.0) -> Decorator:
    """Declare a lowering of an operator: `emit(e, call, spec) -> value`.

    `rounding` says how large its rounding errors are, as a multiple of those of a direct sum: a number, or a function of the
    spec. `candidates.ALLOWED` says which multiples are chosen.

    Raises:
        ArgumentError: `rounding` is neither a positive number nor a function.
    """
    if not callable(rounding):
        positive(rounding, f"The rounding of lowering {name}", zero=False)

    def decorate(function: F) -> F:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        measured = guarded(rounding, f"The rounding of lowering {name}") if callable(rounding) else rounding
        checks = tuple(guarded(check, f"A requirement of lowering {name}") for check in requires)
        entry = Lowering(op_type, name, guarded(function, f"Lowering {name}"), checks, measured, summary)
        _LOWERINGS.setdefault(op_type, {})[name] = entry
        return function

    return decorate


def spec_builder(op_type: str, operands: Sequence[str]) -> Decorator:
    """Declare how the spec of an operator is built from a node.

    `operands` names, for each operand of the operator, the property of the spec that holds its shape.
    """

    def decorate(function: F) -> F:
        _SPECS[op_type] = Reader(function, tuple(operands))
        return function

    return decorate


@once
def _load_built_in() -> None:
    """Import the built-in lowerings, once."""
    for name in MODULES:
        importlib.import_module(f"onnx_convgrad.lowering.{name}")


def lowerings() -> dict[str, dict[str, Lowering]]:
    """All lowerings: operator -> name -> lowering."""
    load_rules()
    _load_built_in()
    return _LOWERINGS


def lowerings_of(op_type: str) -> Mapping[str, Lowering]:
    """The lowerings of one operator declared so far, for modules that derive others from them."""
    return _LOWERINGS[op_type]


def reader_of(op_type: str) -> Reader:
    """The spec builder of an operator."""
    return _SPECS[op_type]
