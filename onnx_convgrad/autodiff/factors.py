"""Factors: the index notation of operators, declared beside their rules.

A factor is an index that runs through axes of operands and results. A declaration says which axes it runs through, and what
the operator does along it:

    Conv        x[n, c, s..]  w[o, c, t..]  b[o]  ->  y[n, o, p..]      n, o: each   c, t: sum   s, p: mix
    Softmax     x[.., a, ..]                      ->  y[.., a, ..]      a: mix ("normalizes along")   others: each
    Slice       x[.., a, ..]                      ->  y[.., a, ..]      a: pick ("takes a part of")   others: each

=======  ==============================================================================================================
each     index i of the results depends on index i of the operands alone
sum      the results are sums over it
mean     the results are means over it
pick     the results repeat, drop or reorder indices, without arithmetic
mix      anything else
unknown  not known while building, such as along which axes a reduction with fed axes sums
=======  ==============================================================================================================

A declaration is a function of the node, `FactorsOf`. This module has those that serve most operators; a rule takes one as
`factors=`. Whatever follows an axis through a graph reads these and names no operator. The idea of propagating factors is
that of sharding rules in Shardy (https://openxla.org/shardy/sharding_propagation).

Many operators work on the same axes of operands with more axes in front. A declaration that knows in which attributes and
operands a node counts its axes also says what these are then, `Ahead`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Dim, Emitter

Axes: TypeAlias = tuple[str, ...]
"""The factor of each axis; an empty name for an axis that has none, such as one of size one that a reduction leaves."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an operator along a factor.

    Attributes:
        kind: One of the kinds in the module's table.
        verb: Completes "it ... axis 1" in messages, as in "normalizes along".
        reason: A clause that takes the place of that sentence, for operators that it does not describe.
        hint: The remedy for whoever must not mix along the factor.
    """

    kind: Literal["each", "sum", "mean", "pick", "mix", "unknown"]
    verb: str = ""
    reason: str = ""
    hint: str = ""


EACH = Work("each")
SUM = Work("sum", "sums over")
MEAN = Work("mean", "averages over")


def mix(verb: str, *, reason: str = "", hint: str = "") -> Work:
    """Work that makes results depend on several indices."""
    return Work("mix", verb, reason, hint)


def pick(verb: str) -> Work:
    """Work that selects or repeats indices."""
    return Work("pick", verb)


Options: TypeAlias = Mapping[str, Any]
"""Attributes and operands by name: numbers for an attribute, a value for an operand."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The form of a node whose operands, and with them all results, have one more axis in front.

    Attributes:
        operands: Positions of the operands that have the axis.
        options: Emits the attributes and operands that count axes, given the size of the new one; the others stay.
        rank: Least rank of the operands before. Those of a lower one get axes of size one behind the new axis.
    """

    operands: Collection[int] = (0,)
    options: Callable[[Emitter, Dim], Options] = lambda *_: {}
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Factors:
    """The index notation of one node.

    Attributes:
        operands: The factors of each operand; `None` for one that holds options or sizes, such as `axes`.
        results: The factors of each result.
        work: Factor -> what the node does along it; `EACH` where a factor is not in it.
        flat: Whether the elements keep their order and only the axes change, as in Reshape. The factors of the axes are
            then parts of products of sizes, and `operands` and `results` have no names.
        unread: Positions of operands whose elements do not matter, only their shape or type.
        broadcasts: Whether operands may have size one, or no axis, along a factor that is longer in others.
        ahead: The node for operands with one more axis in front, if the same operator serves them.
        counts_all: Whether a number in an operand or a result counts through all indices of the first axis, such as an index
            into a whole batch: the same node does not serve a longer first axis.
        sizes: Position of the operand that holds the sizes of the result.
        order: The axis of the operand for each axis of the result, -1 for a new one, where only axes move.
        indices: Factor of picked axes -> the position of the operand that says which indices are picked, and the entry
            along its last axis that counts along this factor, if there are several.
    """

    operands: tuple[Axes | None, ...]
    results: tuple[Axes | None, ...]
    work: Mapping[str, Work] = field(default_factory=dict)
    flat: bool = False
    unread: frozenset[int] = frozenset()
    broadcasts: bool = False
    ahead: Ahead | None = None
    counts_all: bool = False
    sizes: int | None = None
    order: Sequence[int] | None = None
    indices: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)

    def does(self, factor: str) -> Work:
        """The work along a factor."""
        return self.work.get(factor, EACH)

    def __str__(self) -> str:
        """The notation with kinds, as `[n c s0] [o c t0] -> [n o p0]  c: sum`."""

        def side(axes: Axes | None) -> str:
            return "-" if axes is None else f"[{' '.join(name or '1' for name in axes)}]"

        kinds = "".join(f"  {name}: {work.kind}" for name, work in self.work.items())
        return f"{' '.join(map(side, self.operands))} -> {' '.join(map(side, self.results))}{kinds}"


FactorsOf: TypeAlias = Callable[[Call], Factors]


# -- what declarations read --------------------------------------------------------------------------------------------


def rank_of(value: ir.Value | None) -> int:
    """The rank of a value; refuses the node if it is unknown."""
    if value is None or value.shape is None:
        raise UnsupportedCase(f"the rank of {'a missing operand' if value is None else repr(value.name)} is unknown.")
    return len(value.shape)


def numbers(n: Call, name: str) -> list[int]:
    """The entries of an operand that must be known while building."""
    found = constant_of(n.get(name))
    if found is None:
        raise UnsupportedCase(f"its {name} are not known while building.")
    return [int(entry) for entry in np.ravel(found)]


@dataclass(frozen=True, slots=True)
class AxesOf:
    """The axes that a node names.

    Attributes:
        listed: These axes, given the rank of the first operand; they may be negative.
        attribute: The attribute that holds one axis.
        operand: The operand that holds them; a node without it means those of `listed`.
    """

    listed: Callable[[Call, int], Iterable[int]]
    attribute: str = ""
    operand: str = ""

    def __call__(self, n: Call, rank: int) -> Iterable[int]:
        return self.listed(n, rank)

    def ahead(self, n: Call, operands: Collection[int] = (0,), rank: int = 1) -> Ahead | None:
        """The node that names the same axes of operands with one more axis in front; `rank` as in `Ahead`."""
        if self.attribute:
            return Ahead(operands, lambda *_: {self.attribute: behind(*self.listed(n, 1))}, rank)
        if self.operand:
            return Ahead(operands, lambda e, _: self._operand(e, n, max(rank_of(n.inputs[0]), rank)), rank)
        return Ahead(operands, rank=rank) if all(axis < 0 for axis in self.listed(n, 1)) else None

    def _operand(self, e: Emitter, n: Call, rank: int) -> Options:
        value = n.get(self.operand)
        known = constant_of(value)
        if value is not None and known is None:
            if not value.shape or not isinstance(value.shape[0], int) or value.shape[0] == 0:
                raise UnsupportedCase(f"its {self.operand} may be none, which stands for all of them.")
            return {self.operand: e.op("Add", value, e.cast_like(e.compare("GreaterOrEqual", value, 0), value))}
        axes = [behind(axis) for axis in self.listed(n, rank)]
        if not axes:
            return {}
        # operands that hold options have one dtype
        like = next((v.dtype for v in n.inputs[1:2] if v is not None), None)
        shape = [len(axes)] if known is None or known.size != len(axes) else known.shape
        return {self.operand: e.const(np.reshape(axes, shape), like or ir.DataType.INT64)}


def behind(axis: int) -> int:
    """An axis once another one stands in front; a negative number counts from the end."""
    return axis + (axis >= 0)


def attribute(name: str, default: int) -> AxesOf:
    """The axis in an attribute of the node."""
    return AxesOf(lambda n, _: [n.int(name, default)], attribute=name)


def operand(name: str) -> AxesOf:
    """Axes in an operand, by default all of them."""
    return AxesOf(lambda n, rank: range(rank) if n.get(name) is None else numbers(n, name), operand=name)


def fixed(*axes: int) -> AxesOf:
    """Axes that are the same for every node."""
    return AxesOf(lambda *_: axes)


def axes_of(value: ir.Value | None, letter: str = "i") -> Axes:
    """A factor of its own for each axis of a value: `i0`, `i1` ..."""
    return tuple(f"{letter}{axis}" for axis in range(rank_of(value)))


def _unread(n: Call, axes: Axes) -> list[Axes | None]:
    return [axes, *[None] * (len(n.inputs) - 1)]


# -- declarations ------------------------------------------------------------------------------------------------------


def none(reason: str) -> FactorsOf:
    """No factors, for a reason that completes "it has no index notation: "."""

    def declared(_: Call) -> Factors:
        raise UnsupportedCase(f"it is not known whether it mixes the samples of a batch: {reason}.", hint=_LOOP)

    declared.reason = reason  # type: ignore[attr-defined]
    return declared


_LOOP = "Loop over the samples with the ordinary gradient and a batch of one."


def every_axis(n: Call) -> Factors:
    """Elementwise: all operands broadcast, and each element of a result depends on its own place alone."""
    own = [None if v is None else axes_of(v) for v in n.inputs]
    names = max((side for side in own if side is not None), key=len, default=())
    axes = tuple(None if side is None else names[len(names) - len(side) :] for side in own)
    ahead = Ahead([position for position, side in enumerate(axes) if side is not None])
    return Factors(axes, tuple(names for _ in n.node.outputs), broadcasts=True, ahead=ahead)


def first_operand(n: Call) -> Factors:
    """Elementwise in the first operand; the others are options."""
    names = axes_of(n.inputs[0])
    return Factors(tuple(_unread(n, names)), tuple(names for _ in n.node.outputs), ahead=Ahead())


def like_first(n: Call) -> Factors:
    """Elementwise in the first operand; of the others the type or the shape matters alone."""
    return replace(first_operand(n), unread=frozenset(range(1, len(n.inputs))))


def shape_alone(n: Call) -> Factors:
    """Results that no element of an operand changes."""
    return Factors((None,) * len(n.inputs), (None,) * len(n.node.outputs), unread=frozenset(range(len(n.inputs))))


Reading: TypeAlias = Callable[[Call, int], Iterable[int]]
"""The axes that a node works along, given the rank of its first operand."""


def along(axes: Reading, work: Work, counted: AxesOf | None = None) -> FactorsOf:
    """The operator works along some axes of its first operand, and all its results have these axes.

    `counted` are the axes that the node names, if it works along some of them only.
    """
    counted = axes if counted is None and isinstance(axes, AxesOf) else counted

    def declared(n: Call) -> Factors:
        whole = first_operand(n)
        names = whole.operands[0] or ()
        ahead = None if counted is None else counted.ahead(n)
        return replace(whole, work=_work(n, axes, names, work), ahead=ahead)

    return declared


def _work(n: Call, axes: Reading, names: Sequence[str], work: Work) -> dict[str, Work]:
    """The work along each of the axes; unknown for all where the axes are."""
    try:
        return {names[axis]: work for axis in normalized(axes(n, len(names)), len(names))}
    except UnsupportedCase as case:
        return dict.fromkeys(names, Work("unknown", reason=case.message.rstrip(".")))


def normalized(axes: Iterable[int], rank: int) -> list[int]:
    """Axes counted from the start; a number has one axis for operators that take it for a vector."""
    return [axis % rank for axis in axes] if rank else []


def reduced(axes: Reading, work: Work) -> FactorsOf:
    """The axes disappear, or stay with size one by `keepdims`."""

    def declared(n: Call) -> Factors:
        names = axes_of(n.inputs[0])
        over = _work(n, axes, names, work)
        kept = bool(n.int("keepdims", 1))
        left = tuple("" if name in over else name for name in names if kept or name not in over)
        ahead = axes.ahead(n) if isinstance(axes, AxesOf) else None
        return Factors(tuple(_unread(n, names)), (left,), over, ahead=ahead)

    return declared


def _reduction_axes(n: Call, rank: int) -> Iterable[int]:
    given = [] if n.get("axes") is None else numbers(n, "axes")
    return given or ([] if n.int("noop_with_empty_axes", 0) else range(rank))


REDUCTION_AXES = AxesOf(_reduction_axes, operand="axes")
"""The operand `axes` of a reduction: if it is absent or empty, all axes or, by `noop_with_empty_axes`, none."""


def moved(perm: Callable[[Call, int], Sequence[int]]) -> FactorsOf:
    """Axis i of the result is axis `perm[i]` of the operand; -1 stands for a new axis of size one.

    Axes that are not in it have size one, and go.
    """

    def declared(n: Call) -> Factors:
        names = axes_of(n.inputs[0])
        order = perm(n, len(names))
        results = (tuple("" if axis < 0 else names[axis] for axis in order),)
        return Factors(tuple(_unread(n, names)), results, order=order)

    return declared


def having(factors: FactorsOf, **attributes: Any) -> FactorsOf:
    """Set attributes of the `Factors` that a declaration gives; an attribute may be a function of the node."""

    def declared(n: Call) -> Factors:
        return replace(factors(n), **{name: own(n) if callable(own) else own for name, own in attributes.items()})

    return declared


def flat(_: Call) -> Factors:
    """The elements stay in row-major order, and the axes change."""
    return Factors((), (), flat=True)


def notation(text: str, *, broadcasts: bool = False, **work: Work) -> FactorsOf:
    """The notation as text, one factor per axis: `notation("n c *s, o c *t, o -> n o *p", c=SUM, s=mix(...))`.

    `*s` stands for any number of axes; `work` names them all by that letter. An operand `-` holds options, and operands
    behind those in the text do, too. `1` is an axis of size one.
    """
    left, right = text.split("->")
    terms, outs = ([term.split() for term in side.split(",")] for side in (left, right))

    def declared(n: Call) -> Factors:
        stars = 0
        for value, term in zip(n.inputs, terms, strict=False):
            if value is not None and any(part.startswith("*") for part in term):
                stars = rank_of(value) - len(term) + 1
                break
        operands = [
            None if v is None or term == ["-"] else _spelled(term, rank_of(v) - len(term) + 1)
            for v, term in zip(n.inputs, terms, strict=False)
        ]
        operands += [None] * (len(n.inputs) - len(operands))
        results = [
            _spelled(term, (stars if "*" in "".join(term) else 1) if v.shape is None else len(v.shape) - len(term) + 1)
            for v, term in zip(n.node.outputs, outs, strict=False)
        ]
        missing: list[Axes | None] = [None] * (len(n.node.outputs) - len(results))
        used = {name for axes in (*operands, *results) for name in axes or () if name}
        done = {name: work[name.rstrip("0123456789")] for name in used if name.rstrip("0123456789") in work}
        return Factors(tuple(operands), (*results, *missing), done, broadcasts=broadcasts)

    return declared


def _spelled(term: Sequence[str], stars: int) -> Axes:
    """The factors of a term whose star stands for so many axes."""
    starred = any(part.startswith("*") for part in term)
    if stars < 0 or (not starred and stars != 1):
        raise UnsupportedCase(f"a value has rank {len(term) - 1 + stars}, where its notation is [{' '.join(term)}].")
    names: list[str] = []
    for part in term:
        names += [f"{part[1:]}{i}" for i in range(stars)] if part.startswith("*") else ["" if part == "1" else part]
    return tuple(names)
