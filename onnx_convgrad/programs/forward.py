"""The forward pass of a graph of a training program: mode, precision and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.passes import run_passes
from onnx_convgrad.pipeline.modes import set_inference, training_passes
from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.graph_names import GraphName
from onnx_convgrad.programs.integers import spell_out
from onnx_convgrad.programs.losses.elementwise import reduce
from onnx_convgrad.programs.manifest import Manifest, Port
from onnx_convgrad.programs.plan import ProgramPlan
from onnx_convgrad.programs.precision import NARROW, to_narrow
from onnx_convgrad.programs.privacy import sample_losses
from onnx_convgrad.programs.reading import read
from onnx_convgrad.programs.summands import SHARE, Facts, Summands, emitted, scaled, share_of_union, summands
from onnx_convgrad.programs.terms import Term
from onnx_convgrad.programs.training_mode import set_training

Weight: TypeAlias = float | ir.Value
"""The weight of a term: a number, or the input that a schedule moves."""

INFERENCE: tuple[GraphName, ...] = ("evaluate", "counts")
"""The graphs with a loss whose forward pass is in inference mode."""


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


def forward_pass(draft: Draft, plan: ProgramPlan, manifest: Manifest, part: GraphName) -> Forward:
    """Switch the model to training or inference mode and emit the loss."""
    targets = {port.name: draft.input(port) for port in manifest.targets}
    inputs = {name: draft.input(port) for name, port in manifest.term_weights.items()}
    names, following, reals = _switched(draft, plan, manifest, part)
    weights = [inputs[t["weight_input"]] if "weight_input" in t else t["weight"] for t in manifest.losses]
    e, private = draft.e, part not in INFERENCE and plan.privacy is not None
    wanted = [list(t.targets(draft.values[name])) for t, name in zip(plan.terms, names, strict=True)]
    by_name = dict(zip(dict.fromkeys(n for several in wanted for n in several), targets.values(), strict=True))
    values, samples, facts, share = [], [], facts_of_draft(draft, plan, manifest), None
    divided: list[Summands] = []
    if part in ("shared", "synchronized"):
        share = draft.input(Port(e.names.claim(SHARE), "float32", (len(manifest.summands()),)))
    mixed = part not in INFERENCE and plan.precision.dtype in NARROW
    with draft.named("loss"):
        for term, name, several, weight in zip(plan.terms, names, wanted, weights, strict=True):
            y, *more = (draft.values[n] for n in (name, *term.also))
            if mixed and term.loss is not None:  # inner values are narrow, labels are not
                y, *more = map(e.wide, (y, *more))
            operands = [*more, *(by_name[n] for n in several)]
            value, own = (y, summands(y, facts)) if term.loss is None else emitted(e, term.loss, y, operands, facts)
            if share is not None:
                own = share_of_union(e, own, share, first=sum(len(before) for before in divided))
                value = e.sum([scaled(e, summand) for summand in own])
            values.append(value)
            divided.append(own)
            if private and term.loss is not None:
                samples.append(_weighed(e, sample_losses(e, term.loss, y, operands), weight))
        total = _total(e, values, weights)
        summed = reduce(e, e.sum(samples), "sum") if samples else None
    outputs = tuple(draft.values[name] for name in names)
    return Forward(total, tuple(values), tuple(divided), following, outputs, summed, share, reals)


def _switched(
    draft: Draft, plan: ProgramPlan, manifest: Manifest, part: GraphName
) -> tuple[list[str], dict[str, ir.Value], Mapping[str, ir.Value]]:
    """Switch mode and precision; return the names of the values that the terms read, `following` and `reals`."""
    for name in (*plan.parameters, *plan.statistics()):
        if draft.values[name] not in draft.graph.inputs:
            draft.graph.inputs.append(draft.values[name])
    reals = spell_out(draft.e, plan.parameters)
    if reals:
        draft.restart()
    if plan.precision.dtype in NARROW and part not in INFERENCE:
        to_narrow(draft, NARROW[plan.precision.dtype])
    names = [_read(draft, term).name or "" for term in plan.terms]
    following: dict[str, ir.Value] = {}
    if part in INFERENCE:
        set_inference(draft.graph)
    else:
        following = set_training(draft, plan, manifest, together=part == "synchronized")
        if plan.options.target.lowering != "exact":
            kept = [*draft.graph.outputs, *following.values(), *reals.values()]
            keep = {*kept, *(draft.values[name] for name in (*names, *(n for term in plan.terms for n in term.also)))}
            run_passes(draft.m, training_passes(plan.target, keep))
    draft.restart()
    return names, following, reals


def facts_of_draft(draft: Draft, plan: ProgramPlan, manifest: Manifest) -> Facts:
    """The values of a draft that decide how batches are joined."""
    inputs = {v.name: v for v in draft.graph.inputs}
    given = tuple(inputs[port.name] for port in (*manifest.data, *manifest.targets))
    own = frozenset(draft.values[name] for name in (*plan.parameters, *plan.statistics()))
    return Facts(given, own, given[:1])


def _read(draft: Draft, term: Term) -> ir.Value:
    """The value that the loss of a term reads."""
    y = draft.values[term.output or ""]
    with draft.named("loss"):
        return y if term.loss is None else read(draft.e, y, term.loss, term.reads or "")


def _total(e: Emitter, values: list[ir.Value], weights: Sequence[Weight]) -> ir.Value:
    """The weighted sum of the terms; if there are several, each is summed over its entries first."""
    if len(values) == 1:
        return _weighed(e, values[0], weights[0])
    scalars = [reduce(e, v, "sum") for v in values]
    return e.sum([_weighed(e, e.cast_like(v, scalars[0]), w) for v, w in zip(scalars, weights, strict=True)])


def _weighed(e: Emitter, value: ir.Value, weight: Weight) -> ir.Value:
    """A term times its weight, a number or an input."""
    return e.mul(value, e.cast_like(weight, value) if isinstance(weight, ir.Value) else weight)
