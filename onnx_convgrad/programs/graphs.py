"""Build the graphs of a training program, each on a copy of the canonical model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.base.collection import without_collections
from onnx_convgrad.base.limits import limits_of
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.quantized import mark_quantized
from onnx_convgrad.ir.constants import mark_replaceable
from onnx_convgrad.ir.emit import empty_model
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.notes import MANIFEST
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.ir.targets import TargetInfo
from onnx_convgrad.memory.budget import BudgetError, amounts
from onnx_convgrad.pipeline.budgeted import within_budget
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.programs.counter import Counter
from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.exchanges import add_exchanges
from onnx_convgrad.programs.forward import Forward, facts_of_draft, forward_pass
from onnx_convgrad.programs.graph_names import GraphName
from onnx_convgrad.programs.inference import inference_model
from onnx_convgrad.programs.plan import ProgramPlan, create_manifest, with_summands
from onnx_convgrad.programs.privacy import add_noise, clipped_gradients
from onnx_convgrad.programs.summands import COUNTS, scaled
from onnx_convgrad.programs.update import learning_rate, update

_USES = {
    "gradients": "the graph of gradients, which several batches per update and several processes run,",
    "synchronized": "the graph of gradients with the statistics of all processes",
    "update": "the graph that updates from given gradients",
    "evaluate": "the evaluation",
}
"""Graph -> what it is for, as the subject of a sentence."""


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A draft with forward and backward pass, and the gradient of each parameter."""

    draft: Draft
    forward: Forward
    gradients: dict[str, ir.Value]
    scaled: dict[str, ir.Value] | None = None


class Builder:
    """Builds the parts of a plan on demand; parameters without effect on the loss are left out with a warning."""

    def __init__(self, plan: ProgramPlan, options: dict[str, Any]) -> None:
        self.plan = plan
        fixed = plan.fixed()
        if fixed:  # their numbers must not become part of the graphs
            mark_replaceable(plan.base.graph, (plan.base.graph.initializers[name] for name in fixed))
            options = options | {"frozen": list(fixed)}
        self.manifest = create_manifest(plan, options)
        first = self._differentiate("step")
        missing = [repr(name) for name in plan.parameters if name not in first.gradients]
        if len(missing) == len(plan.parameters):
            raise ArgumentError(
                "The loss does not depend on any of the parameters.", hint="Check the arguments loss, wrt and freeze."
            )
        if missing:
            warn(f"Not trained, since the loss does not depend on it: {first_few(missing)}.")
            self.plan = replace(plan, parameters=tuple(n for n in plan.parameters if n in first.gradients))
            self.manifest = create_manifest(self.plan, options)
        self.manifest = with_summands(self.manifest, plan.base.graph, first.forward.summands)
        self._first: Differentiated | None = first

    def build(self, part: GraphName) -> ir.Model:
        """Build one graph of the program."""
        with limits_of(self.plan.model.limits), without_collections():
            if part == "inference":
                m = inference_model(self.plan.model, [entry.name for entry in self.manifest.stored()])
            else:
                m = self._counts() if part == "counts" else self._built(part)
        m.metadata_props[MANIFEST] = self.manifest.to_json()
        return m

    def _built(self, part: GraphName) -> ir.Model:
        def make(options: Options, target: TargetInfo) -> Built:
            plan = self.plan
            self.plan = replace(plan, target=target)
            if target.stored is None:
                self._first = None  # its loops store results
            try:
                return self._draft(part).seal(options, self.manifest)
            finally:
                self.plan = plan

        options = self.plan.options
        try:
            return within_budget(options, self.plan.target, make).model
        except BudgetError as tight:
            if part == "step":
                raise
            least = replace(options, memory=replace(options.memory, budget="min"))
            m = within_budget(least, self.plan.target, make).model
            budget, needed = amounts(tight.wanted, tight.least)
            warn(
                f"The step keeps the memory budget {options.memory.budget!r}, but {_USES[part]} cannot keep its"
                f" {budget}: it takes as little as possible, about {needed}."
            )
            return m

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _draft(self, part: GraphName) -> Draft:
        """The graph of a part, with its outputs."""
        if part == "step":
            return self._step()
        if part == "update":
            return self._update()
        if part == "evaluate":
            draft, forward = self._forward(part)
            self._add_results(draft, forward)
            return draft
        done = self._differentiate(part)
        draft = done.draft
        if part == "synchronized":  # see `programs.exchanges`
            add_exchanges(draft, done.forward.share).write(draft.m)
        self._add_results(draft, done.forward)
        for p in self.manifest.parameters:
            draft.output(done.gradients[p.name], p.gradient)
        self._add_next(draft, done.forward.following)
        return draft

    def _step(self) -> Draft:
        done = self._first or self._differentiate("step")
        self._first = None  # a draft is sealed once
        draft = done.draft
        updated = {self.manifest.learning_rate.name, *(entry.name for entry in self.manifest.moving())}
        for value in [v for v in draft.graph.inputs if v.is_initializer() and v.name not in updated]:
            draft.graph.inputs.remove(value)  # a parameter that is not trained, since the loss does not depend on it
        parameters = {p.name: draft.values[p.name] for p in self.manifest.parameters}
        following = self._updates("step", draft, parameters, done.gradients, done.scaled)
        self._add_results(draft, done.forward)
        self._add_next(draft, {**following, **done.forward.following})
        return draft

    def _update(self) -> Draft:
        draft = Draft(empty_model("update"), self.plan.target)
        stored, entries = self.plan.base.graph.initializers, self.manifest.parameters
        parameters = {p.name: draft.input(p, stored[p.name].const_value) for p in entries}
        gradients = {p.name: draft.input(p.slope) for p in entries}
        self._add_next(draft, self._updates("update", draft, parameters, gradients))
        return draft

    def _counts(self) -> ir.Model:
        """The number that each summand of the loss is joined by, from data and labels."""
        draft, forward = self._forward("counts")
        counter = Counter(draft.e, facts_of_draft(draft, self.plan, self.manifest))
        counts = [counter.count(s) if s.joining == "count" else counter.samples() for s in sum(forward.summands, ())]
        total = draft.e.concat([draft.e.reshape(c, [1]) for c in counts], 0)
        draft.graph.outputs.clear()
        draft.output(total, draft.e.names.claim(COUNTS))
        draft.graph.outputs.append(total)
        draft.graph.sort()
        RemoveUnused()(draft.m)
        kept = {port.name for port in (*self.manifest.data, *self.manifest.targets)}
        for value in [v for v in draft.graph.inputs if not v.uses() or v.name not in kept]:
            draft.graph.inputs.remove(value)
            draft.graph.initializers.pop(value.name or "", None)
        return draft.m

    # -- differentiation and update ------------------------------------------------------------------------------------

    def _forward(self, part: GraphName) -> tuple[Draft, Forward]:
        """A new draft with a forward pass."""
        draft = Draft(self.plan.base, self.plan.target)
        return draft, forward_pass(draft, self.plan, self.manifest, part)

    def _premultiplied(self, part: GraphName) -> bool:
        """Whether gradients are those of the loss times the learning rate: a pass over all parameters less in a step.

        Not with float16 values without a loss scale, or float16 parameters: a small gradient would become zero.
        """
        values = named_values(self.plan.base.graph)
        seen = values.values() if not self.plan.precision.scaled else (values[name] for name in self.plan.parameters)
        half = any(v.dtype == ir.DataType.FLOAT16 for v in seen)
        plain = not half and self.plan.privacy is None and self.manifest.grad_norm is None
        return part == "step" and self.plan.optimizer.is_linear() and plain

    def _differentiate(self, part: GraphName) -> Differentiated:
        draft, forward = self._forward(part)
        sources = {name: forward.reals.get(name, draft.values[name]) for name in self.plan.parameters}
        marks = mark_quantized(draft.graph, sources.values(), even_steps=self.plan.quantization == "lsq")
        if marks:
            draft.restart()
            forward = replace(forward, loss=marks.get(forward.loss, forward.loss))
        if self.plan.privacy is not None and forward.samples is not None:
            draft.forward = list(draft.graph)
            norm = self.plan.privacy.max_norm
            clipped = clipped_gradients(draft.e, forward.samples, forward.outputs, sources, norm)
            return Differentiated(draft, forward, clipped)
        e, rate = draft.e, learning_rate(draft, self.manifest) if self._premultiplied(part) else None
        scale = next((draft.input(s, self.plan.first(s)) for s in self.manifest.state if s.slot == "loss_scale"), None)
        with draft.named("cotangent"):
            cotangent = e.full_like(forward.loss, 1)
            for factor in (rate if scale is None else None, scale):
                if factor is not None:
                    scaled_one = e.mul(cotangent, e.cast_like(factor, cotangent))
                    cotangent = e.typed(scaled_one, cotangent)
        draft.forward = list(draft.graph)
        cotangents = backward(e, {forward.loss: cotangent}, dict.fromkeys(sources.values()))
        gradients = scaled = {name: cotangents[v] for name, v in sources.items() if v in cotangents}
        if scale is not None:
            with draft.named("loss_scale"):
                inverse = e.op("Reciprocal", scale) if rate is None else e.div(rate, scale)
                gradients = {k: e.mul(g, e.cast_like(inverse, g)) for k, g in scaled.items()}
        return Differentiated(draft, forward, gradients, scaled)

    def _updates(
        self,
        part: GraphName,
        draft: Draft,
        parameters: Mapping[str, ir.Value],
        gradients: Mapping[str, ir.Value],
        scaled: Mapping[str, ir.Value] | None = None,
    ) -> dict[str, ir.Value]:
        """The next value of every parameter and of the optimizer's state."""
        state = {s.name: draft.input(s, self.plan.first(s)) for s in self.manifest.state if s.kind == "optimizer"}
        following: dict[str, ir.Value] = {}
        if self.plan.privacy is not None:
            gradients, following = add_noise(draft, self.manifest, self.plan.privacy, gradients, state)
        early = self._premultiplied(part)
        return following | update(
            draft, self.plan, self.manifest, parameters, gradients, state, scaled=scaled, premultiplied=early
        )

    # -- inputs and outputs --------------------------------------------------------------------------------------------

    def _add_results(self, draft: Draft, forward: Forward) -> None:
        """Make loss, terms and outputs of the model outputs of the graph."""
        m = self.manifest
        replaced = draft.values.get(m.loss)
        if replaced is not None and replaced is not forward.loss:  # in the graph `shared`, of a loss that the model has
            replaced.name = draft.e.names.claim(f"{m.loss}_whole")
        draft.output(forward.loss, m.loss)
        for name, value in zip(m.terms, forward.terms, strict=False):
            draft.output(value, name)
        for term, own in zip(m.losses, forward.summands, strict=True):
            if len(own) > 1:
                for entry, summand in zip(term["summands"], own, strict=True):
                    draft.output(scaled(draft.e, summand), entry["value"])
        results = {v.name: draft.graph.outputs[i] for i, v in enumerate(self.plan.base.graph.outputs)}
        for name in m.outputs:
            draft.output(results[name], name)

    def _add_next(self, draft: Draft, following: Mapping[str, ir.Value]) -> None:
        """Make outputs of the graph: the norms of gradients, then the next values, in the order of the manifest."""
        m = self.manifest
        norms = ((output, output) for output in m.grad_norms().values())
        for name, output in (*norms, *((entry.name, entry.next) for entry in m.moving())):
            if name in following:
                draft.output(following[name], output or "")
