"""The rule table, and the decorators that add rules to it, for the built-in rules and for third parties.

Declare a rule with the weakest decorator that fits the operator:

====================  ================================================================================================
`zero`                the derivative is zero almost everywhere, or the results are not floating (Floor, Shape, Greater)
`not_differentiable`  the operator has no derivative, for a reason that the error message gives
`linear`              jointly linear in the `wrt` operands (Reshape, Concat, AveragePool)
`elementwise`         broadcasting, with one local derivative per operand (Sigmoid, Mul, Where)
`multilinear`         linear in each `wrt` operand separately (MatMul, Einsum)
`vjp`                 any other operator with a reverse rule
`expansion`           an equivalent subgraph, which the walk differentiates
====================  ================================================================================================

An operator is named `"Op"` or `"domain::Op"`. A rule is called as `rule(e, n, g)`:

- `e`, the `Emitter`, adds nodes to the graph: `e.mul(a, b)`, `e.op("Cos", x)`.
- `n`, the `Call`, gives the node's operands by the names of the ONNX schema, `n["X"]`, its results, `n.y`, and its
  attributes, `n.float("alpha", 1.0)`. `ir.call.declare_signature` names those of an operator without a schema.
- `g` maps the name of each result to its cotangent, `None` where there is none. Elementwise rules and expansions take no
  `g`.

It returns a mapping from operand name to a thunk, which is called only if that cotangent is wanted and returns a value of
the operand's shape and dtype, or `None` for zero. A variadic operand has one thunk, which takes the position. The thunk of
an elementwise rule returns the local derivative, as a value or a number. A rule of one operand, `wrt="X"` in place of
`wrt=["X"]`, is itself that thunk. The walk accumulates cotangents and sums over broadcast axes. To refuse a case, call
`errors.require(condition, "its mode is not supported.")`::

    @elementwise("my.domain::Swish", wrt="X")
    def swish(e: Emitter, n: Call) -> ir.Value:
        \"\"\"y = x s with s = sigmoid x: dy/dx = s + y (1 - s).\"\"\"
        s = e.op("Sigmoid", n["X"])
        return e.add(s, e.mul(n.y, e.sub(1, s)))

A package registers its rules by an entry point of the group `onnx_convgrad.rules` that names the module with the rules;
the environment variable `ONNX_CONVGRAD_PLUGINS=0` leaves them out.
Every decorator takes `wrt`, the operands with a derivative, `parameters`, those of them that are weights, `factors`, the
index notation of the operator (see `autodiff.factors`; elementwise operators need none), and `note`, a remark for the tables
of the command line. A rule may have a second form, `joint=(producer, function)`: `function(e, n, inner, varied) -> result`
gives an equivalent of the node and of `inner`, the producer of its first operand, or `None` where it does not apply. Reverse
mode differentiates the equivalent if nothing else uses the value between the two nodes, which the gradient then does not
need; `varied` holds the values that are differentiated.

Facts that the notation does not say have a default that is safe; bounds and other analyses use them:

- `moves`: the results hold numbers of the operands `wrt` as they are. `"reshapes"`: each once, in their order;
  `"permutes"`: each once; `"selects"`: some, perhaps several times; `"fills"`: some, and zeros.
- `within`: each number of the results is between the least and the greatest of the operands `wrt` (`"operands"`), or of
  these and zero (`"zero"`). Movers need no such declaration.
- `nonnegative=True`: the results are sums of the operands `wrt` with weights that are not negative.
- `affine`: groups of operands in which the results are jointly affine while the others are fixed, as `("X B", "W B")` of a
  convolution. Linear and multilinear rules, and sums, need no such declaration.
- `monotone`: `"rising"` or `"falling"` in all operands `wrt`, or a mapping from operands.
- `curve`: of a rising function of one operand. `"convex"`: its derivative rises; `"sigmoid"`: its derivative rises up to
  some place, and falls behind it.
- `bounds`: the least and the greatest number that the results can have, whatever the operands are.
- `keeps_zero`: a result is zero where the numbers of an operand that it depends on are: `True` for all operands `wrt`, or
  their names. Linear rules and movers need no such declaration.
- `poles`: operand -> the numbers at which the operator or its derivative is infinite.

Each may also be a function of the node.

An abstract operator names those whose derivatives it computes, `of=("MaxPool",)`; the command `rules` lists its lowerings
with them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import FactorsOf, every_axis, first_operand, like_first, shape_alone
from onnx_convgrad.base.run_once import once
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ConvGradError, RuleContractError
from onnx_convgrad.ir.call import Call, stem

Kind = Literal["zero", "not_differentiable", "linear", "elementwise", "multilinear", "vjp", "expansion"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Decorator(Protocol):
    """A decorator that returns the function unchanged."""

    def __call__(self, function: F, /) -> F: ...


Cotangents: TypeAlias = Mapping[str, Callable[..., Any]]
"""Operand name -> thunk; `name.i` for one operand of a variadic one."""


Monotone: TypeAlias = str | Mapping[str, str] | Callable[[Call], str | Mapping[str, str]]
"""`"rising"`, `"falling"` or `""`: of all operands or of each, of every node of an operator or as a function of the node."""


Poles: TypeAlias = Mapping[str, Collection[float]]
"""Operand -> the numbers at which the operator or its derivative is infinite."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The derivative of one operator: its kind, its function, and what that needs to know."""

    op_type: str
    domain: str
    kind: Kind
    function: Callable[..., Any] | None
    wrt: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    broadcasts: bool = False
    reverse: Callable[..., Any] | None = None
    forward: Callable[..., Any] | None = None
    labels: Callable[..., Any] | None = None
    joint: tuple[str, Callable[..., Any]] | None = None
    reason: str = ""
    note: str = ""
    factors: FactorsOf | None = None
    moves: Literal["", "reshapes", "permutes", "selects", "fills"] = ""
    within: str | Callable[[Call], str] = ""
    nonnegative: bool = False
    affine: Sequence[str] | Callable[[Call], Sequence[str]] = ()
    monotone: Monotone = ""
    curve: str | Callable[[Call], str] = ""
    bounds: tuple[float, float] | None = None
    keeps_zero: bool | Collection[str] | Callable[[Call], Collection[str]] = False
    poles: Poles | Callable[[Call], Poles] = field(default_factory=dict)
    of: tuple[str, ...] = ()
    module: str = ""

    @property
    def name(self) -> str:
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    @property
    def unnoted(self) -> str:
        """The reason why the operator has no factors; empty if it has."""
        return str(getattr(self.factors, "reason", ""))

    @property
    def is_elementwise(self) -> bool:
        """Whether each number of the results depends on its own place in the operands alone."""
        return self.factors in (every_axis, first_operand, like_first)

    @property
    def is_of_shape(self) -> bool:
        """Whether no number of an operand matters, only shapes and types."""
        return self.factors is shape_alone

    def direction(self, call: Call, operand: str) -> str:
        """`"rising"` or `"falling"` in an operand of a node, else `""`."""
        if stem(operand) not in self.wrt:
            return ""
        if self.nonnegative or (self.moves and self.kind == "linear"):
            return "rising"
        monotone = self.monotone(call) if callable(self.monotone) else self.monotone
        return monotone if isinstance(monotone, str) else monotone.get(stem(operand), "")

    def is_affine_in(self, call: Call, operands: Collection[str]) -> bool:
        """Whether the results of a node are jointly affine in some of its operands while the others are fixed."""
        names = {stem(name) for name in operands}
        if self.kind == "linear" or self.nonnegative:
            return names <= {*self.wrt}
        if self.kind == "multilinear":
            return len(operands) == 1 and names <= {*self.wrt}
        return any(names <= {*group.split()} for group in self.groups(call))

    def groups(self, call: Call) -> Sequence[str]:
        """The groups of operands, see `affine`, in which the results of a node are declared jointly affine."""
        return _of(self.affine, call)

    def hull(self, call: Call) -> str:
        """`"operands"` or `"zero"`: what the results of a node are between, see `within`; else `""`."""
        if self.moves:
            return "zero" if self.moves == "fills" else "operands"
        return _of(self.within, call)

    def is_zero_with(self, call: Call, operand: str) -> bool:
        """Whether a result of a node is zero where the numbers of an operand that it depends on are."""
        names = self.keeps_zero(call) if callable(self.keeps_zero) else self.keeps_zero
        if isinstance(names, bool):
            return stem(operand) in self.wrt and (names or self.kind == "linear" or bool(self.moves))
        return stem(operand) in names

    def poles_in(self, call: Call, operand: str) -> Collection[float]:
        """The numbers of an operand at which a node or its derivative is infinite."""
        return _of(self.poles, call).get(stem(operand), ())

    def curve_of(self, call: Call) -> str:
        """`"convex"` or `"sigmoid"`, the form of a function of one operand; else `""`."""
        return _of(self.curve, call)


def _of(fact: T | Callable[[Call], T], call: Call) -> T:
    """A fact of a node."""
    return fact(call) if callable(fact) else fact


def is_built_in(rule: Rule) -> bool:
    """Whether a rule belongs to this package."""
    return not rule.module or _is_ours(rule.module)


def _is_ours(module: str) -> bool:
    return module.startswith("onnx_convgrad.")


_RULES: dict[tuple[str, str], Rule] = {}


def _declare(kind: Kind, op_types: Sequence[str], wrt: str | Sequence[str], fields: dict[str, Any]) -> Decorator:
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    fields = {**fields, "wrt": names, "parameters": tuple(fields.get("parameters", ()))}

    def decorate(function: F) -> F:
        rule = _of_operand(function, wrt) if isinstance(wrt, str) and kind != "expansion" else function
        for op in op_types:
            _add(op, kind, rule, fields)
        return function

    return decorate


def _of_operand(function: Callable[..., Any], operand: str) -> Callable[..., Cotangents]:
    """The rule of one operand, whose cotangent a function returns."""

    @functools.wraps(function)
    def rule(*args: Any) -> Cotangents:
        return {operand: functools.partial(function, *args)}

    return rule


def _key(op: str) -> tuple[str, str]:
    domain, _, op_type = op.rpartition("::")
    return domain, op_type


def _add(op: str, kind: Kind, function: Callable[..., Any] | None, fields: Mapping[str, Any]) -> None:
    domain, op_type = key = _key(op)
    if key in _RULES:
        raise RuleContractError(
            f"Two rules are declared for {op}.", hint=f"Remove one; the other is in {_RULES[key].module}."
        )
    module = getattr(function, "__module__", "") if function else ""
    function = function and guarded(function, f"The rule of {op}", thunks=kind != "expansion")
    fields = {"factors": every_axis if kind == "elementwise" else None, **fields}
    forms = {way: guarded(fields[way], f"The {what} of {op}") for way, what in _FORMS.items() if fields.get(way)}
    _RULES[key] = Rule(op_type, domain, kind, function, module=module, **{**fields, **forms})


_FORMS = {
    "factors": "index notation",
    "reverse": "reverse form of the rule",
    "forward": "forward form of the rule",
    "labels": "labels of samples",
}
"""Fields with further functions of a rule, and what messages call them."""


def guarded(function: F, what: str, *, thunks: bool = False) -> F:
    """The function of a plugin, whose errors name it, and those of the thunks that it returns; a built-in one as it is.

    `what` says what the function is, at the beginning of a sentence.
    """
    module = getattr(function, "__module__", None) or "an unknown module"
    if _is_ours(module):
        return function

    def failed(problem: Exception) -> RuleContractError:
        return RuleContractError(
            f"{what} in {module} failed{_place(problem, module)}: {type(problem).__name__}: {problem}.",
            hint=f"Report it to the authors of {module}. {_SWITCH}=0 in the environment leaves out all plugins.",
        )

    def attempt(call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except ConvGradError:
            raise
        except Exception as problem:
            raise failed(problem) from problem

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        result = attempt(function, *args)
        if not thunks:
            return result
        if not isinstance(result, Mapping):
            raise failed(TypeError(f"it returned {result!r}, not a mapping from operands to functions"))
        return {name: functools.partial(attempt, thunk) for name, thunk in result.items()}

    return cast(F, call)


def _place(problem: Exception, module: str) -> str:
    """The last line of a module that ran before an exception, as a part of a sentence."""
    frames = traceback.walk_tb(problem.__traceback__)
    lines = [
        f" at {frame.f_code.co_filename}:{line}" for frame, line in frames if frame.f_globals.get("__name__") == module
    ]
    return lines[-1] if lines else ""


_SWITCH = "ONNX_CONVGRAD_PLUGINS"


def zero(*op_types: str, **fields: Any) -> None:
    """Declare operators with derivative zero almost everywhere, or without floating results."""
    for op in op_types:
        _add(op, "zero", None, fields)


def not_differentiable(*op_types: str, reason: str) -> None:
    """Declare operators without a derivative; `reason` completes the error message."""
    for op in op_types:
        _add(op, "not_differentiable", None, {"reason": reason})


def linear(*op_types: str, wrt: str | Sequence[str], **fields: Any) -> Decorator:
    """Declare a reverse rule for operators jointly linear in `wrt`: forward mode applies the operator to the tangents.

    With `broadcasts=True` the operands broadcast, and the walk sums over the broadcast axes.
    """
    return _declare("linear", op_types, wrt, fields)


def elementwise(*op_types: str, wrt: str | Sequence[str] = ("X",), **fields: Any) -> Decorator:
    """Declare local derivatives of a broadcasting operator: `rule(e, n) -> {operand: thunk}`."""
    return _declare("elementwise", op_types, wrt, fields)


def multilinear(*op_types: str, wrt: str | Sequence[str], **fields: Any) -> Decorator:
    """Declare a reverse rule for operators linear in each operand of `wrt`: forward mode sums over these operands."""
    return _declare("multilinear", op_types, wrt, fields)


def vjp(*op_types: str, wrt: str | Sequence[str], **fields: Any) -> Decorator:
    """Declare a general reverse rule."""
    return _declare("vjp", op_types, wrt, fields)


def expansion(*op_types: str, wrt: str | Sequence[str], **fields: Any) -> Decorator:
    """Declare an expansion `rule(e, n) -> results`, which computes the same results with operators that have rules.

    Where there is a direct form, `reverse(e, n, cotangents, wanted)` gives pairs of an operand and a contribution to its
    cotangent, `forward(e, n, tangents)` pairs of a result and its tangent, and `labels(tracker, n, labels)` the place of the
    samples in each result; `None` stands for the expansion.
    """
    return _declare("expansion", op_types, wrt, fields)


Functions: TypeAlias = dict[tuple[str, str], Callable[..., Any]]

_PER_SAMPLE: Functions = {}
_BATCHED: Functions = {}


def per_sample(*op_types: str) -> Decorator:
    """Declare the gradients per sample for the operands that depend on no sample, such as parameters.

    `rule(e, n, g, batch)` returns thunks by operand, like an ordinary rule; each gives `[N, *shape]` in row-major order.
    `batch.of(value)` gives the axis of the samples. Elementwise operators need no such rule.
    """
    return _beside(_PER_SAMPLE, op_types, "rule per sample", thunks=True)


def batched(*op_types: str) -> Decorator:
    """Declare a form for many examples at once that does not follow from the factors, such as a weight for each example.

    `rule(b, n)` returns the results with the axis of the examples in front, from operands `b[n["X"]]`; see
    `autodiff.batching`. It leaves operands that it does not cover by `require_rule`.
    """
    return _beside(_BATCHED, op_types, "rule for examples")


def _beside(table: Functions, op_types: Sequence[str], what: str, *, thunks: bool = False) -> Decorator:
    """Add a further function of the operators to a table."""

    def decorate(function: F) -> F:
        table.update((_key(op), guarded(function, f"The {what} of {op}", thunks=thunks)) for op in op_types)
        return function

    return decorate


@once
def load_rules() -> None:
    """Import the built-in rules and those of the entry-point group `onnx_convgrad.rules`, once.

    The environment variable `ONNX_CONVGRAD_PLUGINS=0` leaves out the entry points.
    """
    importlib.import_module("onnx_convgrad.rules").load()
    if os.environ.get(_SWITCH) == "0":
        return
    for entry in importlib.metadata.entry_points(group="onnx_convgrad.rules"):
        try:
            entry.load()
        except (Exception, SystemExit) as problem:  # noqa: BLE001 - a broken plugin must not take the package down
            package = f" of package {entry.dist.name}" if entry.dist is not None else ""
            reason = f"{problem}" or type(problem).__name__
            warn(f"The rules of {entry.value}{package} could not be loaded: {reason}", RuntimeWarning)


def lookup(domain: str, op_type: str) -> Rule | None:
    """The rule of an operator, or `None`."""
    return _found(_RULES, domain, op_type)


def per_sample_rule(domain: str, op_type: str) -> Callable[..., Cotangents] | None:
    """The rule declared with `per_sample`, or `None`."""
    return _found(_PER_SAMPLE, domain, op_type)


def batched_rule(domain: str, op_type: str) -> Callable[..., Sequence[ir.Value]] | None:
    """The rule declared with `batched`, or `None`."""
    return _found(_BATCHED, domain, op_type)


def _found(table: Mapping[tuple[str, str], T], domain: str, op_type: str) -> T | None:
    load_rules()
    return table.get(("" if domain == "ai.onnx" else domain, op_type))


def rules() -> Iterator[Rule]:
    """All rules, sorted by domain and operator."""
    load_rules()
    yield from (_RULES[key] for key in sorted(_RULES))
