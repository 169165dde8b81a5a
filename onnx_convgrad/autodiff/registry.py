"""The rule table: how an operator is differentiated, declared with the weakest decorator that fits.

==================  ==================================================================================================
`zero`              the derivative is zero almost everywhere, or the outputs are not floating (Floor, Shape, Greater)
`not_differentiable`  there is no derivative to give, with the reason
`linear`            jointly linear in the `wrt` operands (Reshape, Concat, AveragePool)
`elementwise`       broadcasting, one local derivative per operand (Sigmoid, Mul, Where)
`multilinear`       linear in each `wrt` operand separately (MatMul, Einsum)
`vjp`               anything else
`expansion`         the operator is rewritten with others, and the walk goes through those
==================  ==================================================================================================

A rule is called as `rule(e, n, g)`: `e` is the `Emitter`, `n` a `Call` (the node with its operands by their ONNX schema
names), `g` the cotangents of its outputs by output name (`None` where nothing flows). It returns a mapping from operand
name to a thunk, which is called only if that cotangent is wanted. Elementwise rules take no `g` and return local
derivatives; a thunk may then also give a number. The walk sums over broadcast axes and accumulates: rules never do.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from onnx_convgrad.base.run_once import once
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import RuleContractError

__all__ = [
    "Cotangents",
    "Joint",
    "Kind",
    "Rule",
    "elementwise",
    "expansion",
    "joint",
    "joint_of",
    "linear",
    "load_rules",
    "lookup",
    "multilinear",
    "not_differentiable",
    "per_sample",
    "rules",
    "vjp",
    "zero",
]


Kind = Literal["zero", "not_differentiable", "linear", "elementwise", "multilinear", "vjp", "expansion"]

F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol):
    """A decorator that returns the function as it is."""

    def __call__(self, function: F, /) -> F: ...


Thunk: TypeAlias = Callable[..., Any]
Cotangents: TypeAlias = Mapping[str, Thunk]
"""Operand name -> thunk. For a variadic operand the name is `name.i`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator is differentiated."""

    op_type: str
    domain: str
    kind: Kind
    function: Callable[..., Any] | None
    wrt: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    broadcasts: bool = False
    reason: str = ""
    note: str = ""
    module: str = ""

    @property
    def name(self) -> str:
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type


_RULES: dict[tuple[str, str], Rule] = {}


def _declare(kind: Kind, op_types: Sequence[str], **fields: Any) -> Decorator:
    def decorate(function: F) -> F:
        for op in op_types:
            _add(op, kind, function, fields)
        return function

    return decorate


def _add(op: str, kind: Kind, function: Callable[..., Any] | None, fields: Mapping[str, Any]) -> None:
    domain, _, op_type = op.rpartition("::")
    if (domain, op_type) in _RULES:
        raise RuleContractError(f"Two rules are declared for {op}.", hint=f"See {_RULES[domain, op_type].module}.")
    module = getattr(function, "__module__", "") if function else ""
    _RULES[domain, op_type] = Rule(op_type, domain, kind, function, module=module, **fields)


def zero(*op_types: str) -> None:
    """Declare operators whose derivative is zero almost everywhere, or whose results are not floating."""
    for op in op_types:
        _add(op, "zero", None, {})


def not_differentiable(*op_types: str, reason: str) -> None:
    """Declare operators that have no derivative to give; `reason` completes the error message."""
    for op in op_types:
        _add(op, "not_differentiable", None, {"reason": reason})


def linear(*op_types: str, wrt: Sequence[str], parameters: Sequence[str] = (), **fields: Any) -> Decorator:
    """Declare a rule for operators jointly linear in the operands `wrt`: forward mode applies the operator itself.

    With `broadcasts=True` the operands broadcast and the walk sums over those axes.
    """
    return _declare("linear", op_types, wrt=tuple(wrt), parameters=tuple(parameters), **fields)


def elementwise(
    *op_types: str, wrt: Sequence[str] = ("X",), parameters: Sequence[str] = (), **fields: Any
) -> Decorator:
    """Declare local derivatives of a broadcasting operator: `rule(e, n) -> {operand: thunk}`."""
    return _declare("elementwise", op_types, wrt=tuple(wrt), parameters=tuple(parameters), **fields)


def multilinear(*op_types: str, wrt: Sequence[str], parameters: Sequence[str] = (), **fields: Any) -> Decorator:
    """Declare a rule for operators linear in each operand of `wrt`: forward mode sums over them."""
    return _declare("multilinear", op_types, wrt=tuple(wrt), parameters=tuple(parameters), **fields)


def vjp(*op_types: str, wrt: Sequence[str], parameters: Sequence[str] = (), **fields: Any) -> Decorator:
    """Declare a general reverse rule."""
    return _declare("vjp", op_types, wrt=tuple(wrt), parameters=tuple(parameters), **fields)


def expansion(*op_types: str, wrt: Sequence[str], parameters: Sequence[str] = (), **fields: Any) -> Decorator:
    """Declare `rule(e, n) -> results` that computes the same results with operators that have rules."""
    return _declare("expansion", op_types, wrt=tuple(wrt), parameters=tuple(parameters), **fields)


@dataclass(frozen=True, slots=True)
class Joint:
    """How an operator and the producer of one of its operands are differentiated as one."""

    operand: str
    producer: str
    function: Callable[..., Any]


_JOINT: dict[tuple[str, str], Joint] = {}


def joint(op_type: str, *, operand: str, producer: str) -> Decorator:
    """Declare `rule(e, n, inner, varied) -> result`: what `n` and `inner`, the producer of its operand, compute together.

    Reverse mode then passes through both at once, if nothing else reads the value between, which is not needed any more.
    `varied` holds the values that a derivative flows to; for cases that gain nothing the rule returns `None`.
    """

    def decorate(function: F) -> F:
        _JOINT["", op_type] = Joint(operand, producer, function)
        return function

    return decorate


def joint_of(domain: str, op_type: str) -> Joint | None:
    """The joint rule of an operator, if any."""
    load_rules()
    return _JOINT.get((domain, op_type))


_PER_SAMPLE: dict[tuple[str, str], Callable[..., Cotangents]] = {}


def per_sample(*op_types: str) -> Decorator:
    """Declare how the gradients for an operator's parameters are kept apart by sample.

    `rule(e, n, g, batch)` returns, like an ordinary rule, thunks by operand: each gives `[N, *shape]` in row-major order.
    `batch` tells where a value holds the samples. Only operands that depend on no sample are asked for; elementwise
    operators need no such rule.
    """

    def decorate(function: F) -> F:
        for op in op_types:
            domain, _, op_type = op.rpartition("::")
            _PER_SAMPLE[domain, op_type] = function
        return function

    return decorate


def per_sample_rule(domain: str, op_type: str) -> Callable[..., Cotangents] | None:
    """The rule declared with `per_sample`, if any."""
    load_rules()
    return _PER_SAMPLE.get(("" if domain == "ai.onnx" else domain, op_type))


@once
def load_rules() -> None:
    """Import the built-in rules and those of installed packages (entry-point group `onnx_convgrad.rules`), once."""
    importlib.import_module("onnx_convgrad.rules").load()
    for entry in importlib.metadata.entry_points(group="onnx_convgrad.rules"):
        try:
            entry.load()
        except Exception as problem:  # noqa: BLE001 - a broken plugin must not take the package down
            warn(f"The rules of {entry.value} could not be loaded: {problem}", RuntimeWarning)


def lookup(domain: str, op_type: str) -> Rule | None:
    """The rule of an operator, if any."""
    load_rules()
    return _RULES.get(("" if domain == "ai.onnx" else domain, op_type))


def rules() -> Iterator[Rule]:
    """All rules, sorted by domain and operator."""
    load_rules()
    yield from (_RULES[key] for key in sorted(_RULES))
