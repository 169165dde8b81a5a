"""The stages behind every transformation: read, canonicalize, differentiate, simplify, lower, verify."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.backends.cpu.batch_statistics import ShareBatchStatistics
from onnx_convgrad.backends.cpu.fast_forms import UseFastForms
from onnx_convgrad.backends.cpu.pooled_slopes import MoveSlopesBehindPools
from onnx_convgrad.backends.runtime_faults import AvoidRuntimeFaults, SeparateTransposes
from onnx_convgrad.backends.unsupported_forms import ReplaceUnsupportedForms
from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.canonicalize import InputShapes, canonicalize
from onnx_convgrad.frontend.diagnose import judged
from onnx_convgrad.frontend.exporters.separate_merged import part_members, restore
from onnx_convgrad.frontend.files import AnyModel, load
from onnx_convgrad.frontend.parameters import resolve_of, resolve_wrt
from onnx_convgrad.frontend.verify import verify, verify_shapes
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import mark_varying
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import GRADIENTS, ORIGIN, SEEDS
from onnx_convgrad.ir.passes import run_passes
from onnx_convgrad.ir.targets import Target, target_named
from onnx_convgrad.lowering.candidates import Choosing, Policy
from onnx_convgrad.lowering.cost.calibration import calibrated
from onnx_convgrad.lowering.loops import take_loops_back, tell_loops
from onnx_convgrad.lowering.lower import Choice, check_choice, check_workspace, lower
from onnx_convgrad.memory.recompute import Recomputation, RecomputeValues, mark_boundary
from onnx_convgrad.pipeline.training import set_training, training_passes
from onnx_convgrad.pipeline.transforms import COMPOSITIONS, Derivatives, Mode, check_targets

__all__ = ["Built", "Names", "Progress", "build", "complete"]

Names = str | Sequence[str]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Built:
    """A transformed model with what was decided on the way."""

    model: ir.Model
    primal: ir.Model
    gradients: dict[str, str]
    choices: tuple[Choice, ...]
    recomputation: Recomputation | None = None


def _canonical(m: ir.Model, given: AnyModel, wrt: Names, input_shapes: InputShapes | None) -> ir.Model:
    """The loaded model in canonical form, with one initializer for each member of a module that may be in `wrt`."""
    if set(as_names(wrt, "wrt")) - {"inputs", *(value.name for value in m.graph.inputs)}:
        restore(m.graph)
    m = canonicalize(m, input_shapes)
    if input_shapes:
        verify_shapes(m, lambda: canonicalize(load(given)))
    part_members(m.graph)
    take_loops_back(m)
    return m


@judged
def build(
    model: AnyModel,
    *,
    mode: Mode = "augment",
    wrt: Names = "parameters",
    of: Names | None = None,
    seed: str | None = None,
    training: bool = False,
    per_sample: bool | str = False,
    trainable_inputs: bool = False,
    target: str = "cpu",
    deterministic: bool = False,
    lowering: Choosing = "auto",
    max_workspace: int | None = None,
    recompute: Names | None = None,
    input_shapes: InputShapes | None = None,
    composition: str = COMPOSITIONS[0],
    compare: bool = False,
    progress: Progress = lambda _: None,
) -> Built:
    """Run all stages; `progress` is told the name of each. Arguments and errors as for `onnx_convgrad.augment`.

    `compare` is for reports: every lowering is priced, where one is forced too.
    """
    if seed not in (None, "ones"):
        raise ArgumentError(f"seed must be None or 'ones', not {seed!r}.")
    check_names([composition], COMPOSITIONS, "composition")
    if per_sample not in (False, True, "squared_norm"):
        raise ArgumentError(f"per_sample must be False, True or 'squared_norm', not {per_sample!r}.")
    machine = calibrated(target_named(target, deterministic=deterministic))
    check_choice(lowering)
    check_workspace(max_workspace)
    progress("reading")
    m = load(model)
    progress("canonicalizing")
    m = _canonical(m, model, wrt, input_shapes)
    graph = m.graph
    sources, targets = resolve_wrt(graph, wrt), resolve_of(graph, of)
    running = set_training(graph) if training else []
    mark_varying(graph, sources)
    kept = {*sources, *targets, *(() if training else graph.outputs)}
    sharing = ShareBatchStatistics(kept)
    if not per_sample:  # there, the statistics of a batch are refused
        run_passes(m, [sharing])
    updated = [(name, sharing.moved.get(v, v)) for name, v in running]
    primal = m.clone()
    if training and lowering != "exact":
        run_passes(m, training_passes(machine, {*sources, *targets}))
    check_targets(targets, mode)
    progress("differentiating")
    before = list(graph)
    e = Emitter(graph, opsets=graph.opset_imports, target=machine, joint=lowering != "exact")
    job = Derivatives(e, sources, targets)
    if mode == "hvp":
        results = job.second(composition)
    elif per_sample:
        results = job.apart(seed, norms=per_sample == "squared_norm")
    else:
        results = job.first(mode, seed)
    m.metadata_props[SEEDS] = json.dumps(job.seeds)
    if mode in ("vjp", "grad", "hvp"):
        graph.outputs.clear()
    else:
        graph.outputs.extend(job.claim(v, f"{name}_next") for name, v in updated if not v.is_graph_output())
    graph.outputs.extend(results.values())
    if trainable_inputs:
        graph.inputs.extend(v for v in sources if v.is_initializer() and not v.is_graph_input())
    policy = Policy(lowering, max_workspace, training, compare)
    names = [value.name or "" for value in results]  # values of nodes that are replaced lose theirs
    choices, recomputation = complete(m, primal, machine, policy, progress, recompute=recompute, forward=before)
    found = dict(zip(names, [value.name or "" for value in graph.outputs][-len(names) :], strict=True))
    m.metadata_props[GRADIENTS] = json.dumps(found)
    return Built(m, primal, found, tuple(choices), recomputation)


def complete(
    m: ir.Model,
    primal: ir.Model,
    machine: Target,
    policy: Policy,
    progress: Progress = lambda _: None,
    *,
    recompute: Names | None = None,
    forward: Collection[ir.Node] = (),
) -> tuple[list[Choice], Recomputation | None]:
    """The stages after differentiation, in place: remove what is unused, lower, recompute, name the nodes, verify.

    `forward` holds the nodes that were there before differentiation; only `recompute` needs them.
    """
    run_passes(m, [MoveSlopesBehindPools(machine), common.RemoveUnusedNodesPass()])
    progress("lowering")
    mark = mark_boundary(m.graph, forward) if recompute is not None else None
    choices = lower(m.graph, machine, policy)
    done = None
    if mark is not None and recompute is not None:
        progress("recomputing")
        recomputing = RecomputeValues(machine, mark, recompute)
        run_passes(m, [recomputing])
        done = recomputing.report
    fast = [UseFastForms(machine, training=policy.training)] if machine.name == "cpu" else []
    run_passes(m, [AvoidRuntimeFaults(machine), ReplaceUnsupportedForms(machine), *fast, SeparateTransposes(machine)])
    progress("verifying")
    _finish(m)
    if machine.ordered_sums:
        _name_unordered(m.graph, machine.name)
    verify(m, primal)
    return choices, done


def _name_unordered(graph: ir.Graph, target: str) -> None:
    """Warn of the sums that are still taken in no fixed order: those at indices which only a run knows."""
    scatters = (node for node in graph if is_op(node, "ScatterElements", "ScatterND"))
    found = [node.name or "unnamed" for node in scatters if Call(node).string("reduction", "none") == "add"]
    if found:
        text = f"On {target} these nodes still add at repeated indices in no fixed order: {first_few(found)}."
        warn(text)


def _finish(m: ir.Model) -> None:
    """Remove what is unused, and name the new nodes after their forward nodes."""
    common.RemoveUnusedNodesPass()(m)
    used = {"", *(node.domain for node in m.graph.all_nodes())}
    for domain in [domain for domain in m.opset_imports if domain not in used]:
        del m.opset_imports[domain]
    counts: dict[str, int] = {}
    taken = {node.name for node in m.graph}  # the model may be differentiated already
    for node in m.graph:
        origin = node.metadata_props.pop(ORIGIN, None)
        if origin is not None:
            counts[origin] = counts.get(origin, 0) + 1
            while f"{origin}/grad_{counts[origin]}" in taken:
                counts[origin] += 1
            node.name = f"{origin}/grad_{counts[origin]}"
    tell_loops(m)
    m.producer_name = "onnx_convgrad"
