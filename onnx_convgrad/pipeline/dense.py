"""Whole Jacobians and Hessians: a loop inside the file over the directions of a basis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import Activity
from onnx_convgrad.autodiff.forward import forward
from onnx_convgrad.autodiff.per_sample.sample_axis import Samples
from onnx_convgrad.autodiff.per_sample.tracker import Tracker
from onnx_convgrad.autodiff.per_sample.walk import backward_per_sample, data_inputs
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, DifferentiationError, first_few
from onnx_convgrad.frontend.selection import resolve_of, resolve_wrt
from onnx_convgrad.ir.constants import mark_varying
from onnx_convgrad.ir.emit import Dim, Emitter, known
from onnx_convgrad.ir.loop_bodies import Layout, Slices, emit_loop, placeholder
from onnx_convgrad.pipeline.options import Names

MODES = ("auto", "reverse", "forward")

Pairs = dict[tuple[ir.Value, ir.Value], ir.Value]
"""Value of `of` and value of `wrt` -> derivative."""


def write_jacobian(
    e: Emitter, of: Names | None, wrt: Names, mode: str, *, per_sample: bool, pattern: Pattern | None = None
) -> Mapping[str, ir.Value]:
    """Emit the Jacobian of each value of `of` with respect to each source; see `onnx_convgrad.jacobian`."""
    sources, targets = resolve_wrt(e.graph, wrt), resolve_of(e.graph, of)
    mark_varying(e.graph, sources)
    basis = Basis(e, per_sample=per_sample)
    data = data_inputs(e.graph, sources) if per_sample else []
    if pattern is not None:
        mode = basis.color(sources, targets, pattern, mode)
    if mode == "auto":
        mode = "forward" if basis.total(targets) > basis.total(sources) else "reverse"
    if per_sample:
        _check_samples(e, data, sources, targets, [*targets, *(sources if mode == "forward" else [])])
    found: Pairs = {}
    if mode == "forward":
        for x in sources:
            found |= {(y, x): d for y, d in basis.pushed(x, targets).items()}
    else:
        for y in targets:
            found |= {(y, x): d for x, d in basis.pulled(y, sources, data).items()}
    pairs = [(y, x) for y in targets for x in sources]
    return _results(basis, pairs, found, "jacobian")


def write_hessian(e: Emitter, of: str, wrt: Names, *, per_sample: bool) -> Mapping[str, ir.Value]:
    """Emit the second derivatives of a scalar by each pair of sources; see `onnx_convgrad.hessian`."""
    sources, targets = resolve_wrt(e.graph, wrt), resolve_of(e.graph, of)
    for y in targets:
        sizes = list(y.shape or ())[1 if per_sample else 0 :]
        if len(targets) > 1 or any(known(d) not in (1, None) for d in sizes):
            one = "one number per sample" if per_sample else "one number"
            raise ArgumentError(
                f"hessian needs {one}, but `of` is {first_few([repr(v.name) for v in targets])} of shape {y.shape}.",
                hint="Name a scalar, or use jacobian.",
            )
    mark_varying(e.graph, sources)
    if per_sample:
        _check_samples(e, data_inputs(e.graph, sources), sources, targets, sources)
    gradients = backward(e, {y: e.full_like(y, 1) for y in targets}, dict.fromkeys(sources))
    basis, found = Basis(e, per_sample=per_sample), dict[tuple[ir.Value, ir.Value], ir.Value]()
    for x in sources:
        pushed = basis.pushed(x, list(dict.fromkeys(gradients.values())))
        found |= {(a, x): pushed[g] for a, g in gradients.items() if g in pushed}
    return _results(basis, [(a, x) for a in sources for x in sources], found, "hessian")


def _check_samples(
    e: Emitter,
    data: Sequence[ir.Value],
    sources: Sequence[ir.Value],
    targets: Sequence[ir.Value],
    rows: Sequence[ir.Value],
) -> None:
    """Refuse nodes that mix samples, and those of `rows` without one row per sample."""
    tracker = Tracker(e, list(data), Activity.between(sources, targets, e.order).varied)
    tracker.follow(dict.fromkeys(targets))
    if tracker.problems:
        raise DifferentiationError(tracker.problems)
    for value in rows:
        label = tracker[value]
        if label != Samples(0):
            where = " in front" if isinstance(label, Samples) else ""
            raise ArgumentError(
                f"{value.name!r} has no axis of samples{where}.",
                hint="Use per_sample=True for values whose first axis is the batch, or leave it out.",
            )


def _results(basis: Basis, pairs: Sequence[tuple[ir.Value, ir.Value]], found: Pairs, kind: str) -> dict[str, ir.Value]:
    """The derivatives of all pairs by name; zeros, and a warning, for those without."""
    missing = [f"{y.name!r} by {x.name!r}" for y, x in pairs if (y, x) not in found]
    if missing:
        warn(f"The {kind} is zero: {first_few(missing)}.")
    return {f"{y.name}_{x.name}_{kind}": found[y, x] if (y, x) in found else basis.zeros(y, x) for y, x in pairs}


class Basis:
    """Loops over the unit vectors of a value; with `per_sample`, over those of one sample, at once for all samples."""

    def __init__(self, e: Emitter, *, per_sample: bool) -> None:
        self.e, self.skipped = e, int(per_sample)
        self.colors: np.ndarray | None = None
        self.entries: np.ndarray | None = None

    def total(self, values: Sequence[ir.Value]) -> int:
        """The number of unit vectors of several values, as far as it is known."""
        return sum(math.prod(known(d) or 1 for d in list(v.shape or ())[self.skipped :]) for v in values)

    def own(self, value: ir.Value) -> list[Dim]:
        """The sizes of a value, without that of the samples."""
        return self.e.dims(value)[self.skipped :]

    def batch(self, value: ir.Value) -> list[Dim]:
        """The number of samples, if there are any."""
        return self.e.dims(value)[: self.skipped]

    def pulled(self, y: ir.Value, sources: Sequence[ir.Value], data: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
        """The rows of a Jacobian by reverse mode: source -> `[*y.shape, *x.shape]`, or `[N, ...]`."""
        e, wanted = self.e, dict.fromkeys(sources)
        numbers, start, turn = self._begin(y)
        cotangents = {y: self._unit(y, turn)}
        pulled = (
            backward_per_sample(e, cotangents, wanted, data).gradients
            if self.skipped
            else backward(e, cotangents, wanted)
        )
        rows = list(pulled.items())
        _, joined = emit_loop(e, start, [], {turn: Slices(numbers)}, [(g, Layout(self.skipped)) for _, g in rows])
        own = {x: self.own(x) if e.rank(g) == e.rank(x) else e.dims(x) for x, g in rows}  # parameters have no samples
        return {
            x: self._entries(whole, y) or e.reshape(whole, [*self.batch(y), *self.own(y), *own[x]])
            for (x, _), whole in zip(rows, joined, strict=True)
        }

    def pushed(self, x: ir.Value, targets: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
        """The columns of a Jacobian by forward mode: value of `of` -> `[*y.shape, *x.shape]`, or `[N, ...]`."""
        e = self.e
        numbers, start, turn = self._begin(x)
        columns = list(forward(e, {x: self._unit(x, turn)}, targets).items())
        last = [(t, Layout(e.rank(y))) for y, t in columns]
        _, joined = emit_loop(e, start, [], {turn: Slices(numbers)}, last) if columns else ([], [])
        return {
            y: self._entries(whole, y) or e.reshape(whole, [*e.dims(y), *self.own(x)])
            for (y, _), whole in zip(columns, joined, strict=True)
        }

    def color(self, sources: Sequence[ir.Value], targets: Sequence[ir.Value], pattern: Pattern, mode: str) -> str:
        """Compute several columns, or rows, of a sparse Jacobian at once; returns the mode that takes fewer directions."""
        if len(sources) != 1 or len(targets) != 1:
            raise ArgumentError(
                f"sparsity is for one value of `of` and one of `wrt`, not {len(targets)} and {len(sources)}."
            )
        for value, size, axis in ((targets[0], pattern.shape[0], "rows"), (sources[0], pattern.shape[1], "columns")):
            numbers = [known(d) for d in list(value.shape or (None,))[self.skipped :]]
            count = math.prod(n or 0 for n in numbers)
            if None in numbers or count != size:
                raise ArgumentError(
                    f"sparsity has {size} {axis}, but {value.name!r} of shape {value.shape} "
                    f"{'is of unknown size' if None in numbers else f'has {count} numbers'}.",
                    hint="It has a row for each number of `of` and a column for each number of `wrt`"
                    + (" of one sample." if self.skipped else ". Sizes are given as in input_shapes."),
                )
        ways = {"forward": pattern, "reverse": pattern.turned()}
        colors = {way: turned.colors() for way, turned in ways.items() if mode in ("auto", way)}
        mode = min(colors, key=lambda way: colors[way].max(initial=0))
        self.colors = own = colors[mode]
        if mode == "forward":
            self.entries = pattern.rows * (int(own.max(initial=0)) + 1) + own[pattern.columns]
        else:
            self.entries = own[pattern.rows] * pattern.shape[1] + pattern.columns
        return mode

    def _entries(self, whole: ir.Value, y: ir.Value) -> ir.Value | None:
        """The entries of a sparse Jacobian, from the products with all directions: `[entries]`, or `[N, entries]`."""
        if self.entries is None:
            return None
        flat = self.e.reshape(whole, [*self.batch(y), -1])
        return self.e.op("Gather", flat, self.e.const(self.entries), axis=self.skipped)

    def zeros(self, y: ir.Value, x: ir.Value) -> ir.Value:
        e = self.e
        if self.entries is not None:
            return e.op("Expand", e.scalar(0, y), e.vector([*self.batch(y), self.entries.size]))
        own = self.own(x) if x.is_graph_input() else e.dims(x)
        return e.op("Expand", e.scalar(0, y), e.vector([*e.dims(y), *own]))

    def _begin(self, value: ir.Value) -> tuple[ir.Value, int, ir.Value]:
        """The numbers of the unit vectors, where the body begins, and the body's own number."""
        count = self.e.size_mul(1, *self.own(value)) if self.colors is None else int(self.colors.max(initial=0)) + 1
        numbers = self.e.arange(count)
        return numbers, len(self.e.emitted), placeholder(self.e, numbers, ir.Shape([]))

    def _unit(self, value: ir.Value, number: ir.Value) -> ir.Value:
        """The unit vector of this number, or the sum of those of this color, of the shape of `value`."""
        e, own = self.e, self.own(value)
        places = e.arange(e.size_mul(1, *own)) if self.colors is None else e.const(self.colors)
        places = e.reshape(places, [*([1] * self.skipped), *own])
        unit = e.mask(e.compare("Equal", places, number), value)
        return e.typed(e.expand(unit, value), value)


# -- sparse Jacobians --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pattern:
    """The places where a Jacobian may differ from zero.

    Columns without a common row add up to one direction: the product with it has the numbers of all of them. Finding few
    directions is a coloring (Curtis, Powell, Reid, "On the estimation of sparse Jacobian matrices", 1974); here a greedy
    one, by decreasing number of neighbors (Gebremedhin, Manne, Pothen, "What color is your Jacobian?", 2005).

    Attributes:
        rows, columns: int64 `[entries]`, sorted by row, then by column.
        shape: Sizes of the value of `of` and of the source.
    """

    rows: np.ndarray
    columns: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def of(cls, pattern: Any) -> Self:
        """The pattern of a matrix: an array, or a sparse one of SciPy with its stored entries."""
        sparse = pattern.tocoo() if hasattr(pattern, "tocoo") else None
        matrix = np.asarray(pattern if sparse is None else sparse.data)
        shape = matrix.shape if sparse is None else tuple(sparse.shape)
        if len(shape) != 2 or matrix.dtype.kind not in "biuf":
            raise ArgumentError(
                "sparsity takes a matrix of numbers or booleans, or a sparse matrix of SciPy, not "
                f"{type(pattern).__name__}{'' if len(shape) == 2 else f' of shape {shape}'}.",
                hint="It has a row for each number of `of` and a column for each number of `wrt`.",
            )
        places = np.nonzero(matrix) if sparse is None else (sparse.row, sparse.col)
        flat = np.unique(places[0].astype(np.int64) * shape[1] + places[1])
        return cls(flat // max(shape[1], 1), flat % max(shape[1], 1), (int(shape[0]), int(shape[1])))

    def turned(self) -> Pattern:
        """The transpose, with its entries in the order of this one."""
        return Pattern(self.columns, self.rows, self.shape[::-1])

    def colors(self) -> np.ndarray:
        """A color for each column, int64: no two columns of one color have a common row."""
        members = _grouped(self.rows, self.columns, self.shape[0])
        rows = _grouped(self.columns, self.rows, self.shape[1])
        near = [np.unique(np.concatenate([members[i] for i in own])) if own.size else own for own in rows]
        colors = np.full(self.shape[1], -1, np.int64)
        for column in sorted(range(self.shape[1]), key=lambda j: -near[j].size):
            taken = set(colors[near[column]].tolist())
            colors[column] = next(c for c in range(len(taken) + 1) if c not in taken)
        return colors


def _grouped(keys: np.ndarray, values: np.ndarray, count: int) -> list[np.ndarray]:
    """The values of each key from 0 up to `count`."""
    order = np.argsort(keys, kind="stable")
    return np.split(values[order], np.searchsorted(keys[order], np.arange(1, count))) if count else []
