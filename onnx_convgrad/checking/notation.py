"""Test the declared factors and facts of an operator by numbers: perturb its operands, and see what the results do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import carriers, rule_of
from onnx_convgrad.autodiff.factors import Axes, Factors
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.ir.call import Call

Arrays = Mapping[str, np.ndarray]
Evaluate = Callable[[Arrays], Arrays]


@dataclass(frozen=True, slots=True)
class Notation:
    """The factors of the one node of a model, by the names of its values.

    Attributes:
        stored: The numbers in the model.
        moves: Whether the results have no numbers but those of the operands, and zero.
        direction: `"rising"` or `"falling"` in the operands of `monotone`, or `""`.
        monotone: Names of operands.
    """

    factors: Factors
    operands: Mapping[str, Axes]
    results: Mapping[str, Axes]
    stored: Sequence[np.ndarray] = ()
    moves: bool = False
    direction: str = ""
    monotone: Collection[str] = ()

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
    monotone = {v.name for _, v in carriers(nodes[0], rule) if v.name and v.name in fed}
    results = _axes(nodes[0].outputs, factors.results)
    return Notation(factors, inputs, results, stored, rule.moves, rule.direction(call), monotone)


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
    if notation.moves:
        _check_origin(notation, feed, before, "")
    if notation.direction:
        _check_direction(notation, run, feed, before)
    for factor in sorted(notation.names()):
        kind = notation.factors.does(factor).kind
        if kind == "each":
            _check_each(notation, run, feed, before, factor)
        elif kind in ("sum", "mean"):
            _check_additive(notation, run, feed, before, factor)
        elif kind == "pick":
            _check_picked(notation, feed, before, factor)


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


def _check_direction(notation: Notation, run: Evaluate, feed: Arrays, before: Arrays) -> None:
    """Raise the operands by random amounts, twice."""
    draw, sign = np.random.default_rng(3), 1 if notation.direction == "rising" else -1
    for _ in range(2):
        raised = {
            name: np.asarray(array + draw.uniform(0, 1, array.shape), array.dtype)
            if name in notation.monotone and _floating(array)
            else array
            for name, array in feed.items()
        }
        for name, after in run(raised).items():
            if name in notation.results and _floating(after):
                change = sign * (after.astype(np.float64) - before[name].astype(np.float64))
                slack = 10 * np.finfo(after.dtype).eps * max(1.0, float(np.nanmax(np.abs(after), initial=0)))
                fallen = change[np.isfinite(change)].min(initial=0)
                assert fallen >= -slack, f"{name} is not {notation.direction}: it changes by {fallen:.1e}"


def _check_picked(notation: Notation, feed: Arrays, before: Arrays, factor: str) -> None:
    names = [name for name, axes in notation.results.items() if factor in axes]
    _check_origin(notation, feed, {name: before[name] for name in names}, f"along the factor {factor} ")


def _check_origin(notation: Notation, feed: Arrays, results: Arrays, where: str) -> None:
    """Check that the results have no numbers but those of the operands, and zero."""
    numbers = (array for array in (*feed.values(), *notation.stored, np.zeros(1)) if array.dtype.kind in "fiub")
    there = np.concatenate([np.ravel(array).astype(np.float64) for array in numbers])
    for name, value in results.items():
        if _floating(value):
            lost = ~np.isin(value.astype(np.float64), there) & ~np.isnan(value)
            assert not lost.any(), f"{name} has numbers {where}that no operand has"


def _floating(array: np.ndarray) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating))
