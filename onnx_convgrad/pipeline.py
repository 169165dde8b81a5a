"""The stages behind every transformation: read, canonicalize, differentiate, simplify, lower, verify."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.activity import jumps_between
from onnx_convgrad.cost import Target, target_named
from onnx_convgrad.emit import Emitter, known
from onnx_convgrad.errors import ArgumentError, ConvGradError, ModelError, first_few
from onnx_convgrad.files import check_weights
from onnx_convgrad.forward import forward
from onnx_convgrad.graph.nodes import ORIGIN, is_op
from onnx_convgrad.lowering.calibration import calibrated
from onnx_convgrad.lowering.candidates import Choosing, Policy
from onnx_convgrad.lowering.loops import take_loops_back, tell_loops
from onnx_convgrad.lowering.lower import Choice, check_choice, check_workspace, lower
from onnx_convgrad.parameters import resolve_of, resolve_wrt
from onnx_convgrad.passes.batch_statistics import share_statistics
from onnx_convgrad.passes.canonicalize import InputShapes, canonicalize
from onnx_convgrad.passes.fast_forms import use_fast_forms
from onnx_convgrad.passes.pooled_slopes import move_slopes_behind_pools
from onnx_convgrad.passes.provider_forms import fit_provider
from onnx_convgrad.passes.recompute import Recomputation, mark_boundary, recompute_values
from onnx_convgrad.passes.sparse import without_sparse
from onnx_convgrad.passes.training import rewrite_for_training, set_training
from onnx_convgrad.passes.verify import verify, verify_shapes
from onnx_convgrad.per_sample.walk import backward_per_sample, data_inputs
from onnx_convgrad.registry import Call, check_names
from onnx_convgrad.reverse import backward
from onnx_convgrad.validity import judged, root_cause

__all__ = ["GRADIENTS_KEY", "SEEDS_KEY", "AnyModel", "Built", "Mode", "Names", "build", "complete", "load"]

AnyModel = str | os.PathLike[str] | onnx.ModelProto | ir.Model
Names = str | Sequence[str]
Progress = Callable[[str], None]
Mode = Literal["augment", "vjp", "grad", "jvp", "hvp"]
COMPOSITIONS = ("forward_over_reverse", "reverse_over_reverse", "reverse_over_forward")
"""The ways of writing H v, the first being the default: the derivative of the gradient along v, the gradient of
<gradient, v>, and the gradient of the derivative along v."""

GRADIENTS_KEY = "onnx_convgrad.gradients"
"""`metadata_props` key: JSON object, differentiated value -> graph output with its derivative."""

SEEDS_KEY = "onnx_convgrad.seeds"
"""`metadata_props` key: JSON object, value -> graph input with its cotangent or tangent (absent when seeded with ones)."""


@dataclass(frozen=True, slots=True)
class Built:
    """A transformed model with what was decided on the way."""

    model: ir.Model
    primal: ir.Model
    gradients: dict[str, str]
    choices: tuple[Choice, ...]
    recomputation: Recomputation | None = None


def load(model: AnyModel) -> ir.Model:
    """The model as a private onnx_ir model; external weights stay on disk.

    Raises:
        ArgumentError: It is none of the three.
        ModelError: The file cannot be read or is not an ONNX model.
    """
    if isinstance(model, ir.Model):
        return model.clone()
    if isinstance(model, onnx.ModelProto):
        try:
            return ir.from_proto(without_sparse(model))
        except ir.serde.SerdeError as problem:
            raise ModelError(f"The model cannot be read: {root_cause(problem)}.", hint=_remedy(problem)) from problem
    if not isinstance(model, (str, os.PathLike)):
        raise ArgumentError(
            f"A model is a path, an onnx.ModelProto or an onnx_ir.Model, not {type(model).__name__}.",
            hint="Serialized bytes become one by onnx.load_from_string." if isinstance(model, bytes) else "",
        )
    path = Path(model)
    try:
        found = ir.from_proto(without_sparse(onnx.load(path, load_external_data=False)))
        ir.external_data.set_base_dir(found.graph, path.parent)
    except ConvGradError:
        raise
    except FileNotFoundError:
        raise ModelError(f"There is no file {str(path)!r}.") from None
    except IsADirectoryError:
        raise ModelError(f"{str(path)!r} is a folder, not a model.") from None
    except Exception as problem:
        cause = root_cause(problem)
        raise ModelError(f"{str(path)!r} is not a readable ONNX model ({cause}).", hint=_remedy(problem)) from problem
    check_weights(found)
    return found


def _remedy(problem: Exception) -> str:
    maps = "Map types" in root_cause(problem)
    return (
        "Leave ZipMap out: convert with options={'zipmap': False}, so that probabilities are a tensor." if maps else ""
    )


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
    m = canonicalize(m, input_shapes)
    take_loops_back(m)
    if input_shapes:
        verify_shapes(m, lambda: canonicalize(load(model)))
    graph = m.graph
    sources, targets = resolve_wrt(graph, wrt), resolve_of(graph, of)
    running = set_training(graph) if training else []
    kept = {*sources, *targets, *(() if training else graph.outputs)}
    moved = {} if per_sample else share_statistics(graph, kept)  # there, the statistics of a batch are refused
    updated = [(name, moved.get(v, v)) for name, v in running]
    primal = m.clone()
    if training and lowering != "exact":
        rewrite_for_training(graph, machine, {*sources, *targets})
    if mode in ("grad", "hvp"):
        _require_scalar(targets, mode)
    progress("differentiating")
    before = list(graph)
    e = Emitter(graph, opsets=graph.opset_imports, target=machine, joint=lowering != "exact")
    job = _Job(m, e, sources, targets)
    if mode == "hvp":
        results = job.second(composition, sources, targets)
    elif per_sample:
        results = job.apart(sources, targets, seed, norms=per_sample == "squared_norm")
    else:
        results = job.first(mode, sources, targets, seed)
    m.metadata_props[SEEDS_KEY] = json.dumps(job.seeds)
    if mode in ("vjp", "grad", "hvp"):
        graph.outputs.clear()
    else:
        graph.outputs.extend(job.claim(v, f"{name}_next") for name, v in updated if not v.is_graph_output())
    graph.outputs.extend(results.values())
    if trainable_inputs:
        graph.inputs.extend(v for v in sources if v.is_initializer() and not v.is_graph_input())
    policy = Policy(lowering, max_workspace, training, compare)
    choices, recomputation = complete(m, primal, machine, policy, progress, recompute=recompute, forward=before)
    outputs = list(graph.outputs)[len(graph.outputs) - len(results) :]
    found = {value.name or "": result.name or "" for value, result in zip(results, outputs, strict=True)}
    m.metadata_props[GRADIENTS_KEY] = json.dumps(found)
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
    move_slopes_behind_pools(m.graph, Emitter(m.graph, opsets=m.opset_imports, target=machine))
    common.RemoveUnusedNodesPass()(m)
    progress("lowering")
    mark = mark_boundary(m.graph, forward) if recompute is not None else None
    choices = lower(m.graph, machine, policy)
    done = None
    if mark is not None and recompute is not None:
        progress("recomputing")
        done = recompute_values(m.graph, mark, recompute, machine)
    fit_provider(m.graph, machine)
    if machine.name == "cpu":
        use_fast_forms(m.graph, Emitter(m.graph, opsets=m.opset_imports, target=machine), training=policy.training)
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
        warnings.warn(text, UserWarning, stacklevel=5)


def _require_scalar(targets: list[ir.Value], mode: Mode) -> None:
    for y in targets:
        if y.shape is not None and any(known(d) not in (1, None) for d in y.shape):
            raise ArgumentError(
                f"{mode} needs a scalar, but {y.name!r} has shape {y.shape}.",
                hint="Use vjp, or reduce it to one element.",
            )


class _Job:
    """Seeds, derivatives, and the new graph inputs and outputs under names that are free."""

    def __init__(self, m: ir.Model, e: Emitter, sources: list[ir.Value], targets: list[ir.Value]) -> None:
        self.m, self.e, self.sources, self.targets = m, e, sources, targets
        self.seeds: dict[str, str] = {}

    def first(
        self, mode: Mode, sources: list[ir.Value], targets: list[ir.Value], seed: str | None
    ) -> dict[ir.Value, ir.Value]:
        """The value that each derivative belongs to -> its graph output: sources in reverse mode, targets in forward."""
        if mode == "jvp":
            tangents = {x: self._input(x, "tangent") for x in sources}
            return self._outputs(targets, forward(self.e, tangents, targets), "tangent")
        ones = seed == "ones" or mode == "grad"
        cotangents = {y: self._seed(y, ones=ones) for y in targets}
        return self._outputs(sources, backward(self.e, cotangents, dict.fromkeys(sources)), "grad")

    def apart(
        self, sources: list[ir.Value], targets: list[ir.Value], seed: str | None, *, norms: bool
    ) -> dict[ir.Value, ir.Value]:
        """Source -> graph output with the gradient of each sample, or its squared norm."""
        data = data_inputs(self.e.graph, sources)
        cotangents = {y: self._seed(y, ones=seed == "ones") for y in targets}
        found = backward_per_sample(self.e, cotangents, dict.fromkeys(sources), data)
        if norms:
            return self._outputs(sources, found.squared_norms(), "grad_squared_norm", found.zero_norms)
        return self._outputs(sources, found.gradients, "grad", found.zeros)

    def second(self, composition: str, sources: list[ir.Value], targets: list[ir.Value]) -> dict[ir.Value, ir.Value]:
        """Source -> graph output with the second derivative of the scalar targets along the tangents of all sources."""
        wanted = dict.fromkeys(sources)
        if composition == "reverse_over_forward":
            tangents = {x: self._input(x, "tangent") for x in sources}
            slopes = forward(self.e, tangents, targets)
            found = backward(self.e, {t: self.e.full_like(t, 1) for t in slopes.values()}, wanted)
            return self._outputs(sources, found, "grad_tangent")
        gradients = backward(self.e, {y: self.e.full_like(y, 1) for y in targets}, wanted)
        tangents = {x: self._input(x, "tangent") for x in sources}
        if composition == "reverse_over_reverse":  # H is symmetric: v may come from the left
            cotangents: dict[ir.Value, ir.Value] = {}
            for x, g in gradients.items():
                cotangents[g] = self.e.add(cotangents[g], tangents[x]) if g in cotangents else tangents[x]
            found = backward(self.e, cotangents, wanted)
        else:
            pushed = forward(self.e, tangents, list(dict.fromkeys(gradients.values())))
            found = {x: pushed[g] for x, g in gradients.items() if g in pushed}
        return self._outputs(sources, found, "grad_tangent")

    def claim(self, value: ir.Value, name: str) -> ir.Value:
        """Give `value` the name, or the next free one after it."""
        value.name = self.e.names.claim(name)
        return value

    def _input(self, like: ir.Value, suffix: str) -> ir.Value:
        value = ir.Value(shape=like.shape, type=ir.TensorType(like.dtype or ir.DataType.FLOAT))
        self.e.graph.inputs.append(self.claim(value, f"{like.name}_{suffix}"))
        self.seeds[like.name or ""] = value.name or ""
        return value

    def _seed(self, y: ir.Value, *, ones: bool) -> ir.Value:
        """The cotangent of a target: a graph input, or ones."""
        single = y.shape is not None and all(known(d) == 1 for d in y.shape)
        return self.e.full_like(y, 1) if ones or single else self._input(y, "grad")

    def _outputs(
        self,
        values: list[ir.Value],
        reached: Mapping[ir.Value, ir.Value],
        suffix: str,
        zeros: Callable[[ir.Value], ir.Value] | None = None,
    ) -> dict[ir.Value, ir.Value]:
        """One output per value, named `<name>_<suffix>`; zeros, and a warning, where nothing reaches it."""
        missing = [v for v in values if v not in reached]
        if missing:
            what = "of wrt reaches" if suffix == "tangent" else "of `of` depends on"
            names = first_few([repr(v.name) for v in missing])
            text = f"The derivative is zero: no member {what} {names}{self._steps(missing)}."
            warnings.warn(text, UserWarning, stacklevel=6)
        emitted = set(self.e.emitted)
        taken: set[ir.Value] = set()
        outputs: dict[ir.Value, ir.Value] = {}
        for value in values:
            result = reached[value] if value in reached else (zeros or self.e.zeros_like)(value)
            if result.producer() not in emitted or result in taken:
                result = self._identity(result, result if zeros else value)  # two outputs may hold the same value
            taken.add(result)
            outputs[value] = self.claim(result, f"{value.name}_{suffix}")
        return outputs

    def _steps(self, missing: list[ir.Value]) -> str:
        """Where the way from or to values that get zeros is a step: rounding is what quantized models have."""
        forward = all(v in self.targets for v in missing)
        sources, targets = (self.sources, missing) if forward else (missing, self.targets)
        steps = [n for source in sources for n in jumps_between(source, targets, self.e.order)]
        found = dict.fromkeys(f"{n.name or n.outputs[0].name!r} ({n.op_type})" for n in steps)
        if not found:
            return ""
        quantized = any(n.op_type.startswith(("Quantize", "DynamicQuantize")) for n in steps)
        remedy = "; differentiate the model from before its quantization" if quantized else ""
        return f" but through steps, which are flat almost everywhere: {first_few(list(found))}{remedy}"

    def _identity(self, value: ir.Value, like: ir.Value) -> ir.Value:
        node = ir.Node("", "Identity", [value], num_outputs=1)
        self.e.place(node)
        return self.e.typed(node.outputs[0], like)


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
