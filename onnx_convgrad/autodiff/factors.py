"""Factors: the index notation of operators, declared beside their rules.

A factor is an index that runs through axes of operands and results. A declaration says which axes it runs through, and what
the operator does along it:

    Conv        x[n, c, s..]  w[o, c, t..]  b[o]  ->  y[n, o, p..]      n, o: each   c, t: sum   s, p: mix
    Softmax     x[.., a, ..]                      ->  y[.., a, ..]      a: mix ("normalizes along")   others: each
    Slice       x[.., a, ..]                      ->  y[.., a, ..]      a: pick ("takes a part of")   others: each

====  =================================================================================================================
each  index i of the results depends on index i of the operands alone
sum   the results are sums over it
mean  the results are means over it
pick  the results repeat, drop or reorder indices, without arithmetic
mix   anything else
====  =================================================================================================================

A declaration is a function of the node, `FactorsOf`. This module has those that serve most operators; a rule takes one as
`factors=`. Whatever follows an axis through a graph reads these and names no operator. The idea of propagating factors is
that of sharding rules in Shardy (https://openxla.org/shardy/sharding_propagation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of

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

    kind: Literal["each", "sum", "mean", "pick", "mix"]
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
        aligned: Whether each element depends on its own place alone, with axes counted from the last, and no option counts
            axes: the same node serves operands with more axes in front.
        counts_all: Whether a number in an operand or a result counts through all indices of the first axis, such as an index
            into a whole batch: the same node does not serve a longer first axis.
        indices: Factor of picked axes -> the position of the operand that says which indices are picked, and the entry
            along its last axis that counts along this factor, if there are several.
    """

    operands: tuple[Axes | None, ...]
    results: tuple[Axes | None, ...]
    work: Mapping[str, Work] = field(default_factory=dict)
    flat: bool = False
    unread: frozenset[int] = frozenset()
    broadcasts: bool = False
    aligned: bool = False
    counts_all: bool = False
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
        raise UnsupportedCase(f"its {name} are not known while building, so they may include that of the samples.")
    return [int(entry) for entry in np.ravel(found)]


AxesOf: TypeAlias = Callable[[Call, int], Iterable[int]]
"""The axes that a node works along, given the rank of its first operand; they may be negative."""


def attribute(name: str, default: int) -> AxesOf:
    """The axis in an attribute of the node."""
    return lambda n, _: [n.int(name, default)]


def operand(name: str, default: Sequence[int] | None = None) -> AxesOf:
    """The axes in an operand of the node; if that is absent, those of `default`, or all."""

    def axes(n: Call, rank: int) -> Iterable[int]:
        if n.get(name) is None:
            return range(rank) if default is None else default
        return numbers(n, name)

    return axes


def fixed(*axes: int) -> AxesOf:
    """Axes that are the same for every node."""
    return lambda *_: axes


def _names(rank: int) -> list[str]:
    return [f"i{axis}" for axis in range(rank)]


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
    ranks = [None if v is None else rank_of(v) for v in n.inputs]
    most = max((rank for rank in ranks if rank is not None), default=0)
    names = tuple(_names(most))
    axes = tuple(None if rank is None else names[most - rank :] for rank in ranks)
    return Factors(axes, tuple(names for _ in n.node.outputs), broadcasts=True, aligned=True)


def first_operand(n: Call) -> Factors:
    """Elementwise in the first operand; the others are options."""
    names = tuple(_names(rank_of(n.inputs[0])))
    return Factors(tuple(_unread(n, names)), tuple(names for _ in n.node.outputs), aligned=True)


def like_first(n: Call) -> Factors:
    """Elementwise in the first operand; of the others the type or the shape matters alone."""
    return replace(first_operand(n), unread=frozenset(range(1, len(n.inputs))))


def shape_alone(n: Call) -> Factors:
    """Results that no element of an operand changes."""
    return Factors((None,) * len(n.inputs), (None,) * len(n.node.outputs), unread=frozenset(range(len(n.inputs))))


def along(axes: AxesOf, work: Work) -> FactorsOf:
    """The operator works along some axes of its first operand, and all its results have these axes."""

    def declared(n: Call) -> Factors:
        whole = first_operand(n)
        names = whole.operands[0] or ()
        over = {names[axis]: work for axis in normalized(axes(n, len(names)), len(names))}
        return replace(whole, work=over, aligned=False)

    return declared


def normalized(axes: Iterable[int], rank: int) -> list[int]:
    """Axes counted from the start; a number has one axis for operators that take it for a vector."""
    return [axis % rank for axis in axes] if rank else []


def reduced(axes: AxesOf, work: Work) -> FactorsOf:
    """The axes disappear, or stay with size one by `keepdims`."""

    def declared(n: Call) -> Factors:
        names = _names(rank_of(n.inputs[0]))
        over = set(normalized(axes(n, len(names)), len(names)))
        kept = bool(n.int("keepdims", 1))
        left = tuple("" if axis in over else name for axis, name in enumerate(names) if kept or axis not in over)
        return Factors(tuple(_unread(n, tuple(names))), (left,), {names[axis]: work for axis in over})

    return declared


def reduction_axes(n: Call, rank: int) -> Iterable[int]:
    """The operand `axes` of a reduction: if it is absent or empty, all axes or, by `noop_with_empty_axes`, none."""
    given = [] if n.get("axes") is None else numbers(n, "axes")
    return given or ([] if n.int("noop_with_empty_axes", 0) else range(rank))


def moved(perm: Callable[[Call, int], Sequence[int]]) -> FactorsOf:
    """Axis i of the result is axis `perm[i]` of the operand; -1 stands for a new axis of size one."""

    def declared(n: Call) -> Factors:
        names = tuple(_names(rank_of(n.inputs[0])))
        order = perm(n, len(names))
        return Factors(tuple(_unread(n, names)), (tuple("" if axis < 0 else names[axis] for axis in order),))

    return declared


def counting(factors: FactorsOf, when: Callable[[Call], bool] = lambda _: True) -> FactorsOf:
    """The factors of an operator that counts through the whole first axis, in some of its nodes."""
    return lambda n: replace(factors(n), counts_all=when(n))


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
