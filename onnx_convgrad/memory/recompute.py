"""Activation checkpointing: recompute forward values in the backward part instead of keeping them.

The nodes that compute such a value are copied into the backward part. A runtime could undo that by merging equal nodes, or
by running a copy early, since it depends on forward values only. So a copy reads a checkpoint through a view, whose shape is
the checkpoint's plus a zero that is known only when the backward part has come that far: `Shape(NonZero(e > e))`, with `e`
the sum of one element of each value that was computed up to that point and is still needed. No optimizer can fold that zero,
and a Reshape copies nothing. The zero also orders the stretches between copies: the recomputed values of one are freed
before those of the next are made. In ONNX Runtime's own order every weight gradient, with its operands, would wait for the
end.

Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.notes import keep_detach, origin_of
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.ir.targets import TargetInfo
from onnx_convgrad.memory.late_views import late_view, late_zero
from onnx_convgrad.memory.retained_bytes import Group, Retained, Values, is_large
from onnx_convgrad.memory.selection import choose_values, recomputation_seconds

_FLOATING = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The values chosen for recomputation, with the predicted effect.

    Attributes:
        values: Names of the forward values that are recomputed.
        kept_before: Bytes of forward values kept for the backward part without recomputation.
        kept_after: Bytes of forward values kept with recomputation.
        peak_after: Most bytes of forward values, kept or recomputed, alive at once in the backward part.
        seconds: Predicted time that the recomputation adds.
        total_seconds: Predicted time of the whole graph without it.
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
    """Insert an unused Constant after the last of the `forward` nodes, which a lowering may replace later; return it."""
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


Places = tuple[tuple[int, int], ...]
"""For each of some values, the position of its node and the number of the result."""


class Selection:
    """Chooses what is recomputed in copies of a graph, with everything that they share computed once.

    Args:
        target: Its speeds predict times.
        graph: A lowered graph.
        mark: See `RecomputeValues`.

    Attributes:
        tried: Results by what is recomputed, and whether values are written in place, as the caller notes them.
    """

    def __init__(self, target: TargetInfo, graph: ir.Graph, mark: ir.Node) -> None:
        self.tried: dict[tuple[Places | None, bool], tuple[int, float]] = {}
        self._target, self._boundary = target, next(i for i, node in enumerate(graph) if node is mark)
        self._places: dict[float, Places] = {}
        self._retained = Retained(graph, self._boundary, target.rates)
        self._total = sum(map(self._retained.seconds, self._retained.nodes))

    def places(self, share: float) -> Places:
        """The values that are recomputed if so large a share of the time may be added."""
        if share not in self._places:
            values = choose_values(self._retained, share, self._total)
            producers = [(v.producer(), v.index() or 0) for v in values]
            self._places[share] = tuple((self._retained.at[node], k) for node, k in producers if node is not None)
        return self._places[share]

    def recomputing(self, copy: ir.Graph, places: Places) -> RecomputeValues:
        """The pass that recomputes these values in a copy of the graph."""
        nodes = list(copy)
        values = {nodes[i].outputs[k]: None for i, k in places}
        return RecomputeValues(self._target, nodes[self._boundary], values, self._total)


class RecomputeValues(GraphPass):
    """Recompute forward values in the backward part of a lowered graph, to keep fewer bytes between the two.

    A graph without the mark is left alone.

    Args:
        target: Its speeds predict times.
        mark: The node between the forward and the backward part, from `mark_boundary`; it is removed.
        names: `"auto"`, names and globs of forward values, the largest share of the predicted time that is added, or the
            values.
        total: The predicted time of the graph, if it is known.

    Attributes:
        report: The `Recomputation` of the last run.
    """

    def __init__(
        self,
        target: TargetInfo,
        mark: ir.Node,
        names: float | str | Sequence[str] | Values = "auto",
        total: float | None = None,
    ) -> None:
        super().__init__()
        self.total = total
        self.target, self.mark, self.names = target, mark, names
        self.report: Recomputation | None = None

    def rewrite(self, model: ir.Model) -> bool:
        """Insert the copies.

        Raises:
            ArgumentError: An unknown name, or one of a value that cannot be recomputed.
        """
        graph = model.graph
        boundary = next((i for i, node in enumerate(graph) if node is self.mark), None)
        if boundary is None:
            return False
        graph.remove(self.mark)
        retained = Retained(graph, boundary, self.target.rates)
        total = sum(map(retained.seconds, retained.nodes)) if self.total is None else self.total
        groups = retained.groups(choose_values(retained, self.names, total))
        self.report = _report(retained, groups, total)
        _Writer(graph, retained, self.target).write(groups)
        graph.sort()  # lowerings share values, which may now depend on nodes behind them
        return bool(groups)


def _report(model: Retained, groups: Sequence[Group], total: float) -> Recomputation:
    dropped = [owner for group in groups for owner in group.dropped]
    starts = {model.owner(v): None for group in groups for v in group.checkpoints}
    added = [o for o in starts if o in model.families and o not in model.kept and o not in model.outputs]
    before = sum(model.kept.values())
    return Recomputation(
        values=tuple(sorted(v.name or "" for v in dropped)),
        kept_before=before,
        kept_after=before - sum(model.kept[o] for o in dropped) + sum(model.sizes(added).values()),
        peak_after=model.peak(groups),
        seconds=recomputation_seconds(model, groups),
        total_seconds=total,
    )


class _Writer:
    """Inserts the copies before the first node that reads one of them, behind their barrier."""

    def __init__(self, graph: ir.Graph, model: Retained, target: TargetInfo) -> None:
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
            needed = self._needed(since, group.start, first=zero is None)
            zero = late_zero(self.e, needed) if needed else zero
            if zero is not None:
                self._copy(group, zero)
                self._hold_back(self.model.nodes[group.start : end], zero)
            since = max(since, group.start)

    def _needed(self, since: int, until: int, *, first: bool) -> list[ir.Value]:
        """The results of a stretch of backward nodes that are read later, or those of the forward part."""
        model = self.model
        found = [v for node in model.nodes[since:until] for v in node.outputs if self._outlives(v, until)]
        if first and not any(v.dtype in _FLOATING for v in found):
            found = [v for node in model.nodes[: model.boundary] for v in node.outputs if self._ends(v)]
        return [v for v in found if v.dtype in _FLOATING]

    def _outlives(self, value: ir.Value, until: int) -> bool:
        return value in self.model.outputs or any(self.model.at.get(n, until) >= until for n in value.consumers())

    def _ends(self, value: ir.Value) -> bool:
        """Whether a forward value is read only outside the forward part."""
        positions = [self.model.at.get(node, 0) for node in value.consumers()]
        used = bool(positions) or value in self.model.outputs
        return used and all(at >= self.model.boundary for at in positions)

    def _copy(self, group: Group, zero: ir.Value) -> None:
        copies: dict[ir.Value, ir.Value] = {}
        for value in group.checkpoints:
            if value.producer() is not None and is_large(value):
                copies[value] = late_view(self.e, value, zero)
        for node in group.nodes:
            if not any(v in copies for v in node.inputs):
                for operand in node.inputs:
                    if operand is not None and not is_constant(operand):
                        copies[operand] = late_view(self.e, operand, zero)
            inputs = [copies.get(v, v) if v is not None else None for v in node.inputs]
            attributes = list(node.attributes.values())
            copy = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
            copy.name = self.names.claim(f"{node.name}/recomputed")
            keep_detach(copy, node)
            self.graph.insert_before(self.e.anchor, copy)  # type: ignore[arg-type] # set by `write`
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                new.shape, new.type = old.shape, old.type
                copies[old] = new
        for owner in group.dropped:
            for value in self.model.families[owner]:
                for use in list(value.uses()):
                    if self.model.at.get(use.node, -1) >= self.model.boundary:
                        use.node.replace_input_with(use.idx, copies[value])

    def _hold_back(self, nodes: Sequence[ir.Node], zero: ir.Value) -> None:
        """Delay nodes that depend on forward values only (the mask of a Relu) until the rest of their stretch runs."""
        for node in nodes:
            if node not in self.forward_only:
                continue
            for index, value in enumerate(node.inputs):
                if value is not None and self.model.owner(value) in self.model.kept and is_large(value):
                    node.replace_input_with(index, late_view(self.e, value, zero))
