"""Test the declared factors and facts of an operator by numbers: perturb its operands, and see what the results do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
Evaluate = Callable[[Arrays], Arrays]


@dataclass(frozen=True, slots=True)
class Notation:
    """The factors of the one node of a model, by the names of its values.

    Attributes:
        stored: The numbers in the model.
        rule: The rule with the other facts.
        call: The node.
        own: Operand of the node that carries a derivative -> its fed value.
    """

    factors: Factors
    operands: Mapping[str, Axes]
    results: Mapping[str, Axes]
    stored: Sequence[np.ndarray] = ()
    rule: Rule | None = None
    call: Call | None = None
    own: Mapping[str, str] = field(default_factory=dict)

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
    floats = {
        name: v.name for name, v in zip(call.names[0], call.inputs, strict=False) if v is not None and floating(v)
    }
    own = {name: v for name, v in floats.items() if v and v in fed and stem(name) in rule.wrt}
    return Notation(factors, inputs, results, stored, rule, call, own)


def _axes(values: Sequence[ir.Value | None], sides: Sequence[Axes | None]) -> dict[str, Axes]:
    pairs = zip(values, sides, strict=False)
    return {v.name: axes for v, axes in pairs if v is not None and v.name and axes is not None}


def check_notation(notation: Notation, run: Evaluate, feed: Arrays) -> None:
    """Assert that results depend on the indices of each factor as declared.

    `each`: other indices of the results keep their bits if one index of all operands changes. `sum` and `mean`: the operator
    is additive over parts of the indices. `pick`: the results have no number that the operands lack, except zero. Operators
    with random results are left alone.
    """
    before = run(feed)
    again = run(feed)
    if any(not np.array_equal(before[v], again[v], equal_nan=_floating(before[v])) for v in before):
        return
    if notation.rule is not None and notation.call is not None:
        _check_facts(notation, notation.rule, notation.call, run, feed, before)
    for factor in sorted(notation.names()):
        kind = notation.factors.does(factor).kind
        if kind == "each":
            _check_each(notation, run, feed, before, factor)
        elif kind in ("sum", "mean"):
            _check_additive(notation, run, feed, before, factor)
        elif kind == "pick":
            picked = {name: before[name] for name, axes in notation.results.items() if factor in axes}
            _check_origin(notation, feed, picked, f"along the factor {factor} ")


def _check_each(notation: Notation, run: Evaluate, feed: Arrays, before: Arrays, factor: str) -> None:
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


def _check_additive(notation: Notation, run: Evaluate, feed: Arrays, before: Arrays, factor: str) -> None:
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
            assert error <= limit, f"{result} is not a sum over the factor {factor} of {name}: {error:.1e}"


def _check_facts(notation: Notation, rule: Rule, call: Call, run: Evaluate, feed: Arrays, before: Arrays) -> None:
    own = {name: feed[v] for name, v in notation.own.items()}
    filled = all(array.size for array in own.values())
    results = [name for name, value in before.items() if name in notation.results and _floating(value)]
    if rule.moves:
        _check_origin(notation, feed, before, "", zero=rule.moves == "fills" or not filled)
    if rule.moves in ("reshapes", "permutes") and own:
        old, new = np.ravel(next(iter(own.values()))), np.ravel(next(iter(before.values())))
        old, new = (np.sort(old), np.sort(new)) if rule.moves == "permutes" else (old, new)
        assert np.array_equal(old, new, equal_nan=True), f"the result is not the operand that it {rule.moves}"
    low, high = rule.bounds or (-np.inf, np.inf)
    if (hull := rule.hull(call)) and own and filled:
        numbers = _numbers(notation, own, zero=hull == "zero")
        low, high = np.nanmin(numbers), np.nanmax(numbers)
    for name in results:
        value, slack = before[name][np.isfinite(before[name])], _slack(before[name])
        assert value.min(initial=np.inf) >= low - slack, f"{name} has numbers below {low}"
        assert value.max(initial=-np.inf) <= high + slack, f"{name} has numbers above {high}"

    def moved(steps: Mapping[str, np.ndarray]) -> Arrays:
        return run({**feed, **{v: np.asarray(feed[v] + step, feed[v].dtype) for v, step in steps.items()}})

    draw = np.random.default_rng(3)
    steps = {v: draw.uniform(0, 1, feed[v].shape) for v in notation.own.values()}
    for group in (group for size in (1, 2, 3) for group in combinations(own, size) if rule.is_affine_in(call, group)):
        mine = {notation.own[name]: steps[notation.own[name]] for name in group}
        once, twice = moved(mine), moved({v: 2 * step for v, step in mine.items()})
        for name in results:
            off = _change(before[name], once[name]) - _change(once[name], twice[name])
            worst = float(np.abs(off).max(initial=0))
            assert worst <= 20 * _slack(twice[name]), f"{name} is not affine in {', '.join(group)}: {worst:.1e}"
    signs = {"rising": 1, "falling": -1}
    directions = {v: d for name, v in notation.own.items() if (d := rule.direction(call, name))}
    risen = moved({v: signs[d] * steps[v] for v, d in directions.items()})
    for name in results:
        fallen = _change(before[name], risen[name]).min(initial=0)
        assert fallen >= -_slack(risen[name]), f"{name} falls by {-fallen:.1e}, against {directions}"
    _check_zeros(notation, rule, call, run, feed, before)
    if (curve := rule.curve_of(call)) and own:
        _check_curve(notation.own[next(iter(own))], curve, run, feed)


def _check_zeros(notation: Notation, rule: Rule, call: Call, run: Evaluate, feed: Arrays, before: Arrays) -> None:
    """Check what the results are where an operand is zero, and that poles are some."""
    for name, v in notation.own.items():
        zero = run({**feed, v: np.zeros_like(feed[v])}) if rule.keeps_zero and rule.is_zero_with(call, name) else {}
        for result, value in zero.items():
            depends = not np.array_equal(value, before[result], equal_nan=_floating(value))  # not a mask
            assert not (depends and np.nan_to_num(value).any()), f"{result} is not zero where {name} is"
        poles = rule.poles_in(call, name) if len(feed) == 1 or not callable(rule.poles) else ()
        for pole in poles:  # a fed exponent decides whether there is one
            _check_pole(v, pole, run, feed)


def _check_pole(name: str, pole: float, run: Evaluate, feed: Arrays) -> None:
    """Take a step away from a pole, on the side where the operator is defined, and see how far the results go."""
    if feed[name].dtype not in (np.float32, np.float64) or not feed[name].size:
        return
    size = 1e-4
    there, *beside = (run({**feed, name: np.full_like(feed[name], pole + step)}) for step in (0, size, -size))
    changes = [np.abs(after[v].astype(np.float64) - value) for after in beside for v, value in there.items()]
    steep = any((change[~np.isnan(change)] > 50 * size).any() for change in changes)
    assert steep or not all(np.isfinite(value).all() for value in there.values()), (
        f"it has no pole where {name} is {pole}"
    )


def _change(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The finite changes of numbers."""
    change = after.astype(np.float64) - before.astype(np.float64)
    return np.where(np.isfinite(change), change, 0)


def _check_curve(name: str, curve: str, run: Evaluate, feed: Arrays) -> None:
    """Draw the function of one operand, and see to which side it bends."""
    places = np.linspace(-5, 5, 41).astype(feed[name].dtype)
    runs = [run({**feed, name: np.full_like(feed[name], place)}) for place in places]
    drawn = np.concatenate([next(iter(found.values())).reshape(-1)[:1] for found in runs])
    bends = np.diff(drawn.astype(np.float64), 2)
    signs = np.sign(bends[np.abs(bends) > 2 * _slack(drawn)])
    assert (np.diff(signs) <= 0).all(), f"the function bends up behind a place where it bends down, and is not {curve}"
    assert curve == "sigmoid" or (signs > 0).all(), f"the function bends down, and is not {curve}"


def _slack(array: np.ndarray) -> float:
    """The rounding errors that numbers of an array may have."""
    return float(10 * np.finfo(array.dtype).eps * max(1.0, float(np.max(np.abs(array[np.isfinite(array)]), initial=0))))


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
