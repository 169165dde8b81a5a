"""Find the axis of the samples in every value, by one walk over the forward nodes.

Gradients per sample exist only if no operator mixes samples. The walk refuses operators that do, by their factors, and
operators without factors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import MISFIT, Activity, carriers, misfit, problem, rule_of
from onnx_convgrad.autodiff.factors import Factors
from onnx_convgrad.autodiff.facts import Passage, moved_operands, passage, reads_numbers
from onnx_convgrad.autodiff.function_bodies import equivalent, has_body
from onnx_convgrad.autodiff.per_sample.sample_axis import Label, NoAxis, Samples, mixes, product, reshaped, same_size
from onnx_convgrad.autodiff.per_sample.shape_vectors import entries, sizes
from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.errors import Problem, UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import static_product
from onnx_convgrad.ir.emit import Dim, Emitter, known
from onnx_convgrad.ir.nodes import ancestors, captured_values, is_op
from onnx_convgrad.ir.shape_hints import input_shape_option


class Tracker:
    """Labels values by a walk, and keeps in `problems` the operators that were refused.

    Args:
        e: Emits the equivalent subgraphs of operators that are followed through them.
        data: Graph inputs whose first axis is the batch.
        varied: Values that depend on the sources: only their broadcasting along the samples matters.
    """

    def __init__(self, e: Emitter, data: Sequence[ir.Value], varied: Iterable[ir.Value]) -> None:
        self.e = e
        self.count: Dim = e.dim(data[0], 0)
        self.size = None if data[0].shape is None else data[0].shape[0]
        self.labels: dict[ir.Value, Label] = dict.fromkeys(data, Samples(0))
        self.varied = set(varied)
        self.problems: list[Problem] = []
        self._done: set[ir.Node] = set()

    def __getitem__(self, value: ir.Value | None) -> Label:
        return None if value is None else self.labels.get(value)

    def rank(self, value: ir.Value) -> int:
        return self.e.rank(value, "tracking its samples")

    def sizes(self, value: ir.Value) -> list[Any]:
        """The shape of a value, with the number of samples as the size of their axis."""
        dims: list[Any] = list(value.shape or ())
        label = self[value]
        if dims and isinstance(label, Samples) and label.plain:
            dims[label.axis] = self.size
        return dims

    def follow(self, targets: Iterable[ir.Value]) -> None:
        """Label everything that `targets` depend on."""
        above = {node for value in targets for node in ancestors(value)}
        for node in sorted(above & self.e.order.keys(), key=self.e.order.__getitem__):
            if node in self._done:
                continue
            labels: list[Label] = [self[v] for v in node.inputs]
            outer = [self[v] for v in captured_values(node)]
            if NoAxis.UNKNOWN in (*labels, *outer):
                self._assign(node, NoAxis.UNKNOWN)
            elif any(label is not None for label in (*labels, *outer)):
                try:
                    if any(v.shape is None for v in node.outputs):
                        self.e.infer(node)
                    self._assign(node, self._labels(node, labels))
                except (UnsupportedCase, *MISFIT) as fault:
                    self._assign(node, NoAxis.UNKNOWN)
                    self._report(node, fault if isinstance(fault, UnsupportedCase) else misfit(fault))
            self._done.add(node)

    def _labels(self, node: ir.Node, labels: Sequence[Label]) -> Any:
        rule, call = rule_of(node), Call(node)
        if NoAxis.TOTAL in labels:
            return _of_total(call, rule, labels)
        found = None if rule is None or rule.labels is None else rule.labels(self, call, labels)
        if found is not None:
            return found
        if has_body(node) if rule is None else rule.kind == "expansion":
            return self._through(node, rule)
        if rule is not None and rule.factors is not None:
            return _by_factors(self, call, rule.factors(call), labels)
        raise UnsupportedCase(
            "it is not known whether it mixes the samples of a batch.",
            hint="Loop over the samples with the ordinary gradient and a batch of one.",
        )

    def _through(self, node: ir.Node, rule: Rule | None) -> list[Label]:
        """The labels of an equivalent subgraph."""
        call = Call(node)
        results = equivalent(self.e, call, rule)
        present = [v for v in results if v is not None]
        sources = [v for _, v in carriers(node, rule) if v in self.varied]
        self.vary(sources, present)
        self.follow(present)
        return [self[v] for v in results]

    def vary(self, sources: Collection[ir.Value], targets: Collection[ir.Value]) -> None:
        """Note what depends on values that depend on the sources, on the way to `targets`."""
        self.varied |= Activity.between(sources, targets, self.e.order, partial=True).varied

    def forget(self, nodes: Iterable[ir.Node]) -> None:
        """Take back the labels of the results of nodes."""
        for node in nodes:
            self._done.discard(node)
            for value in node.outputs:
                self.labels.pop(value, None)

    # -- values without samples ----------------------------------------------------------------------------------------

    def constant_along(self, value: ir.Value, place: Samples) -> None:
        """Check that a value without samples is broadcast along an axis, counted from the end, or label it as copies."""
        if value.shape is None or -place.axis > len(value.shape) or known(value.shape[place.axis]) == 1:
            self.rank(value)
            return
        node = value.producer()
        source = None if node is None or node.op_type != "Expand" else node.inputs[0]
        own = None if source is None or self[source] is not None else source.shape
        if own is not None and (-place.axis > len(own) or known(own[place.axis]) == 1):
            self.labels[value] = place.at(len(value.shape) + place.axis)
            return
        if self._adopted(value, place.at(len(value.shape) + place.axis)):
            return
        raise UnsupportedCase(
            f"its operand {value.name!r} of shape {value.shape} has its own rows along the axis of the samples.",
            hint="Export the model with a dynamic batch: a static one stores a copy for each sample."
            if value.is_initializer()
            else "",
        )

    def _adopted(self, value: ir.Value, wanted: Samples) -> bool:
        """Label constants that a value depends on, such as an initial state of zeros, and copies, as rows of the samples.

        Relabels the nodes between. Keeps the old labels if one of them mixes the rows, or if another node has already used
        them.
        """
        before = dict(self.labels)
        way: set[ir.Node] = set()
        leaves: list[ir.Value] = []
        copies: dict[ir.Node, Samples] = {}
        todo = [value]
        while todo:
            node = todo.pop().producer()
            if node is not None and node not in way:
                way.add(node)
                if (copied := self._copied(node)) is not None:
                    copies[node] = copied
                    continue
                unheld = [v for v in node.inputs if v is not None and self[v] is None]
                todo += [v for v in unheld if v in self.varied]
                leaves += [v for v in unheld if v not in self.varied]
        while leaves:
            leaf = leaves.pop()
            axes = [i for i, d in enumerate(sizes(leaf, self.sizes)) if same_size(d, self.size)]
            node = leaf.producer()
            if axes:
                self.labels[leaf] = Samples(axes[0])
            elif node is not None and node not in way and (moved := moved_operands(node)):
                way.add(node)
                leaves += moved
        try:
            for node in sorted(way, key=self.e.order.__getitem__):
                if node in copies:
                    self._assign(node, copies[node])
                elif any(self[v] is not None for v in node.inputs):
                    self._assign(node, self._labels(node, [self[v] for v in node.inputs]))
        except UnsupportedCase:
            self.labels = before
        new = [v for v in self.labels if v not in before]
        others = {n for v in new for n in v.consumers() if n in self._done and n not in way}
        if self[value] != wanted or any(v in self.varied for n in others for v in n.outputs):
            self.labels = before
        return self[value] == wanted

    def _copied(self, node: ir.Node) -> Samples | None:
        """The label of the result of a Tile that makes one copy per sample."""
        source = node.inputs[0] if is_op(node, "Tile") else None
        times = None if source is None or source.shape is None else entries(node.inputs[1], self.sizes)
        axes = [axis for axis, count in enumerate(times or ()) if count != 1]
        if times is None or source is None or len(axes) != 1 or not same_size(times[axes[0]], self.size):
            return None
        after = product([source.shape[axes[0]]])  # type: ignore[index]
        return None if after is None else Samples(axes[0], after=after)

    # -- results -------------------------------------------------------------------------------------------------------

    def _assign(self, node: ir.Node, labels: Any) -> None:
        several = labels if isinstance(labels, (list, tuple)) else [labels] * len(node.outputs)
        for value, label in zip(node.outputs, several, strict=False):
            if isinstance(label, Samples):
                self._check(value, label)
            if label is not None:
                self.labels[value] = label

    def _check(self, value: ir.Value, label: Samples) -> None:
        """Check that the size of the axis agrees with the label."""
        if value.shape is None:
            return
        size, count = known(value.shape[label.axis]), self.count if isinstance(self.count, int) else None
        expected = static_product((label.before.known, label.after.known, count))
        if (size is not None and count is None) or (None not in (size, expected) and size != expected):
            batch = "a size known only at run time" if count is None else f"{count} samples"
            raise UnsupportedCase(
                f"axis {label.axis} of its result {value.name!r} has {size} rows, which does not fit a batch of {batch}.",
                hint="Export the model with a dynamic batch, or give the batch of the exported model, as in "
                f"{input_shape_option(self.e.graph.inputs)}.",
            )

    def _report(self, node: ir.Node, case: UnsupportedCase) -> None:
        route = (node.outputs[0].name or "?", *(v.name or "?" for v in node.inputs[:1] if v is not None))
        self.problems.append(problem(self.e.graph, node, case.message, route, case.hint))


def _of_total(n: Call, rule: Rule | None, labels: Sequence[Label]) -> NoAxis | None:
    """The label of a function of a sum over samples, which must be linear in it: other functions mix samples."""
    if not reads_numbers(n.node):
        return None
    totals = [name for name, label in zip(n.names[0], labels, strict=False) if label is NoAxis.TOTAL]
    others = [label for label in labels if label is not None and label is not NoAxis.TOTAL]
    if others or rule is None or not rule.is_affine_in(n, totals):
        raise mixes("an operand is already a sum over the samples, and the result is not linear in it alone")
    return NoAxis.TOTAL


# -- by the factors of an operator -------------------------------------------------------------------------------------


def _by_factors(t: Tracker, call: Call, factors: Factors, labels: Sequence[Label]) -> list[Label]:
    """The label of every result: that of the operands, on the axis with the same factor."""
    held = {i: label for i, label in enumerate(labels) if isinstance(label, Samples) and i not in factors.unread}
    if not held:
        return [None] * len(call.node.outputs)
    label = next(iter(held.values()))
    if factors.flat:
        return [_reordered(t, call, label, None if factors.sizes is None else call.inputs[factors.sizes])]
    by_index = _by_index(t, call, factors, labels)
    if by_index is not None:
        return [by_index]
    way = passage(call, factors, {i: own.axis for i, own in held.items()})
    if way is None:
        raise mixes("its operands hold them on different axes, and it combines samples with one another")
    if len({own.at(0) for own in held.values()}) > 1:
        raise mixes("its operands hold different numbers of rows per sample")
    if way.work.kind == "unknown":
        raise UnsupportedCase(f"{way.work.reason}, so it may mix the samples.")
    _agree(t, way, label, broadcasts=factors.broadcasts)
    if way.totals:
        return [NoAxis.TOTAL] * len(call.node.outputs)
    if not way.goes_on:
        raise mixes(way.stop("the samples"), hint=way.work.hint)
    return [None if axis is None else label.at(axis) for axis in way.results]


def _agree(t: Tracker, way: Passage, label: Samples, *, broadcasts: bool) -> None:
    """Check that operands without samples have no rows of their own along their axis, if they are differentiated."""
    for value, axis in way.others:
        if value not in t.varied:
            continue
        t.constant_along(value, label.at(axis - t.rank(value)))
        if t[value] is None and not broadcasts:
            raise UnsupportedCase(f"its operand {value.name!r} has a single row, where one per sample is needed.")


def _by_index(t: Tracker, call: Call, factors: Factors, labels: Sequence[Label]) -> Samples | None:
    """The label of a result whose rows are picked, or written, at indices 0, 1, 2, ... along the samples."""
    inputs, names = list(t.e.graph.inputs), factors.operands
    for position, label in enumerate(labels):
        factor = (names[position] or ())[label.axis] if isinstance(label, Samples) and names[position] else ""
        if factor not in factors.indices:
            continue
        where, component = factors.indices[factor]
        indices = call.inputs[where]
        if labels[where] is not None or indices is None or not isinstance(label, Samples):
            continue
        axis = label.axis_in(indices, inputs, t.size, component)
        found = "" if axis is None else (names[where] or ())[axis]
        result = factors.results[0] or ()
        if found in result:
            return Samples(result.index(found))
        others = [(i, axes.index(found)) for i, axes in enumerate(names) if axes and found in axes and i != where]
        if found and all(  # the others have one row per sample, or are not differentiated
            labels[i] == Samples(place) or (labels[i] is None and call.inputs[i] not in t.varied) for i, place in others
        ):
            return label
    return None


def _reordered(t: Tracker, call: Call, label: Samples, asked: ir.Value | None) -> Samples:
    """The label after a change of the axes, derived from the sizes before and after, see `sample_axis.reshaped`.

    `asked` is the operand with the sizes of the result.
    """
    x = call.node.inputs[0]
    assert x is not None
    rank = t.rank(x)
    target = _target(t, call, x, asked)
    if call.y.shape is None and target is not None:
        call.y.shape, call.y.type = ir.Shape(target), call.y.type or x.type
    if call.node.op_type == "Flatten" and label.axis == 0 and call.int("axis", 1) % (rank + 1) == 1:
        return label
    result = None if target is None else reshaped(label, t.sizes(x), target)
    if result is None:
        raise UnsupportedCase(
            f"the axis of the samples cannot be determined after the change from shape {x.shape} to {call.y.shape}.",
            hint=f"Give the sizes of the inputs, as in {input_shape_option(t.e.graph.inputs)}.",
        )
    return result


def _target(t: Tracker, call: Call, x: ir.Value, asked: ir.Value | None) -> list[Any] | None:
    """The sizes of the result; those that inference did not find are taken from the operand `asked`."""
    inferred = None if call.y.shape is None else list(call.y.shape)
    wanted = entries(asked, t.sizes)
    if wanted is None or len(inferred or wanted) != len(wanted):
        return inferred
    copied = [] if call.int("allowzero", 0) else t.sizes(x)
    wanted = [copied[i] if d == 0 and i < len(copied) else None if d == -1 else d for i, d in enumerate(wanted)]
    pairs = zip(inferred or wanted, wanted, strict=True)
    return [d if isinstance(d, int) or size is None else size for d, size in pairs]
