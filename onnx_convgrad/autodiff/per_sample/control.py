"""The axis of the samples in the bodies of If, Scan and Loop, and how their cotangents per sample are laid out.

All samples take the same branch and the same number of turns: what decides this depends on no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.branches import BRANCHES, Branch
from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.per_sample.sample_axis import Label, NoAxis, Samples, mixes, same_size
from onnx_convgrad.autodiff.per_sample.shape_vectors import sizes
from onnx_convgrad.autodiff.per_sample.tracker import Tracker
from onnx_convgrad.autodiff.turns import Derivatives, Pullback, Turn
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.loop_bodies import Layout, take_nodes
from onnx_convgrad.ir.nodes import captured_values


class SamplePullback(Pullback):
    """The walk with one cotangent per sample: `[N, *shape]` for a value that holds no samples."""

    def __init__(self, batch: Batch, walk: Callable[..., Derivatives]) -> None:
        super().__init__(batch.e)
        self.batch, self.tracker, self.walk = batch, batch.tracker, walk

    def __call__(
        self, cotangents: Mapping[ir.Value, ir.Value], sources: Collection[ir.Value], held: Collection[ir.Value] = ()
    ) -> Derivatives:
        return self.walk(cotangents, sources, held)

    def like(self, value: ir.Value) -> ir.Value:
        if self.tracker[value] is not None:
            return value
        shape = None if value.shape is None else ir.Shape([self.tracker.size, *value.shape])
        return ir.Value(shape=shape, type=value.type)

    def layout(self, value: ir.Value, layout: Layout) -> Layout:
        ahead = self.tracker[value] is None and layout.axis >= 0
        return Layout(layout.axis + 1, layout.backwards) if ahead else layout

    def zeros(self, value: ir.Value) -> ir.Value:
        return self.batch.zeros(value)

    def enter_branch(self, results: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
        self.tracker.follow(results)
        for result, output in zip(results, outputs, strict=True):
            settle(self.tracker, result, self.tracker[output])

    def enter_turn(self, turn: Turn) -> None:
        label_turn(self.tracker, turn)


def if_labels(t: Tracker, n: Call, labels: Sequence[Label]) -> list[Label]:
    """The labels of the results of an If: those of its branches, which are emitted for it and removed again."""
    if labels[0] is not None:
        raise mixes("its condition depends on them")
    found: list[list[Label]] = []

    def follow(results: Sequence[ir.Value]) -> Derivatives:
        t.vary([v for v in captured_values(n.node) if v in t.varied], results)
        t.follow(results)
        found.append([t[r] for r in results])
        return {}

    for name in BRANCHES:
        branch = Branch(t.e, n.node, name, follow)
        take_nodes(t.e, branch.nodes, [])
    return [_joined(*pair) for pair in zip(*found, strict=True)]


def _joined(one: Label, other: Label) -> Label:
    """The label of a value that is one of two."""
    if one is None or one == other:
        return other
    if other is None:
        return one
    if NoAxis.UNKNOWN in (one, other):
        return NoAxis.UNKNOWN
    raise mixes("its branches hold the samples on different axes")


def loop_labels(t: Tracker, n: Call, labels: Sequence[Label]) -> list[Label]:
    """The labels of the results of a Scan or Loop: those of one turn, which is emitted for it and removed again."""
    if n.node.op_type == "Loop" and any(label is not None for label in labels[:2]):
        raise mixes("the number of its turns depends on them")
    turn = Turn(t.e, n)
    try:
        label_turn(t, turn)
        count = len(turn.states)
        states = [t[r] for r in turn.results[:count]]
        made = zip(turn.results[count:], turn.made, strict=False)
        result = [*states, *(_with_turns(t[r], layout, t.rank(r)) for r, layout in made)]
    finally:
        take_nodes(t.e, list(turn.nodes()), [])
    return result[: len(n.node.outputs)]


def label_turn(t: Tracker, turn: Turn) -> None:
    """Label what a turn computes; a state keeps its label from turn to turn."""
    for x, value in zip(turn.sequences, turn.slices, strict=True):
        t.labels[value] = _of_slice(t[x.whole], x.layout, t.rank(x.whole))
    sources = _varied(t, turn)
    start = [_of_state(t, v) for v in turn.first]
    known = list(t.problems)
    for _ in range(len(start) + 1):
        t.forget(turn.nodes())
        t.problems[:] = known
        t.labels.update(zip(turn.states, start, strict=True))
        t.vary(sources, turn.results)
        t.follow([*turn.results, *turn.conditions])
        ends = [t[r] for r in turn.results[: len(start)]]
        after = [t[v] or (None if end is NoAxis.UNKNOWN else end) for v, end in zip(turn.first, ends, strict=True)]
        if after == start:
            break
        start = after
    if any(t[v] is not None for v in turn.conditions):
        raise mixes("whether another turn follows depends on them")
    for first, state, result in zip(turn.first, turn.states, turn.results, strict=False):
        if t[state] is NoAxis.TOTAL or (t[result] or t[state]) not in (t[state], NoAxis.UNKNOWN):
            raise mixes(f"its state {first.name!r} does not keep them on one axis")
        settle(t, first, t[state])
        settle(t, result, t[state])


def _varied(t: Tracker, turn: Turn) -> list[ir.Value]:
    """The values that a turn reads and that depend on the sources."""
    outer = turn.outer_varied([v for v in captured_values(turn.node) if v in t.varied])
    slices = [i for i, x in enumerate(turn.sequences) if x.whole in t.varied]
    moving = turn.moving({j for j, v in enumerate(turn.first) if v in t.varied}, slices, outer)
    return [*(turn.states[j] for j in moving), *(turn.slices[i] for i in slices), *outer]


def _of_state(t: Tracker, first: ir.Value) -> Label:
    """The label of a state before the first turn; for a value without samples, such as zeros, by its size."""
    if t[first] is not None:
        return t[first]
    axes = [i for i, d in enumerate(sizes(first, t.sizes)) if same_size(d, t.size)]
    return Samples(axes[0]) if axes else None


def _of_slice(label: Label, layout: Layout, rank: int) -> Label:
    """The label of the slice that a turn takes."""
    axis = layout.axis % rank
    if not isinstance(label, Samples):
        return label
    if axis == label.axis:
        raise mixes(f"its turns run over axis {axis}, which holds them")
    return label.at(label.axis - (axis < label.axis))


def _with_turns(label: Label, layout: Layout, rank: int) -> Label:
    """The label of the joined slices of all turns."""
    return label.at(label.axis + (layout.axis % (rank + 1) <= label.axis)) if isinstance(label, Samples) else label


def settle(t: Tracker, value: ir.Value, label: Label) -> None:
    """Label a value without samples that stands where others hold them, or refuse it if that needs its gradient."""
    if t[value] is not None or not isinstance(label, Samples):
        return
    if value in t.varied:
        t.constant_along(value, label.at(label.axis - t.rank(value)))
    t.labels[value] = label
