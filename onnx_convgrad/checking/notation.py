"""Test the declared factors and facts of an operator by numbers: perturb its operands, and see what the results do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating, rule_of
from onnx_convgrad.autodiff.factors import Axes, Factors
from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.ir.call import Call, stem

Arrays = Mapping[str, np.ndarray]
Run = Callable[[Arrays], Arrays]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rule of the one node of a model says of it, by the names of its values; see `autodiff.registry`.

    Attributes:
        own: The fed operands that carry a derivative; the first operand of the node comes first, if it is one.
        affine: Groups of fed operands in which the results are jointly affine.
        directions: Fed operand -> `"rising"` or `"falling"`.
        curve: The form of a function of one operand.
    """

    moves: str
    hull: str
    bounds: tuple[float, float] | None
    own: Sequence[str]
    affine: Sequence[Collection[str]]
    directions: Mapping[str, str]
    curve: str

    @classmethod
    def of(cls, call: Call, rule: Rule, fed: Collection[str | None]) -> Facts:
        """The facts of a node."""
        pairs = zip(call.names[0], call.inputs, strict=False)
        own = {
            name: v.name
            for name, v in pairs
            if v is not None and v.name and v.name in fed and floating(v) and (stem(name) in rule.wrt or not rule.wrt)
        }
        groups = [g for size in (1, 2, 3) for g in combinations(own, size) if rule.is_affine_in(call, g)]
        directions = {v: d for name, v in own.items() if (d := rule.direction(call, name))}
        affine = [[own[name] for name in group] for group in groups]
        return cls(
            rule.moves, rule.hull(call), rule.bounds, list(own.values()), affine, directions, rule.curve_of(call)
        )


@dataclass(frozen=True, slots=True)
class Notation:
    """The factors of the one node of a model, by the names of its values.

    Attributes:
        stored: The numbers in the model.
        facts: The other facts of the node.
    """

    factors: Factors
    operands: Mapping[str, Axes]
    results: Mapping[str, Axes]
    stored: Sequence[np.ndarray] = ()
    facts: Facts | None = None

    def names(self) -> set[str]:
        """All factors."""
        return {name for axes in (*self.operands.values(), *self.results.values()) for name in axes if name}

    def size(self, factor: str, arrays: Arrays) -> int:
        """The number of indices of a factor in the operands; 1 where they have no axis with it."""
        sizes = [arrays[v].shape[axes.index(factor)] for v, axes in self.operands.items() if factor in axes]
        return max(sizes, default=1)


def notation_of(model: onnx.ModelProto) -> Notation | None:
    """The declared factors of a model of one operator; `None` where it has none, or other nodes in its canonical form."""
    graph = canonicalize(ir.from_proto(model)).graph
    nodes = list(graph)
    rule = rule_of(nodes[0]) if len(nodes) == 1 else None
    if rule is None or rule.factors is None:
        return None
    call = Call(nodes[0])
    try:
        factors = rule.factors(call)
    except UnsupportedCase:
        return None
    fed = {v.name for v in graph.inputs}
    operands = _axes(nodes[0].inputs, factors.operands)
    stored = [v.const_value.numpy() for v in graph.initializers.values() if v.const_value is not None]
    inputs = {v: axes for v, axes in operands.items() if v in fed}
    results = _axes(nodes[0].outputs, factors.results)
    return Notation(factors, inputs, results, stored, Facts.of(call, rule, fed))


def _axes(values: Sequence[ir.Value | None], sides: Sequence[Axes | None]) -> dict[str, Axes]:
    pairs = zip(values, sides, strict=False)
    return {v.name: axes for v, axes in pairs if v is not None and v.name and axes is not None}


def check_notation(notation: Notation, run: Run, feed: Arrays) -> None:
    """Assert that results depend on the indices of each factor as declared.

    `each`: other indices of the results keep their bits if one index of all operands changes. `sum` and `mean`: the operator
    is additive over parts of the indices. `pick`: the results have no number that the operands lack, except zero. Operators
    with random results are left alone.
    """
    before = run(feed)
    again = run(feed)
    if any(not np.array_equal(before[v], again[v], equal_nan=_floating(before[v])) for v in before):
        return
    if notation.facts is not None:
        _check_facts(notation, notation.facts, run, feed, before)
    for factor in sorted(notation.names()):
        kind = notation.factors.does(factor).kind
        if kind == "each":
            _check_each(notation, run, feed, before, factor)
        elif kind in ("sum", "mean"):
            _check_additive(notation, run, feed, before, factor)
        elif kind == "pick":
            _check_picked(notation, feed, before, factor)


def _check_each(notation: Notation, run: Run, feed: Arrays, before: Arrays, factor: str) -> None:
    size = notation.size(factor, feed)
    for index in range(size if size > 1 else 0):
        after = run(_changed(notation, feed, factor, size, index))
        for name, axes in notation.results.items():
            old, new = before[name], after[name]
            if factor in axes and index < old.shape[axes.index(factor)]:
                old, new = (np.delete(array, index, axes.index(factor)) for array in (old, new))
            assert np.array_equal(old, new, equal_nan=_floating(old)), (
                f"index {index} of the factor {factor} changes other indices of {name}; declared: {notation.factors}"
            )


def _changed(notation: Notation, feed: Arrays, factor: str, size: int, index: int) -> dict[str, np.ndarray]:
    """The operands with other numbers at one index of a factor."""
    changed = dict(feed)
    for name, axes in notation.operands.items():
        array = feed[name]
        if array.dtype.kind not in "fb" or factor not in axes or array.shape[axes.index(factor)] != size:
            continue  # an axis of size one that is stretched does not run along the factor
        where: list[int | slice] = [slice(None)] * array.ndim
        where[axes.index(factor)] = index
        changed[name] = array.copy()
        old = array[tuple(where)]
        changed[name][tuple(where)] = (
            ~old if old.dtype.kind == "b" else old * old.dtype.type(0.75) + old.dtype.type(0.125)
        )
    return changed


def _check_additive(notation: Notation, run: Run, feed: Arrays, before: Arrays, factor: str) -> None:
    for name, axes in notation.operands.items():
        array = feed[name]
        if factor not in axes or not _floating(array) or array.shape[axes.index(factor)] < 2:
            continue
        where: list[slice] = [slice(None)] * array.ndim
        where[axes.index(factor)] = slice(None, None, 2)
        some = np.zeros_like(array)
        some[tuple(where)] = array[tuple(where)]
        parts = [run({**feed, name: part}) for part in (some, array - some, np.zeros_like(array))]
        for result, value in before.items():
            first, second, none = (part[result].astype(np.float64) for part in parts)
            scale = max(float(np.abs(value.astype(np.float64)).max(initial=0)), 1.0)
            error = float(np.abs(first + second - none - value.astype(np.float64)).max(initial=0)) / scale
            limit = 100 * np.finfo(array.dtype).eps
            assert error <= limit, f"{result} is no sum over the factor {factor} of {name}: {error:.1e}"


def _check_facts(notation: Notation, facts: Facts, run: Run, feed: Arrays, before: Arrays) -> None:
    own = {name: feed[name] for name in facts.own}
    whole = {name: value for name, value in before.items() if name in notation.results and _floating(value)}
    if all(array.size for array in own.values()):
        if facts.moves:
            _check_origin(notation, feed, before, "", zero=facts.moves == "fills")
        if facts.moves in ("reshapes", "permutes") and own:
            _check_each_once(facts, own[facts.own[0]], next(iter(before.values())))
        for name, value in whole.items():
            _check_bounds(notation, facts, own, name, value[np.isfinite(value)])
    for operands in facts.affine:
        _check_affine(notation, operands, run, feed, before)
    if facts.directions:
        _check_direction(notation, facts.directions, run, feed, before)
    if facts.curve and own:
        _check_curve(facts, run, feed)


def _check_bounds(notation: Notation, facts: Facts, own: Arrays, name: str, value: np.ndarray) -> None:
    low, high = facts.bounds or (-np.inf, np.inf)
    if facts.hull and own:
        numbers = _numbers(notation, own, zero=facts.hull == "zero")
        low, high = np.nanmin(numbers), np.nanmax(numbers)
    least, most, slack = value.min(initial=np.inf), value.max(initial=-np.inf), _slack(value)
    assert low - slack <= least, f"{name} has {least}, which is below {low}"
    assert high + slack >= most, f"{name} has {most}, which is above {high}"


def _check_each_once(facts: Facts, operand: np.ndarray, result: np.ndarray) -> None:
    old, new = np.ravel(operand), np.ravel(result)
    if facts.moves == "permutes":
        old, new = np.sort(old), np.sort(new)
    assert np.array_equal(old, new, equal_nan=_floating(old)), f"the result is not the operand that it {facts.moves}"


def _check_affine(notation: Notation, operands: Collection[str], run: Run, feed: Arrays, before: Arrays) -> None:
    """Go one step and two steps away: the changes are the same."""
    draw = np.random.default_rng(4)
    steps = {name: draw.uniform(0, 1, feed[name].shape) for name in operands}
    once, twice = (
        run({**feed, **{name: np.asarray(feed[name] + k * step, feed[name].dtype) for name, step in steps.items()}})
        for k in (1, 2)
    )
    for name, value in before.items():
        if name in notation.results and _floating(value):
            wide = [array.astype(np.float64) for array in (value, once[name], twice[name])]
            error = wide[0] - 2 * wide[1] + wide[2]
            worst = float(np.abs(error[np.isfinite(error)]).max(initial=0))
            assert worst <= 20 * _slack(twice[name]), f"{name} is not affine in {', '.join(operands)}: {worst:.1e}"


def _check_direction(notation: Notation, directions: Mapping[str, str], run: Run, feed: Arrays, before: Arrays) -> None:
    """Move the operands by random amounts in the direction in which the results rise, twice."""
    draw = np.random.default_rng(3)
    for _ in range(2):
        raised = dict(feed)
        for name, direction in directions.items():
            amount = draw.uniform(0, 1, feed[name].shape)
            raised[name] = np.asarray(feed[name] + (amount if direction == "rising" else -amount), feed[name].dtype)
        for name, after in run(raised).items():
            if name in notation.results and _floating(after):
                change = after.astype(np.float64) - before[name].astype(np.float64)
                fallen = change[np.isfinite(change)].min(initial=0)
                assert fallen >= -_slack(after), f"{name} falls by {-fallen:.1e}, against {dict(directions)}"


def _check_curve(facts: Facts, run: Run, feed: Arrays) -> None:
    """Draw the function of one operand, and see to which side it bends."""
    name = facts.own[0]
    places = np.linspace(-5, 5, 41).astype(feed[name].dtype)
    drawn = [
        next(iter(run({**feed, name: np.full_like(feed[name], place)}).values())).reshape(-1)[:1] for place in places
    ]
    bends = np.diff(np.concatenate(drawn).astype(np.float64), 2)
    clear = bends[np.abs(bends) > 2 * _slack(np.concatenate(drawn))]
    last = len(clear) if facts.curve == "convex" else int(np.argmax(clear < 0)) if (clear < 0).any() else len(clear)
    assert (clear[:last] > 0).all(), f"the function is not {facts.curve}"
    assert (clear[last:] < 0).all(), f"the function is not {facts.curve}"


def _slack(array: np.ndarray) -> float:
    """The rounding errors that numbers of an array may have."""
    return float(10 * np.finfo(array.dtype).eps * max(1.0, float(np.nanmax(np.abs(array), initial=0))))


def _check_picked(notation: Notation, feed: Arrays, before: Arrays, factor: str) -> None:
    names = [name for name, axes in notation.results.items() if factor in axes]
    _check_origin(notation, feed, {name: before[name] for name in names}, f"along the factor {factor} ")


def _numbers(notation: Notation, feed: Arrays, *, zero: bool) -> np.ndarray:
    """All numbers of the operands, and zero if it counts."""
    numbers = (a for a in (*feed.values(), *notation.stored, np.zeros(int(zero))) if a.dtype.kind in "fiub")
    return np.concatenate([np.ravel(array).astype(np.float64) for array in numbers])


def _check_origin(notation: Notation, feed: Arrays, results: Arrays, where: str, *, zero: bool = True) -> None:
    """Check that the results have no numbers but those of the operands, and zero if it counts."""
    there = _numbers(notation, feed, zero=zero)
    for name, value in results.items():
        if _floating(value):
            lost = ~np.isin(value.astype(np.float64), there) & ~np.isnan(value)
            assert not lost.any(), f"{name} has numbers {where}that no operand has"


def _floating(array: np.ndarray) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating))
