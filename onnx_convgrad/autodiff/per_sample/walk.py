"""Reverse mode with the samples kept apart.

A value that holds samples has a cotangent of its own shape, as always. A value that depends on none, such as a parameter,
gets one cotangent per sample: `[N, *shape]`. Where such a value meets the samples, the contribution is not summed over
them; the table of rules says how, operator by operator, and elementwise operators need nothing said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import Activity, carriers, rule_of
from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.per_sample.layout import Samples, State
from onnx_convgrad.autodiff.per_sample.norms import squared_norm
from onnx_convgrad.autodiff.per_sample.tracking import Tracker
from onnx_convgrad.autodiff.registry import Rule, per_sample_rule
from onnx_convgrad.autodiff.reverse import Walk, sloped
from onnx_convgrad.errors import ArgumentError, DifferentiationError, UnsupportedCase
from onnx_convgrad.ir.bodies import scan, taken
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.samples import cut_samples, with_samples

__all__ = ["Apart", "backward_per_sample", "data_inputs"]


def data_inputs(graph: ir.Graph, sources: Collection[ir.Value]) -> list[ir.Value]:
    """Graph inputs whose first axis is the batch.

    None is an initializer, a scalar, a weight to differentiate with respect to, or of another first size than the rest: such
    an input belongs to all samples.
    """
    found = [v for v in graph.inputs if not v.is_initializer() and (v.shape is None or len(v.shape) > 0)]
    found = [v for v in found if not (v in sources and _in_weight_slot(v))]
    sizes = {known(v.shape[0]) for v in found if v.shape is not None}
    several = sizes - {1}
    size = next(
        (known(v.shape[0]) for v in found if v.shape is not None and known(v.shape[0]) in (several or sizes)), None
    )
    batch = [v for v in found if v.shape is None or known(v.shape[0]) in (None, size)]
    if not batch:
        raise ArgumentError("per_sample needs an input with a batch axis, and the model has none.")
    return sorted(batch, key=lambda v: v.shape is None or known(v.shape[0]) != size)


def _in_weight_slot(value: ir.Value) -> bool:
    """Whether an input is used as only weights are: as a parameter of an operator whose data is its first operand."""
    for use in value.uses():
        rule = rule_of(use.node)
        if rule is not None and rule.kind != "elementwise" and use.idx > 0:
            return Call(use.node).names[0][use.idx] in rule.parameters
    return False


def backward_per_sample(
    e: Emitter, cotangents: Mapping[ir.Value, ir.Value], sources: Collection[ir.Value], data: Sequence[ir.Value]
) -> Apart:
    """Emit the cotangents of `sources`; those of values that hold no samples once per sample.

    Args:
        e: Emitter positioned after every node that computes the targets.
        cotangents: Target value -> its cotangent, of the same shape and dtype.
        sources: Values to differentiate with respect to.
        data: Graph inputs whose first axis is the batch.

    Raises:
        ArgumentError: A target depends on no sample.
        DifferentiationError: Every node that mixes samples, or whose form per sample is not known.
    """
    activity = Activity.between(sources, cotangents, e.order)
    tracker = Tracker(e, data, activity.varied)
    tracker.follow(cotangents)
    if not tracker.problems:
        for target in cotangents:
            if target in activity.varied and tracker[target] is None:
                raise ArgumentError(f"{target.name!r} depends on no input with a batch axis, so it has no samples.")
        walk = _Walk(e, activity, tuple(cotangents), tracker)
        result = walk.run(cotangents, sources)
        if not walk.problems:
            return Apart(walk.batch, result)
        raise DifferentiationError(walk.problems)
    raise DifferentiationError(tracker.problems)


@dataclass(frozen=True, slots=True)
class Apart:
    """The gradients of each sample.

    Attributes:
        gradients: Source -> cotangent, `[N, *shape]` for a parameter, of the source's own shape where that holds samples.
    """

    batch: Batch
    gradients: dict[ir.Value, ir.Value]

    def squared_norms(self) -> dict[ir.Value, ir.Value]:
        """Source -> squared norm of each sample's gradient, `[N]`, in float32 at least."""
        e, found = self.batch.e, {}
        for source, gradient in self.gradients.items():
            label = self.batch.tracker[source]
            if isinstance(label, Samples):  # an input: each sample has a gradient of its own already
                found[source] = self.batch.sum(e.square(gradient), label)
            else:
                found[source] = squared_norm(e, gradient)
        return found

    def zeros(self, source: ir.Value) -> ir.Value:
        """What stands for the gradients of a source that no target depends on."""
        e = self.batch.e
        if self.batch.tracker[source] is not None:
            return e.zeros_like(source)
        return self.batch.stacked(
            e.op("Expand", e.scalar(0, source), e.vector([self.batch.count, *e.dims(source)])), source
        )

    def zero_norms(self, source: ir.Value) -> ir.Value:
        """What stands for their squared norms."""
        e = self.batch.e
        like = source if source.dtype == ir.DataType.DOUBLE else None
        return e.op("Expand", e.scalar(0, like), e.vector([self.batch.count]))


class _Walk(Walk):
    """The reverse walk, knowing which values hold samples."""

    def __init__(self, e: Emitter, activity: Activity, targets: tuple[ir.Value, ...], tracker: Tracker) -> None:
        super().__init__(e, activity, targets)
        self.tracker = tracker
        self.batch = Batch(e, tracker)

    def node(
        self, node: ir.Node, rule: Rule | None, given: dict[ir.Value, ir.Value]
    ) -> list[tuple[ir.Value, ir.Value]]:
        if any(self.tracker[v] is not None for v in given):
            return super().node(node, rule, given)
        wanted = [(name, v) for name, v in carriers(node, rule) if v in self.activity.varied]
        if any(self.tracker[v] is not None for _, v in wanted):
            raise UnsupportedCase("an operand holds samples and its result does not.")
        found = [(v, self._without_samples(Call(node), rule, given, name, v)) for name, v in wanted]
        return [(v, cotangent) for v, cotangent in found if cotangent is not None]

    def contribution(
        self, call: Call, rule: Rule, returned: Any, name: str, operand: ir.Value, given: Mapping[ir.Value, ir.Value]
    ) -> ir.Value | None:
        """The cotangent of one operand of a node whose results hold samples, or are sums over them."""
        if self.tracker[operand] is not None:
            return super().contribution(call, rule, returned, name, operand, given)
        if any(self.tracker[v] is State.TOTAL for v in given):
            raise UnsupportedCase(f"its operand {operand.name!r} meets what is summed over the samples already.")
        special = per_sample_rule(call.node.domain, call.node.op_type)
        if special is not None:
            g = {n: given.get(v) for n, v in zip(call.names[1], call.node.outputs, strict=True)}
            thunks = special(self.e, call, g, self.batch)
            if name not in thunks:
                raise UnsupportedCase(f"the form per sample of the gradient for its operand {name} is not known.")
            return self.batch.stacked(thunks[name](), operand)
        if rule.kind != "elementwise" and not rule.broadcasts:
            raise UnsupportedCase(
                f"the form per sample of the gradient for its operand {name} is not known.",
                hint=f"Leave {operand.name!r} out of wrt, or loop over the samples with a batch of one.",
            )
        value = self.take(rule, returned, name)
        if value is None:
            return None
        return self._fitted(value, rule, given[call.y], self.batch.of(call.y), operand)

    def _inner(self, node: ir.Node, fixed: Collection[ir.Value]) -> None:
        """Two operators are never differentiated as one: their parameters would not meet the samples one by one."""

    def _fitted(self, value: Any, rule: Rule, g: ir.Value, samples: Samples, operand: ir.Value) -> ir.Value:
        """A local derivative (or a broadcast cotangent) as the contribution of each sample."""
        if rule.kind != "elementwise":
            return self.batch.fit(value, samples, operand)
        if isinstance(value, ir.Value):
            return self.batch.fit(sloped(self.e, g, value), samples, operand)
        return self.e.mul(self.batch.fit(g, samples, operand), value)

    def _without_samples(
        self, call: Call, rule: Rule | None, given: Mapping[ir.Value, ir.Value], name: str, operand: ir.Value
    ) -> ir.Value | None:
        """The cotangent of an operand of a node that no sample has reached, such as the transposition of a weight."""
        e, node = self.e, call.node
        g = given.get(call.y)
        if g is not None and rule is not None and rule.kind == "elementwise" and rule.function is not None:
            value = self.take(rule, rule.function(e, call), name)
            return self._fitted(0 if value is None else value, rule, g, Samples(0), operand)
        if g is not None and node.op_type in _SAME_ORDER:
            return self.batch.stacked(g, operand)
        if g is not None and node.op_type == "Transpose":
            perm = call.ints("perm") or tuple(reversed(range(len(e.dims(operand)))))
            return self.batch.stacked(e.transpose(g, [0, *(int(i) + 1 for i in np.argsort(perm))]), operand)
        if g is not None and node.op_type == "Expand":
            return self.batch.fit(g, Samples(0), operand)
        if g is not None and node.op_type == "Cast" and operand.dtype is not None:
            return self.batch.stacked(e.cast(g, operand.dtype), operand)
        if g is not None and node.op_type == "MatMul" and {len(e.dims(v)) for v in call.inputs if v is not None} == {2}:
            return self.batch.stacked(
                e.matmul(g, e.swap_last(call["B"])) if name == "A" else e.matmul(e.swap_last(call["A"]), g), operand
            )
        if "Scan" in e.target.missing:
            raise UnsupportedCase(
                "it changes a parameter before any sample meets it, and its form per sample is not known.",
                hint="Take `wrt` after it.",
            )
        return self._turn_by_turn(call, rule, given, operand)

    def _turn_by_turn(
        self, call: Call, rule: Rule | None, given: Mapping[ir.Value, ir.Value], operand: ir.Value
    ) -> ir.Value | None:
        """The same for any node: a loop over the samples, each of which takes the ordinary rule; `None` for zero."""
        e = self.e
        start, count = len(e.emitted), self.batch.count
        turns: dict[ir.Value, ir.Value] = {}  # what the body sees of a cotangent -> that of all samples
        single: dict[ir.Value, ir.Value] = {}
        for value, cotangent in given.items():
            name = f"turn_{len(e.order)}_{len(turns)}"
            own = ir.Value(name=name, shape=value.shape, type=ir.TensorType(value.dtype or ir.DataType.FLOAT))
            single[value], turns[own] = own, cotangent
        found = Walk(e, self.activity, self.targets).node(call.node, rule, single)
        parts = [cotangent for value, cotangent in found if value is operand]
        if not parts:
            return None
        result = e.sum(parts)
        if result in turns:  # handed on as it is
            return self.batch.stacked(turns[result], operand)
        body = ir.Graph([*turns], [result], nodes=taken(e, start, turns, result), name="turn")
        stacked = [with_samples(e, whole, [count, *e.dims(own)]) for own, whole in turns.items()]
        return self.batch.stacked(cut_samples(e, scan(e, body, stacked, len(stacked)), count), operand)

    def within(self, seeds: dict[ir.Value, ir.Value], sources: dict[ir.Value, None]) -> dict[ir.Value, ir.Value]:
        activity = Activity.between(sources, seeds, self.e.order, partial=True)
        self.tracker.varied |= activity.varied
        self.tracker.follow(seeds)
        inner = _Walk(self.e, activity, tuple(seeds), self.tracker)
        cotangents = inner.run(seeds, sources)
        if inner.problems:
            raise DifferentiationError(inner.problems)
        return cotangents


_SAME_ORDER = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})
