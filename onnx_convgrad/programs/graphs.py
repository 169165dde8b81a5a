"""Build the graphs of a training program, each on a copy of the canonical model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.base.limits import limits_of
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.quantized import mark_quantized
from onnx_convgrad.ir.constants import mark_replaceable
from onnx_convgrad.ir.emit import Emitter, empty_model
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.notes import MANIFEST
from onnx_convgrad.ir.passes import run_passes
from onnx_convgrad.ir.targets import Target
from onnx_convgrad.memory.budget import BudgetError, amounts
from onnx_convgrad.pipeline.budgeted import within_budget
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.modes import set_inference, training_passes
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.exchanges import add_exchanges
from onnx_convgrad.programs.inference import inference_model
from onnx_convgrad.programs.integers import Rounding, spell_out
from onnx_convgrad.programs.losses.elementwise import reduce
from onnx_convgrad.programs.manifest import Manifest, Port, State
from onnx_convgrad.programs.masks import initial_state
from onnx_convgrad.programs.masters import AVERAGE, AVERAGE_MASTER, MASTER
from onnx_convgrad.programs.plan import ProgramPlan, create_manifest, with_summands
from onnx_convgrad.programs.precision import NARROW, to_narrow
from onnx_convgrad.programs.privacy import (
    EXPECTED,
    NOISE,
    add_noise,
    clipped_gradients,
    first_noise,
    sample_losses,
)
from onnx_convgrad.programs.reading import read
from onnx_convgrad.programs.summands import (
    COUNTS,
    SHARE,
    Counter,
    Facts,
    Summands,
    emitted,
    scaled,
    share_of_union,
    summands,
)
from onnx_convgrad.programs.terms import Term
from onnx_convgrad.programs.training_mode import rounded_statistic, set_training
from onnx_convgrad.programs.update import update

GraphName = Literal["step", "gradients", "update", "evaluate", "inference", "synchronized", "shared", "counts"]

PARTS: tuple[GraphName, ...] = ("step", "gradients", "update", "evaluate", "inference")
"""The graphs of every program."""

_USES = {
    "gradients": "the graph of gradients, which several batches per update and several processes run,",
    "synchronized": "the graph of gradients with the statistics of all processes",
    "update": "the graph that updates from given gradients",
    "evaluate": "the evaluation",
}
"""Graph -> what it is for, as the subject of a sentence."""


def parts_of(manifest: Manifest) -> tuple[GraphName, ...]:
    """The graphs of a program; those after the first five are for joining batches and ranks, where they are needed."""
    more: list[GraphName] = ["synchronized"] if manifest.options.get("sync_batchnorm") else []
    ways = [summand["joining"] for summand in manifest.summands()]
    alike = len(ways) == 1 or set(ways) in ({"samples"}, {"sum"})  # one factor for all gradients of a batch suffices
    if not alike and "privacy" not in manifest.options and not more:
        more.append("shared")
    if "count" in ways:
        more.append("counts")
    return (*PARTS, *more)


@dataclass(frozen=True, slots=True)
class Forward:
    """Values of a forward pass.

    Attributes:
        loss: The loss.
        terms: Its terms.
        summands: The summands of each term.
        following: The updates of statistics and random state by name.
        outputs: The values that the terms read.
        samples: The sum of the losses of all samples, in private training.
        share: The share of this batch in each summand of the loss of the union, in the graphs `synchronized` and `shared`.
        reals: Parameter stored as integers -> its real numbers, whose cotangent is its gradient.
    """

    loss: ir.Value
    terms: tuple[ir.Value, ...]
    summands: tuple[Summands, ...]
    following: dict[str, ir.Value]
    outputs: tuple[ir.Value, ...]
    samples: ir.Value | None = None
    share: ir.Value | None = None
    reals: Mapping[str, ir.Value] = field(default_factory=dict)


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
        self._tensors: dict[str, ir.TensorProtocol] = {}
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
        with limits_of(self.plan.model.limits):
            m = self._inference() if part == "inference" else self._counts() if part == "counts" else self._built(part)
        m.metadata_props[MANIFEST] = self.manifest.to_json()
        return m

    def _built(self, part: GraphName) -> ir.Model:
        def make(options: Options, target: Target) -> Built:
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
            m = within_budget(replace(options, memory_budget="min"), self.plan.target, make).model
            budget, needed = amounts(tight.wanted, tight.least)
            warn(
                f"The step keeps memory_budget={options.memory_budget!r}, but {_USES[part]} cannot keep its"
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
            draft = Draft(self.plan.base, self.plan.target)
            self._add_results(draft, self._forward(draft, part))
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

    def _inference(self) -> ir.Model:
        return inference_model(self.plan.model, [entry.name for entry in self.manifest.stored()])

    def _counts(self) -> ir.Model:
        """The number that each summand of the loss is joined by, from data and targets."""
        draft = Draft(self.plan.base, self.plan.target)
        forward = self._forward(draft, "counts")
        counter = Counter(draft.e, self._facts(draft))
        counts = [counter.count(s) if s.joining == "count" else counter.samples() for s in sum(forward.summands, ())]
        total = draft.e.concat([draft.e.reshape(c, [1]) for c in counts], 0)
        draft.graph.outputs.clear()
        draft.output(total, draft.e.names.claim(COUNTS))
        draft.graph.outputs.append(total)
        draft.graph.sort()
        common.RemoveUnusedNodesPass()(draft.m)
        kept = {port.name for port in (*self.manifest.data, *self.manifest.targets)}
        for value in [v for v in draft.graph.inputs if not v.uses() or v.name not in kept]:
            draft.graph.inputs.remove(value)
            draft.graph.initializers.pop(value.name or "", None)
        return draft.m

    # -- differentiation and update ------------------------------------------------------------------------------------

    def _premultiplied(self, part: GraphName) -> bool:
        """Whether gradients are those of the loss times the learning rate: a pass over all parameters less in a step.

        Not with float16 values without a loss scale, or float16 parameters: a small gradient would become zero.
        """
        values = named_values(self.plan.base.graph)
        seen = values.values() if self.plan.scale is None else (values[name] for name in self.plan.parameters)
        half = any(v.dtype == ir.DataType.FLOAT16 for v in seen)
        return part == "step" and self.plan.optimizer.is_linear() and not half and self.plan.privacy is None

    def _rate(self, draft: Draft) -> ir.Value:
        return draft.input(self.manifest.learning_rate, np.asarray(self.manifest.optimizer["lr"], np.float32))

    def _differentiate(self, part: GraphName) -> Differentiated:
        draft = Draft(self.plan.base, self.plan.target)
        forward = self._forward(draft, part)
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
        e, rate = draft.e, self._rate(draft) if self._premultiplied(part) else None
        scale = next((self._stored(draft, s) for s in self.manifest.state if s.slot == "loss_scale"), None)
        with draft.named("seed"):
            seed = e.full_like(forward.loss, 1)
            for factor in (rate if scale is None else None, scale):
                if factor is not None:
                    seed = e.typed(e.mul(seed, e.cast(factor, seed.dtype or ir.DataType.FLOAT)), seed)
        draft.forward = list(draft.graph)
        cotangents = backward(e, {forward.loss: seed}, dict.fromkeys(sources.values()))
        gradients = scaled = {name: cotangents[v] for name, v in sources.items() if v in cotangents}
        if scale is not None:
            with draft.named("loss_scale"):
                inverse = e.op("Reciprocal", scale) if rate is None else e.div(rate, scale)
                gradients = {k: e.mul(g, e.cast(inverse, g.dtype or ir.DataType.FLOAT)) for k, g in scaled.items()}
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
        state = {s.name: self._stored(draft, s) for s in self.manifest.state if s.kind == "optimizer"}
        optimizer, scale, rate, m = self.plan.optimizer, self.plan.scale, self._rate(draft), self.manifest
        following: dict[str, ir.Value] = {}
        if self.plan.privacy is not None:
            gradients, following = add_noise(draft, m, self.plan.privacy, gradients, state)
        done, early = state[m.slot("step")], self._premultiplied(part)
        rounding = Rounding.of(draft.e, self.plan.base.graph, parameters, done, self.plan.seed)
        return following | update(
            draft, m, optimizer, scale, parameters, gradients, state, rate, rounding, scaled=scaled, premultiplied=early
        )

    # -- forward pass --------------------------------------------------------------------------------------------------

    def _forward(self, draft: Draft, part: GraphName) -> Forward:
        """Switch the model to training or inference mode and emit the loss."""
        plan, training = self.plan, part not in ("evaluate", "counts")
        targets = {port.name: draft.input(port) for port in self.manifest.targets}
        for name in (*plan.parameters, *plan.statistics()):
            if draft.values[name] not in draft.graph.inputs:
                draft.graph.inputs.append(draft.values[name])
        reals = spell_out(draft.e, plan.parameters)
        if reals:
            draft.restart()
        if plan.precision in NARROW and training:
            to_narrow(draft, NARROW[plan.precision])
            draft.restart()
        names = [self._read(draft, term).name or "" for term in plan.terms]
        following: dict[str, ir.Value] = {}
        if training:
            following = self._set_training(draft, part)
            draft.restart()  # nodes were replaced
            if plan.options.lowering != "exact":
                kept = [*draft.graph.outputs, *following.values(), *reals.values()]
                keep = {*kept, *(draft.values[name] for name in names)}
                run_passes(draft.m, training_passes(plan.target, keep))
        else:
            set_inference(draft.graph)
        draft.restart()
        e = draft.e
        wanted = [list(t.targets(draft.values[name])) for t, name in zip(plan.terms, names, strict=True)]
        by_name = dict(zip(dict.fromkeys(n for several in wanted for n in several), targets.values(), strict=True))
        values, samples, facts, share = [], [], self._facts(draft), None
        divided: list[Summands] = []
        if part in ("shared", "synchronized"):
            share = draft.input(Port(e.names.claim(SHARE), "float32", (len(self.manifest.summands()),)))
        with draft.named("loss"):
            for term, name, several in zip(plan.terms, names, wanted, strict=True):
                y, operands = draft.values[name], [by_name[n] for n in several]
                value, own = (y, summands(y, facts)) if term.loss is None else emitted(e, term.loss, y, operands, facts)
                if share is not None:
                    own = share_of_union(e, own, share, first=sum(len(before) for before in divided))
                    value = e.sum([scaled(e, summand) for summand in own])
                values.append(value)
                divided.append(own)
                if training and plan.privacy is not None and term.loss is not None:
                    samples.append(e.mul(sample_losses(e, term.loss, y, operands), term.weight))
            total = _total(e, values, [t.weight for t in plan.terms])
            private = reduce(e, e.sum(samples), "sum") if samples else None
        read = tuple(draft.values[name] for name in names)
        return Forward(total, tuple(values), tuple(divided), following, read, private, share, reals)

    def _facts(self, draft: Draft) -> Facts:
        inputs = {v.name: v for v in draft.graph.inputs}
        given = tuple(inputs[port.name] for port in (*self.manifest.data, *self.manifest.targets))
        own = frozenset(draft.values[name] for name in (*self.plan.parameters, *self.plan.statistics()))
        return Facts(given, own, given[:1])

    @staticmethod
    def _read(draft: Draft, term: Term) -> ir.Value:
        """The value that the loss of a term reads."""
        y = draft.values[term.output or ""]
        with draft.named("loss"):
            return y if term.loss is None else read(draft.e, y, term.loss, term.reads or "")

    def _set_training(self, draft: Draft, part: GraphName) -> dict[str, ir.Value]:
        """Switch to training mode; return the updates of statistics and random state by name."""
        plan, state, together = self.plan, None, part == "synchronized"
        entry = next((s for s in self.manifest.state if s.kind == "random"), None)
        if entry is not None:
            state = draft.input(entry, np.asarray(initial_state(plan.seed), entry.dtype))
        wide = {s.of or "": self._stored(draft, s) for s in self.manifest.state if s.kind == "wide statistic"}
        following = set_training(draft, plan.frozen, unbiased=plan.unbiased, state=state, together=together, wide=wide)
        draft.restart()
        following |= {s.name: following[s.of] for s in self.manifest.state if s.kind == "wide statistic" and s.of}
        for name in plan.statistics():
            if following[name].dtype != draft.values[name].dtype:
                with draft.named(f"{name}/rounded"):
                    following[name] = rounded_statistic(draft.e, following[name], draft.values[name])
        if entry is not None and state is not None:
            draft.restart()
            with draft.named("masks"):
                following[entry.name] = draft.e.add(state, 1)
        return following

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
        """Make the next values outputs of the graph, in the order of the manifest."""
        for entry in self.manifest.moving():
            if entry.name in following:
                draft.output(following[entry.name], entry.next)

    def _stored(self, draft: Draft, s: State) -> ir.Value:
        """The input of a state, with its initial value as the default."""
        if s.name not in self._tensors:
            start: Any = 0.0
            if s.slot == "loss_scale" and self.plan.scale is not None:
                start = self.plan.scale.initial
            elif s.slot in (NOISE, EXPECTED):
                start = first_noise(self.plan.seed) if s.slot == NOISE else 1
            elif s.slot in (AVERAGE, MASTER, AVERAGE_MASTER):
                tensor = self.plan.base.graph.initializers[s.of or ""].const_value
                start = tensor if tensor is None or s.slot == AVERAGE else tensor.numpy().astype(s.dtype)
            elif s.of is not None:
                start = self.plan.optimizer.of(s.of)[0].state()[s.slot or ""]
            self._tensors[s.name] = ir.Tensor(np.full(s.static_shape(), start, s.dtype), name=s.name)
        return draft.input(s, self._tensors[s.name])


def _total(e: Emitter, values: list[ir.Value], weights: list[float]) -> ir.Value:
    """The weighted sum of the terms; if there are several, each is summed over its entries first."""
    if len(values) == 1:
        return e.mul(values[0], weights[0])
    scalars = [reduce(e, v, "sum") for v in values]
    return e.sum(
        [e.mul(e.cast(v, scalars[0].dtype or ir.DataType.FLOAT), w) for v, w in zip(scalars, weights, strict=True)]
    )
