"""Reverse mode with one cotangent per sample.

A value that holds samples has a cotangent of its own shape, as in the ordinary walk. A value that depends on no sample, such
as a parameter, has one cotangent per sample, `[N, *shape]`: where it meets the samples, the contribution is not summed over
them. Elementwise rules give this form directly; other operators need a rule declared with `per_sample`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import Activity, carriers, rule_of
from onnx_convgrad.autodiff.batching import Batched
from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.per_sample.control import SamplePullback
from onnx_convgrad.autodiff.per_sample.sample_axis import NoAxis, Samples
from onnx_convgrad.autodiff.per_sample.tracker import Tracker
from onnx_convgrad.autodiff.registry import Rule, is_built_in, per_sample_rule
from onnx_convgrad.autodiff.reverse import Pairs, Walk, sloped
from onnx_convgrad.errors import ArgumentError, DifferentiationError, UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Emitter, dims_equal, known
from onnx_convgrad.ir.loop_bodies import placeholder, take_body
from onnx_convgrad.ir.nodes import is_op, release
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.samples import squares


def data_inputs(graph: ir.Graph, sources: Collection[ir.Value]) -> list[ir.Value]:
    """The graph inputs whose first axis is the batch.

    The other inputs belong to all samples: initializers, scalars, weights among `sources`, and inputs of another first size.
    """
    inputs = [v for v in graph.inputs if not v.is_initializer() and (v.shape is None or len(v.shape) > 0)]
    inputs = [v for v in inputs if not (v in sources and _in_weight_slot(v))]
    sizes = [known(v.shape[0]) for v in inputs if v.shape is not None]
    size = next((size for size in sizes if size in (set(sizes) - {1} or {1})), None)
    batch = [v for v in inputs if v.shape is None or known(v.shape[0]) in (None, size)]
    if not batch:
        raise ArgumentError("per_sample needs an input with a batch axis, but the model has none.")
    return sorted(batch, key=lambda v: v.shape is None or known(v.shape[0]) != size)


def _in_weight_slot(value: ir.Value) -> bool:
    """Whether an input is used as a weight: as a parameter, after the first operand, of an operator."""
    for use in value.uses():
        rule = rule_of(use.node)
        if rule is not None and rule.kind != "elementwise" and use.idx > 0:
            return Call(use.node).names[0][use.idx] in rule.parameters
    return False


def backward_per_sample(
    e: Emitter, cotangents: Mapping[ir.Value, ir.Value], sources: Collection[ir.Value], data: Sequence[ir.Value]
) -> PerSampleGradients:
    """Emit the cotangents of `sources`, one per sample for values that hold no samples.

    Args:
        e: Emitter positioned after every node that computes the differentiated values.
        cotangents: Differentiated value -> its cotangent, of the same shape and dtype.
        sources: Values to differentiate with respect to.
        data: Graph inputs whose first axis is the batch.

    Raises:
        ArgumentError: A differentiated value depends on no sample.
        DifferentiationError: Listing every node that mixes samples, or whose gradient per sample is not known.
    """
    activity = Activity.between(sources, cotangents, e.order)
    tracker = Tracker(e, data, activity.varied)
    tracker.follow(cotangents)
    if tracker.problems:
        raise DifferentiationError(tracker.problems)
    for target in cotangents:
        if target in activity.varied and tracker[target] is None:
            raise ArgumentError(f"{target.name!r} depends on no input with a batch axis, so it has no samples.")
    walk = _Walk(e, activity, tracker)
    return PerSampleGradients(walk.batch, walk.run(cotangents, sources))


@dataclass(frozen=True, slots=True)
class PerSampleGradients:
    """The gradients of each sample.

    Attributes:
        batch: The samples.
        gradients: Source -> cotangent: `[N, *shape]`, or the shape of the source if that holds samples.
    """

    batch: Batch
    gradients: dict[ir.Value, ir.Value]

    def squared_norms(self) -> dict[ir.Value, ir.Value]:
        """Source -> the squared norm of each sample's gradient, `[N]`, in float32 or wider."""
        e, norms = self.batch.e, {}
        for source, gradient in self.gradients.items():
            label = self.batch.tracker[source]
            if isinstance(label, Samples):  # an input, which has one gradient per sample
                norms[source] = self.batch.sum(e.square(gradient), label)
            else:
                norms[source] = _squared_norm(e, gradient)
        return norms

    def zero_norms(self, source: ir.Value) -> ir.Value:
        """The squared norms of the gradients of a source that no differentiated value depends on."""
        e = self.batch.e
        like = source if source.dtype == ir.DataType.DOUBLE else None
        return e.op("Expand", e.scalar(0, like), e.vector([self.batch.count]))


class _Walk(Walk):
    """The reverse walk with the labels of the samples.

    Joint rules are not used, because they multiply parameters before these meet the samples.
    """

    joint = False

    def __init__(self, e: Emitter, activity: Activity, tracker: Tracker) -> None:
        super().__init__(e, activity)
        self.tracker = tracker
        self.batch = Batch(e, tracker)

    def node(self, node: ir.Node, rule: Rule | None, upstream: dict[ir.Value, ir.Value]) -> Pairs:
        if any(self.tracker[v] is not None for v in upstream):
            return super().node(node, rule, upstream)
        wanted = [(name, v) for name, v in carriers(node, rule) if v in self.activity.varied]
        if any(self.tracker[v] is not None for _, v in wanted):
            raise UnsupportedCase("an operand holds samples, but its result does not.")
        return self._without_samples(node, rule, upstream) if wanted else []

    def contribution(
        self, call: Call, rule: Rule, returned: Any, name: str, operand: ir.Value, upstream: Mapping[ir.Value, ir.Value]
    ) -> ir.Value | None:
        """The cotangent of one operand of a node whose results hold samples or are sums over them."""
        if self.tracker[operand] is not None:
            return super().contribution(call, rule, returned, name, operand, upstream)
        if any(self.tracker[v] is NoAxis.TOTAL for v in upstream):
            raise UnsupportedCase(
                f"its operand {operand.name!r} meets a value that is already summed over the samples."
            )
        special = per_sample_rule(call.node.domain, call.node.op_type)
        if special is not None:
            g = {n: upstream.get(v) for n, v in zip(call.names[1], call.node.outputs, strict=True)}
            thunks = special(self.e, call, g, self.batch)
            if name not in thunks:
                raise UnsupportedCase(f"its gradient per sample for the operand {name} is not known.")
            return self.batch.stacked(thunks[name](), operand)
        if rule.kind != "elementwise" and not rule.broadcasts:
            raise UnsupportedCase(
                f"its gradient per sample for the operand {name} is not known.",
                hint=f"Leave {operand.name!r} out of wrt, or loop over the samples with a batch of one.",
            )
        value = self.take(rule, returned, name)
        if value is None:
            return None
        gy, samples = upstream[call.y], self.batch.of(call.y)
        if rule.kind != "elementwise":  # a broadcast cotangent
            return self.batch.fit(value, samples, operand)
        if isinstance(value, ir.Value):
            return self.batch.fit(sloped(self.e, gy, value), samples, operand)
        return self.e.mul(self.batch.fit(gy, samples, operand), value)

    def directly(
        self, call: Call, rule: Rule, upstream: Mapping[ir.Value, ir.Value], sources: Collection[ir.Value]
    ) -> Pairs | None:
        if rule.reverse is None or not is_built_in(rule):
            return None
        pull = SamplePullback(self.batch, self.within)
        return cast("Pairs | None", rule.reverse(self.e, call, upstream, sources, pull))

    def _without_samples(self, node: ir.Node, rule: Rule | None, upstream: Mapping[ir.Value, ir.Value]) -> Pairs:
        """The contributions of a node that depends on no sample, such as the transposition of a weight.

        The ordinary rule is applied to the cotangents of one sample, and its nodes are emitted again for those of all.
        """
        e, start = self.e, len(self.e.emitted)
        single = {v: placeholder(e, v, v.shape) for v in upstream}
        found = Walk(e, self.activity).node(node, rule, single)
        nodes = take_body(e, start, [*single.values()], [g for _, g in found])
        for inner in nodes:
            inner.name = None
        many = Batched(e, {own: upstream[v] for v, own in single.items()}, self.batch.count)
        try:
            many.run(nodes, [g for _, g in found])
        except DifferentiationError:
            raise UnsupportedCase(
                "it changes a parameter before any sample meets it, and its gradient per sample is not known.",
                hint="Take `wrt` after it.",
            ) from None
        for inner in nodes:
            release(inner)
        return [(v, self.batch.stacked(many.all(g), v)) for v, g in found]

    def within(
        self, cotangents: Mapping[ir.Value, ir.Value], sources: Collection[ir.Value], held: Collection[ir.Value] = ()
    ) -> dict[ir.Value, ir.Value]:
        activity = Activity.between(sources, cotangents, self.e.order, partial=True, held=held)
        self.tracker.varied |= activity.varied
        self.tracker.follow(cotangents)
        return _Walk(self.e, activity, self.tracker).run(cotangents, sources, {*sources, *held})


# -- squared norms -----------------------------------------------------------------------------------------------------


def _squared_norm(e: Emitter, gradient: ir.Value) -> ir.Value:
    """The squared norms, `[N]`, of gradients with the samples on the first axis; in float32 or wider."""
    node, before = gradient.producer(), e.origin
    e.origin = "" if node is None else origin_of(node)
    try:
        return _norm(e, gradient)
    finally:
        e.origin = before


def _norm(e: Emitter, gradient: ir.Value) -> ir.Value:
    inner = _before_layout_changes(gradient)
    node = inner.producer()
    if node is not None and node.domain == DOMAIN and node.op_type == "ConvPerSampleGrad":
        return _per_sample(e.op("ConvGradSquaredNorm", *node.inputs, domain=DOMAIN, **Call(node).attributes()), inner)
    if is_op(node, "MatMul") and _paired(node):
        return _per_sample(e.op("ProductSquaredNorm", *node.inputs, domain=DOMAIN), inner)
    return squares(e, gradient)


def _per_sample(norm: ir.Value, gradient: ir.Value) -> ir.Value:
    assert gradient.shape is not None
    norm.shape = ir.Shape([gradient.shape[0]])
    if gradient.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        norm.dtype = ir.DataType.FLOAT
    return norm


def _before_layout_changes(gradient: ir.Value) -> ir.Value:
    """The value before changes of layout that keep the samples on the first axis, which do not change the norm."""
    while True:
        node = gradient.producer()
        source = node.inputs[0] if node is not None and (is_view(node) or is_op(node, "Transpose")) else None
        if node is None or source is None or not _same_first(source, gradient):
            return gradient
        if node.op_type == "Transpose" and node.attributes["perm"].as_ints()[0] != 0:
            return gradient
        gradient = source


def _same_first(a: ir.Value, b: ir.Value) -> bool:
    return bool(a.shape and b.shape and dims_equal(a.shape[0], b.shape[0]))


def _paired(node: ir.Node) -> bool:
    """Whether a MatMul multiplies one pair of matrices per sample."""
    a, b = node.inputs
    if a is None or b is None or any(v.shape is None or len(v.shape) != 3 for v in (a, b)):
        return False
    return _same_first(a, b)
