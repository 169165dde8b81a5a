"""The stages of every transformation, in order: read, canonicalize, differentiate, simplify, lower, recompute, verify."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.backends.cpu.batch_statistics import ShareBatchStatistics
from onnx_convgrad.backends.cpu.pooled_slopes import MoveSlopesBehindPools
from onnx_convgrad.backends.cuda.channel_factors import MoveChannelFactors
from onnx_convgrad.backends.narrow_gradients import NarrowWeightGradients
from onnx_convgrad.base.names import as_names
from onnx_convgrad.base.version import __version__
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import first_few
from onnx_convgrad.frontend.diagnose import judged
from onnx_convgrad.frontend.exporters.separate_merged import merge_again
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.frontend.opset.newer import restore_newer
from onnx_convgrad.frontend.parameter_warnings import warn_of_quantized
from onnx_convgrad.frontend.parts import Parts, chosen_parts, split_parts
from onnx_convgrad.frontend.quantized import mark_quantized, unmark_quantized
from onnx_convgrad.frontend.roles import note_roles
from onnx_convgrad.frontend.selection import resolve_of, resolve_wrt
from onnx_convgrad.frontend.verify import verify
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import mark_varying
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op, subgraphs
from onnx_convgrad.ir.notes import GRADIENTS, ORIGIN, SEEDS
from onnx_convgrad.ir.passes import RemoveUnused, note_step, run_passes
from onnx_convgrad.ir.serialize import completed, whole_proto
from onnx_convgrad.ir.targets import Target, target_named
from onnx_convgrad.lowering.cost.calibration import calibrated
from onnx_convgrad.lowering.cost.stored import worth_storing
from onnx_convgrad.lowering.loops import record_loops, undo_loops
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.memory.budget import BudgetError, Fit, Plan, fit
from onnx_convgrad.memory.in_place import WriteInPlace
from onnx_convgrad.memory.order import SortByDepth
from onnx_convgrad.memory.recompute import Recomputation, RecomputeValues, mark_boundary
from onnx_convgrad.pipeline.budgeted import check_possible, remembered, within_budget
from onnx_convgrad.pipeline.modes import set_training, training_passes
from onnx_convgrad.pipeline.options import Names, Options
from onnx_convgrad.pipeline.planned import attempts, fit_provider, lower_graph, narrow_activations
from onnx_convgrad.pipeline.transforms import Derivatives, Mode, check_targets

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Completion:
    """The decisions of the stages after differentiation, and the proto that was verified: a `skeleton` of the model."""

    choices: tuple[Choice, ...] = ()
    recomputation: Recomputation | None = None
    memory: Fit | None = None
    checked: onnx.ModelProto | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """A transformed model, the canonical model before differentiation, and the decisions made.

    `gradients` maps each differentiated value to the graph output with its derivative.
    """

    model: ir.Model
    primal: ir.Model
    gradients: dict[str, str]
    completion: Completion = Completion()

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self.completion.choices

    def proto(self) -> onnx.ModelProto:
        """The model as a proto with all its weights, if they fit."""
        checked = self.completion.checked
        return whole_proto(self.model) if checked is None else completed(checked, self.model)


@dataclass(frozen=True, slots=True)
class Derived:
    """What differentiation leaves for the later stages.

    Attributes:
        primal: The canonical model before differentiation.
        names: The differentiated values; their derivatives are the last graph outputs, in the same order.
        forward: The nodes from before differentiation.
    """

    primal: ir.Model
    names: tuple[str, ...]
    forward: list[ir.Node]

    def note_gradients(self, m: ir.Model) -> dict[str, str]:
        """Write the map from each value to the graph output with its derivative into the metadata, and return it."""
        outputs = [value.name or "" for value in m.graph.outputs]
        gradients = dict(zip(self.names, outputs[len(outputs) - len(self.names) :], strict=True))
        m.metadata_props[GRADIENTS] = json.dumps(gradients)
        return gradients


def target_of(options: Options) -> Target:
    """The target with the measured speeds of this machine, by which bodies store results."""
    target = calibrated(target_named(options.target, deterministic=options.deterministic))
    return replace(target, stored=partial(worth_storing, target.rates))


@judged
def build(
    model: AnyModel,
    options: Options,
    *,
    mode: Mode = "augment",
    compare: bool = False,
    lower: bool = True,
    own_operators: bool = False,
    progress: Progress = lambda _: None,
) -> Built:
    """Run all stages; errors as for `onnx_convgrad.augment`.

    Args:
        model: As for `onnx_convgrad.load`.
        options: The arguments of the transformation.
        mode: Which transformation.
        compare: Price every lowering, even where one is forced: for reports.
        lower: Run the stages after differentiation.
        own_operators: Compute the outputs with the operators and the opset of the model, for the CPU.
        progress: Called with the name of each stage.
    """
    progress("reading")
    loaded = load_with(model, options)

    def run(options: Options, target: Target) -> Built:
        return _build(
            loaded, options, target, mode, progress, compare=compare, lower=lower, own_operators=own_operators
        )

    return within_budget(options, target_of(options), run, lambda built: built.model)


def _build(
    loaded: Model,
    options: Options,
    target: Target,
    mode: Mode,
    progress: Progress,
    *,
    compare: bool,
    lower: bool,
    own_operators: bool,
) -> Built:
    m = copy_of(loaded, options)
    wrt: Names = options.wrt if not isinstance(options.wrt, Mapping) else _split(m.graph, options.wrt)
    progress("differentiating")
    derived = derive(m, wrt, options, target, mode)
    if not lower:
        return Built(m, derived.primal, derived.note_gradients(m))
    note_step("differentiate", "Add the derivatives as abstract operators.", m.graph)
    completion = complete(
        m,
        derived.primal,
        options,
        target,
        progress=progress,
        forward=derived.forward,
        compare=compare,
        own_operators=own_operators and not options.training and target.on_cpu,
    )
    return Built(m, derived.primal, derived.note_gradients(m), completion)


def _split(graph: ir.Graph, wrt: Parts) -> list[str]:
    """Make the chosen channels values of their own, in place; return the names of what is differentiated."""
    names, parts = chosen_parts(graph, wrt)
    split_parts(graph, parts)
    note_roles(graph)
    return names


def load_with(model: AnyModel, options: Options) -> Model:
    """Load a model, with those of the options that are arguments of `load`."""
    return load(
        model,
        input_shapes=options.input_shapes,
        input_values=options.input_values,
        limits=options.limits,
        base_dir=options.base_dir,
    )


def left_of(options: Options) -> Options:
    """The options that are left once the model is loaded."""
    return replace(options, input_shapes=None, input_values=None, limits=None, base_dir=None)


def copy_of(loaded: Model, options: Options) -> ir.Model:
    """A copy of the canonical model, to be differentiated in place.

    If `wrt` is inputs alone, values that the exporter merged are one again.
    """
    m = cloned(loaded.canonical)
    if not set(as_names(options.wrt, "wrt")) - {"inputs", *(value.name for value in m.graph.inputs)}:
        merge_again(m.graph)
    undo_loops(m)
    return m


def derive(m: ir.Model, wrt: Names, options: Options, target: Target, mode: Mode) -> Derived:
    """Differentiate a canonical model in place: seeds become graph inputs and derivatives the last graph outputs."""
    graph = m.graph
    sources, targets = resolve_wrt(graph, wrt), resolve_of(graph, options.of)
    check_targets(targets, mode)
    primal, statistics = _prepare(m, options, target, sources, targets)
    if options.straight_through:
        marks = mark_quantized(graph, sources)
        sources, targets = ([marks.get(v, v) for v in values] for values in (sources, targets))
    else:
        warn_of_quantized(graph)
    forward = list(graph)
    e = Emitter(graph, opsets=graph.opset_imports, target=target, joint=options.lowering != "exact")
    derivatives = Derivatives(e, sources, targets)
    results = derivatives.emit(mode, options)
    m.metadata_props[SEEDS] = json.dumps(derivatives.seeds)
    if mode in ("augment", "jvp"):
        graph.outputs.extend(derivatives.claim(v, f"{name}_next") for name, v in statistics if not v.is_graph_output())
    else:
        graph.outputs.clear()
    graph.outputs.extend(results.values())
    if options.trainable_inputs:
        graph.inputs.extend(v for v in sources if v.is_initializer() and not v.is_graph_input())
    return Derived(primal, tuple(value.name or "" for value in results), forward)


def _prepare(
    m: ir.Model, options: Options, target: Target, sources: list[ir.Value], targets: list[ir.Value]
) -> tuple[ir.Model, list[tuple[str, ir.Value]]]:
    """Set training mode and share statistics, in place; return the primal model and the updated running statistics."""
    graph, training = m.graph, options.training
    statistics = set_training(graph) if training else []
    mark_varying(graph, sources)
    kept = {*sources, *targets, *(() if training else graph.outputs)}
    sharing = ShareBatchStatistics(kept)
    if not options.per_sample:  # per sample, batch statistics are refused
        run_passes(m, [sharing])
    primal = cloned(m)
    if training and options.lowering != "exact":
        run_passes(m, training_passes(target, {*sources, *targets}))
    return primal, [(name, sharing.moved.get(value, value)) for name, value in statistics]


def complete(
    m: ir.Model,
    primal: ir.Model,
    options: Options,
    target: Target,
    *,
    progress: Progress = lambda _: None,
    forward: Collection[ir.Node] | None = None,
    compare: bool = False,
    own_operators: bool = False,
    following: Mapping[str, str] | None = None,
) -> Completion:
    """Run the stages after differentiation, in place: simplify, lower, recompute, fit the provider, verify.

    `primal` is the model before differentiation, for complaints that it shares; `forward` are its nodes, without which
    nothing is recomputed. `compare` prices every lowering, even where one is forced. `own_operators`: see `build`. With a
    memory budget, outputs in `following` are written over the inputs that they follow, where that is possible.
    """
    graph, budget = m.graph, options.memory_budget
    unmark_quantized(graph)
    moves = [NarrowWeightGradients(target), MoveSlopesBehindPools(target), MoveChannelFactors(target)]
    run_passes(m, [*moves, RemoveUnused()])
    found, plan = None, Plan(max_workspace=options.max_workspace)
    names: Names | float | None = None if forward is None else options.recompute
    if budget is not None and forward is not None:
        progress("fitting the memory")
        if target.stored:
            check_possible(graph, budget)
        try:
            tries = attempts(m, options, target, forward, following or {})
            found = fit(remembered(tries, target), budget, options.max_workspace)
        except BudgetError as tight:
            tight.loops = target.stored is not None and any(any(subgraphs(node)) for node in graph)
            raise
        plan, names = found.plan, found.plan.recompute or None
    progress("lowering")
    marked = forward is not None and (names is not None or options.activation_precision is not None)
    mark = mark_boundary(graph, [n for n in forward or () if n.graph is graph]) if marked else None
    choices = lower_graph(graph, options, target, plan.max_workspace, compare=compare)
    note_step("lower", "Replace abstract operators by the cheapest of their lowerings.", graph)
    narrow_activations(m, options, target, mark)
    if names is not None:
        progress("recomputing")
    recomputing = None if mark is None or names is None else RecomputeValues(target, mark, names)
    fit_provider(m, options, target, recomputing)
    progress("verifying")
    if budget is not None and plan.in_place:
        run_passes(m, [RemoveUnused(), WriteInPlace(following or {})])
    _clean_up(m)
    if found is not None:
        run_passes(m, [SortByDepth()])
    if own_operators:
        restore_newer(m)
    note_step("clean up", "Remove unused nodes and name the new ones.", graph)
    if target.ordered_sums:
        _warn_of_unordered_sums(graph, target.name)
    recomputation = None if recomputing is None else recomputing.report
    return Completion(tuple(choices), recomputation, found, verify(m, primal))


def _warn_of_unordered_sums(graph: ir.Graph, target: str) -> None:
    """Name the sums that no lowering can order: those at indices known only at run time."""
    scatters = (node for node in graph if is_op(node, "ScatterElements", "ScatterND"))
    unordered = [node.name or "unnamed" for node in scatters if Call(node).string("reduction", "none") == "add"]
    if unordered:
        warn(f"On {target} these nodes still add at repeated indices in no fixed order: {first_few(unordered)}.")


def _clean_up(m: ir.Model) -> None:
    """Remove unused nodes and opsets, and name the new nodes after their forward nodes."""
    RemoveUnused()(m)
    common.RemoveUnusedOpsetsPass()(m)
    counts: dict[str, int] = {}
    taken = {node.name for node in m.graph}  # the model may be differentiated already
    for node in m.graph:
        origin = node.metadata_props.pop(ORIGIN, None)
        if origin is not None:
            counts[origin] = counts.get(origin, 0) + 1
            while f"{origin}/grad_{counts[origin]}" in taken:
                counts[origin] += 1
            node.name = f"{origin}/grad_{counts[origin]}"
    for node in m.graph.all_nodes():
        node.metadata_props.pop(ORIGIN, None)
    record_loops(m)
    m.producer_name, m.producer_version = "onnx_convgrad", __version__
