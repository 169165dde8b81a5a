"""Activation checkpointing: forward values that are not kept for the backward part but computed again there.

The nodes that give such a value are copied into the backward part. Two things would undo that: a runtime that merges
equal nodes, and one that runs a copy early, since it depends on forward values only. So a copy does not read a checkpoint
itself but a view of it, whose shape is the checkpoint's plus a zero that is only known when the backward part has got
there: `Shape(NonZero(e > e))`, `e` being an element of everything that was computed up to that point and is still needed.
Nothing can fold that zero, and a Reshape copies nothing. It also makes sure that what precedes has ended, so that the
recomputed values of one stretch are gone before those of the next are made: ONNX Runtime's own order would let every
weight gradient wait, with its operands, for the end.

Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

import fnmatch
import heapq
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.targets import Target
from onnx_convgrad.memory.retained_bytes import Group, Retained

__all__ = ["Recomputation", "mark_boundary", "recompute_values"]

_EXTRA_TIME = 0.15
"""Most that `"auto"` adds to the predicted time of the graph."""

_LIMITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""`"auto"` tries groups of at most this fraction of what is kept."""

_FLOATING = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What was decided, with its predicted price.

    Attributes:
        values: Names of the forward values that are recomputed.
        kept_before: Bytes of forward values kept for the backward part without recomputation.
        kept_after: The same with it.
        peak_after: Most bytes of forward values, kept or recomputed, alive at once in the backward part.
        seconds: Time that the recomputation adds.
        total_seconds: Time of the whole graph without it.
    """

    values: tuple[str, ...]
    kept_before: int
    kept_after: int
    peak_after: int
    seconds: float
    total_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        share = 100 * self.seconds / self.total_seconds if self.total_seconds else 0.0
        return (
            f"{len(self.values)} values recomputed: {self.kept_before / 1e6:.1f} MB kept for the backward part become "
            f"{self.kept_after / 1e6:.1f} MB, at most {self.peak_after / 1e6:.1f} MB with what is recomputed; "
            f"predicted {1e3 * self.seconds:.3f} ms more ({share:.1f} %)"
        )


def mark_boundary(graph: ir.Graph, forward: Collection[ir.Node]) -> ir.Node:
    """Put a node without meaning behind the last of the `forward` nodes, which a lowering may replace later."""
    mark = ir.Node("", "Constant", [], [ir.AttrInt64("value_int", 0)])
    before = set(forward)
    last = next((node for node in reversed(graph) if node in before), None)
    if last is not None:
        graph.insert_after(last, mark)
    elif len(graph):
        graph.insert_before(graph[0], mark)
    else:
        graph.append(mark)
    return mark


def recompute_values(graph: ir.Graph, mark: ir.Node, names: str | Sequence[str], target: Target) -> Recomputation:
    """Recompute forward values in the backward part of `graph`, in place.

    Args:
        graph: A lowered graph.
        mark: The node between its two parts, from `mark_boundary`; it is removed.
        names: `"auto"`, or names and globs of forward values.
        target: Whose speeds predict times.

    Raises:
        ArgumentError: An unknown name, or one of a value that cannot be recomputed.
    """
    boundary = next(i for i, node in enumerate(graph) if node is mark)
    graph.remove(mark)
    model = Retained(graph, boundary, target.rates)
    total = sum(model.seconds(node) for node in model.nodes)
    groups = _chosen(model, total) if names == "auto" else model.groups(_named(model, as_names(names, "recompute")))
    before = sum(model.kept.values())
    again = {owner for group in groups for owner in group.dropped}
    extra = {model.owner(v) for group in groups for v in group.checkpoints} & model.families.keys() - model.kept.keys()
    added = {o: size for o, size in model.sizes(extra).items() if o not in model.outputs}
    result = Recomputation(
        tuple(sorted(v.name or "" for v in again)),
        before,
        before - sum(model.kept[o] for o in again) + sum(added.values()),
        model.peak(groups),
        _price(model, groups),
        total,
    )
    _Writer(graph, model, target).write(groups)
    graph.sort()  # lowerings share values, which may now depend on nodes behind them
    return result


def _price(model: Retained, groups: Sequence[Group]) -> float:
    """Seconds of the copied nodes, and of some small ones per group."""
    return sum(10 * model.rates.node + sum(map(model.seconds, group.nodes)) for group in groups)


# -- choosing ----------------------------------------------------------------------------------------------------------


def _named(model: Retained, names: Sequence[str]) -> dict[ir.Value, None]:
    """The kept families that names and globs mean."""
    owners = {v.name: o for o, members in model.families.items() for v in members if v.name}
    reasons = {name: model.refusal(owner) for name, owner in owners.items()}
    found: dict[ir.Value, None] = {}
    for name in names:
        if name in owners:
            if reasons[name] is not None:
                raise ArgumentError(f"recompute names {name!r}, which {reasons[name]}.", hint="It is kept.")
            matches = [name]
        else:
            matches = [n for n in owners if reasons[n] is None and fnmatch.fnmatchcase(n, name)]
            if not matches:
                check_names([name], [n for n in owners if reasons[n] is None], "forward value in recompute:")
        found.update(dict.fromkeys(owners[n] for n in matches if owners[n] in model.kept))
    return found


def _chosen(model: Retained, total: float) -> list[Group]:
    """The selection of least peak, over several sizes of groups."""
    whole = sum(model.kept.values())
    best: list[Group] = []
    least = model.peak(best)
    for parts in _LIMITS:
        groups = model.groups(_Greedy(model, whole / parts, _EXTRA_TIME * total).select())
        peak = model.peak(groups)
        if peak < least and _price(model, groups) <= _EXTRA_TIME * total:
            best, least = groups, peak
    return best


class _Greedy:
    """Drop the value with the least time per byte, again and again, while groups stay small and the time suffices.

    A value gets dearer when those it would have started from are dropped too, so a price is looked up anew before it is
    believed.
    """

    def __init__(self, model: Retained, limit: float, seconds: float) -> None:
        self.model, self.limit, self.seconds = model, limit, seconds
        self.dropped: dict[ir.Value, None] = {}
        self.cloned: dict[ir.Node, int] = {}  # node -> its group
        self.starts: dict[ir.Value, set[int]] = {}  # owner -> groups that start from it
        self.size: dict[int, int] = {}

    def select(self) -> dict[ir.Value, None]:
        floor = sum(self.model.kept.values()) / 1000
        heap: list[tuple[float, int, ir.Value]] = []
        for count, (owner, size) in enumerate(self.model.kept.items()):
            if size >= floor and self.model.refusal(owner) is None:
                heap.append((self._try(owner)[0] / size, count, owner))
        heapq.heapify(heap)
        while heap:
            ratio, count, owner = heapq.heappop(heap)
            size = self.model.kept[owner]
            price, nodes, starts = self._try(owner)
            if price / size > 1.001 * ratio:
                heapq.heappush(heap, (price / size, count, owner))
                continue
            self._take(owner, price, nodes, starts)
        return self.dropped

    def _try(self, owner: ir.Value) -> tuple[float, set[ir.Node], set[ir.Value]]:
        """Seconds that dropping this one adds."""
        nodes, starts = self.model.upstream(owner, {*self.dropped, owner})
        return sum(self.model.seconds(n) for n in nodes if n not in self.cloned), nodes, starts

    def _take(self, owner: ir.Value, price: float, nodes: set[ir.Node], starts: set[ir.Value]) -> None:
        joined = {self.cloned[n] for n in nodes if n in self.cloned} | self.starts.get(owner, set())
        alone = not joined
        price += 10 * self.model.rates.node if alone else 0.0
        size = self.model.kept[owner] + sum(self.size[g] for g in joined)
        started = {self.model.owner(v) for v in starts}
        kept_for_it = self.model.sizes(o for o in started if o in self.model.families and o not in self.model.kept)
        worth = self.model.kept[owner] > sum(kept_for_it.values())
        if price > self.seconds or size > self.limit or not worth:
            return
        self.seconds -= price
        self.dropped[owner] = None
        own = len(self.dropped)
        self.size[own] = size
        for node, group in self.cloned.items():
            if group in joined:
                self.cloned[node] = own
        for readers in self.starts.values():
            if readers & joined:
                readers.difference_update(joined)
                readers.add(own)
        self.cloned.update(dict.fromkeys(nodes, own))
        for start in started:
            self.starts.setdefault(start, set()).add(own)


# -- writing -----------------------------------------------------------------------------------------------------------


class _Writer:
    """Puts the copies before the first node that reads one of them, behind their barrier."""

    def __init__(self, graph: ir.Graph, model: Retained, target: Target) -> None:
        self.graph, self.model = graph, model
        self.e = Emitter(graph, opsets=graph.opset_imports, target=target)
        self.names = Namespace.of_nodes(graph)
        self.forward_only = model.forward_only()

    def write(self, groups: Sequence[Group]) -> None:
        since, zero = self.model.boundary, None
        for group, following in itertools.zip_longest(groups, groups[1:]):
            end = len(self.model.nodes) if following is None else following.start
            self.e.anchor = self.model.nodes[group.start]
            self.e.origin = origin_of(self.e.anchor)
            zero = self._zero(self._needed(since, group.start, first=zero is None)) or zero
            if zero is not None:
                self._copy(group, zero)
                self._hold_back(self.model.nodes[group.start : end], zero)
            since = max(since, group.start)

    def _needed(self, since: int, until: int, *, first: bool) -> list[ir.Value]:
        """What the backward nodes of a stretch leave behind; before any of them, what the forward part ends in."""
        model = self.model
        found = [v for node in model.nodes[since:until] for v in node.outputs if self._outlives(v, until)]
        if first and not any(v.dtype in _FLOATING for v in found):
            found = [v for node in model.nodes[: model.boundary] for v in node.outputs if self._ends(v)]
        return [v for v in found if v.dtype in _FLOATING]

    def _outlives(self, value: ir.Value, until: int) -> bool:
        return value in self.model.outputs or any(self.model.at.get(n, until) >= until for n in value.consumers())

    def _ends(self, value: ir.Value) -> bool:
        """Whether the forward part makes this value and does not read it."""
        positions = [self.model.at.get(node, 0) for node in value.consumers()]
        used = bool(positions) or value in self.model.outputs
        return used and all(at >= self.model.boundary for at in positions)

    def _zero(self, values: Sequence[ir.Value]) -> ir.Value | None:
        """The number 0 as a vector of one element, known when all of `values` are."""
        e = self.e
        if not values:
            return None
        kind = values[0].dtype
        parts = []
        for value in values:
            if value.shape is None:
                corner = e.op("Slice", e.op("Reshape", value, e.ints([-1])), e.ints([0]), e.ints([1]))
            elif len(value.shape) == 0:
                corner = e.op("Reshape", value, e.ints([1]))
            else:
                rank = len(value.shape)
                corner = e.op("Slice", value, e.ints([0] * rank), e.ints([1] * rank))
            parts.append(corner if value.dtype == kind else e.op("Cast", corner, to=int(kind or ir.DataType.FLOAT)))
        total = e.op("Sum", *parts) if len(parts) > 1 else parts[0]
        return e.op("Shape", e.op("NonZero", e.op("Greater", total, total)), start=1)

    def _copy(self, group: Group, zero: ir.Value) -> None:
        again: dict[ir.Value, ir.Value] = {}
        for value in group.checkpoints:
            if value.producer() is not None:
                again[value] = self._view(value, zero)
        for node in group.nodes:
            if not any(v in again for v in node.inputs):
                for operand in node.inputs:
                    if operand is not None and not is_constant(operand):
                        again[operand] = self._view(operand, zero)
            inputs = [again.get(v, v) if v is not None else None for v in node.inputs]
            copy = ir.Node(
                node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs)
            )
            copy.name = self.names.claim(f"{node.name}/recomputed")
            self.graph.insert_before(self.e.anchor, copy)  # type: ignore[arg-type] # set by `write`
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                new.shape, new.type = old.shape, old.type
                again[old] = new
        for owner in group.dropped:
            for value in self.model.families[owner]:
                for use in list(value.uses()):
                    if self.model.at.get(use.node, -1) >= self.model.boundary:
                        use.node.replace_input_with(use.idx, again[value])

    def _hold_back(self, nodes: Sequence[ir.Node], zero: ir.Value) -> None:
        """Let what depends on the forward part only (the mask of a Relu) wait like the rest of its stretch."""
        for node in nodes:
            if node not in self.forward_only:
                continue
            for index, value in enumerate(node.inputs):
                if value is not None and self.model.owner(value) in self.model.kept and self.model.is_large(value):
                    node.replace_input_with(index, self._view(value, zero))

    def _view(self, value: ir.Value, zero: ir.Value) -> ir.Value:
        """The value, but not before `zero` is known."""
        e = self.e
        return e.typed(e.op("Reshape", value, e.op("Add", e.shape(value), zero)), value)
