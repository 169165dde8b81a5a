"""Resolve the arguments of a training program against the model, and name everything in its graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.names import INSPECT, as_names, literal, select
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.frontend.roles import parameters, statistics
from onnx_convgrad.frontend.selection import by_name, read_by, resolve_wrt
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import known
from onnx_convgrad.ir.namespace import Namespace, named_values
from onnx_convgrad.ir.nodes import all_nodes, is_op
from onnx_convgrad.ir.targets import TargetInfo
from onnx_convgrad.pipeline.modes import batch_normalizations
from onnx_convgrad.pipeline.options import Names, Options
from onnx_convgrad.programs.batch_axes import batch_axes
from onnx_convgrad.programs.losses.ctc import CTC
from onnx_convgrad.programs.losses.sample_weight import SAMPLE_WEIGHT
from onnx_convgrad.programs.manifest import Manifest, Parameter, Port, State, layer_name
from onnx_convgrad.programs.masks import dropouts, initial_state
from onnx_convgrad.programs.optim.optimizers import Optimizer
from onnx_convgrad.programs.precision import AVERAGE, AVERAGE_MASTER, MASTER, NARROW, WIDE, MixedPrecision, slots
from onnx_convgrad.programs.privacy import EXPECTED, NOISE, Privacy, first_noise
from onnx_convgrad.programs.summands import Summands
from onnx_convgrad.programs.terms import Term


@dataclass(frozen=True, eq=False)
class ProgramPlan:
    """The resolved arguments of a training program.

    Attributes:
        model: The model, with the parts of `wrt`.
        target: The target, with the speeds of this machine.
        options: The options of gradients.
        parameters: Names of the initializers to train.
        outputs: Names of the model's outputs that are outputs of the graphs.
        frozen: Names of the BatchNormalization nodes that keep to their stored statistics.
        unbiased: Whether running variances are unbiased.
        seed: Seed of the Dropout masks.
        precision: The types of the computation.
        quantization: A member of `surgery.quantization.MODES`; `None` without quantization-aware training.
        privacy: Options of private training; `None` without it.
        grad_norm: Whether the norm of the gradients is computed even if nothing is clipped by it; `"layers"` for those of
            layers, too.
    """

    model: Model
    target: TargetInfo
    options: Options
    terms: tuple[Term, ...]
    optimizer: Optimizer
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    frozen: frozenset[str]
    unbiased: bool
    seed: int
    precision: MixedPrecision
    quantization: str | None = None
    privacy: Privacy | None = None
    grad_norm: bool | str = False
    _first: dict[str, ir.TensorProtocol] = field(default_factory=dict)

    @property
    def base(self) -> ir.Model:
        """The canonical model, which is copied for every graph."""
        return self.model.canonical

    def statistics(self) -> tuple[str, ...]:
        """Names of the running statistics that are updated."""
        nodes = [n for n in batch_normalizations(self.base.graph) if n.name not in self.frozen]
        stored = [v for n in nodes for v in n.inputs[3:5] if v is not None and v.is_initializer()]
        return tuple(dict.fromkeys(v.name or "" for v in stored))

    def fixed(self) -> tuple[str, ...]:
        """Names of the weights and running statistics that are not trained; other weights may take their places."""
        if self.quantization is not None:  # the file stores integers
            return ()
        graph, moving = self.base.graph, {*self.parameters, *self.statistics()}
        return tuple(v.name or "" for v in (*parameters(graph), *statistics(graph)) if v.name not in moving)

    def first(self, s: State) -> ir.TensorProtocol:
        """The initial numbers of a state, one object for all graphs."""
        if s.name not in self._first:
            start: Any = {
                "loss_scale": self.precision.init_scale,
                NOISE: first_noise(self.seed),
                EXPECTED: 1,
                None: initial_state(self.seed),
            }.get(s.slot, 0.0)
            if s.slot in (AVERAGE, MASTER, AVERAGE_MASTER):
                tensor = self.base.graph.initializers[s.of or ""].const_value
                start = tensor if tensor is None or s.slot == AVERAGE else tensor.numpy().astype(s.dtype)
            elif s.of is not None:
                start = self.optimizer.of(s.of).optimizer.state()[s.slot or ""]
            self._first[s.name] = ir.Tensor(np.full(s.static_shape(), start, s.dtype), name=s.name)
        return self._first[s.name]


def parameter_names(graph: ir.Graph, wrt: Names, freeze: Names, integers: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the initializers to train, and of `integers`, unless they are frozen.

    Running statistics are trained only if listed, not if a glob (`bn1.*`) matches them.
    """
    listed = set(as_names(wrt, "wrt"))
    averaged = {v.name or "" for v in statistics(graph)}
    chosen = parameters(graph) if integers else resolve_wrt(graph, wrt, stored=True)
    values = [v for v in chosen if v.name in listed or v.name not in averaged]
    for value in values:
        if not value.is_initializer():
            raise ArgumentError(
                f"wrt names {value.name!r}, which is not an initializer of the model and cannot be trained.",
                hint=INSPECT,
            )
    if integers:
        values = _in_order(graph, [*values, *(graph.initializers[name] for name in integers)])
    frozen = _frozen(graph, values, freeze, averaged)
    names = tuple(v.name or "" for v in values if v.name not in frozen)
    if not names:
        raise ArgumentError(
            "Every parameter is frozen: there is nothing to train.",
            hint="Freeze fewer (freeze=, --freeze), or choose others to train (wrt=, --wrt).",
        )
    return names


def _in_order(graph: ir.Graph, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Values in the order of the layers that read them: a step computes the gradients in this order."""
    places = {node: place for place, node in enumerate(graph)}

    def place(value: ir.Value) -> int:
        found = [use.node for use in value.uses()]
        found = [
            n for node in found for n in (node.outputs[0].consumers() if is_op(node, "DequantizeLinear") else [node])
        ]
        return min((places[node] for node in found if node in places), default=len(places))

    return sorted(values, key=place)


def _frozen(graph: ir.Graph, trained: Sequence[ir.Value], freeze: Names, averaged: set[str]) -> set[str]:
    """The names of initializers that `freeze` means: by their own names, or else by those of the nodes that read them."""
    tiers = by_name(trained), read_by(trained), {name: [v] for name, v in graph.initializers.items()}
    frozen: set[str] = set()
    for pattern in as_names(freeze, "freeze"):
        found = [v.name or "" for v in select(pattern, *tiers, what="initializer in freeze:", see=INSPECT)]
        if averaged.issuperset(found):
            raise ArgumentError(
                f"freeze names {pattern!r}, and {found[0]!r} is a running statistic, not a parameter.",
                hint="Use freeze_statistics to keep statistics as they are.",
            )
        frozen.update(found)
    return frozen


def grouped(optimizer: Optimizer, graph: ir.Graph, names: Sequence[str]) -> Optimizer:
    """The optimizer with groups that its method `of` can tell by the name of a parameter alone.

    Raises:
        ArgumentError: A group has no parameters.
    """
    trained = [graph.initializers[name] for name in names]
    merged: dict[str, dict[str, Any]] = {}
    for pattern, options in optimizer.groups.items():
        for value in select(pattern, by_name(trained), read_by(trained), what="parameter in groups:", see=INSPECT):
            merged.setdefault(value.name or "", {}).update(options)
    same = all(optimizer.of(name) == replace(optimizer, groups={name: merged.get(name, {})}).of(name) for name in names)
    return optimizer if same else replace(optimizer, groups={literal(name): own for name, own in merged.items()})


def output_names(graph: ir.Graph, outputs: Names | None) -> tuple[str, ...]:
    """Names of the chosen outputs, in the model's order."""
    names = list(dict.fromkeys(v.name or "" for v in graph.outputs))
    if outputs is None:
        return tuple(names)
    chosen = select(as_names(outputs, "outputs"), {name: [name] for name in names}, what="output", see=INSPECT)
    return tuple(name for name in names if name in chosen)


def frozen_nodes(graph: ir.Graph, freeze: bool | Names) -> frozenset[str]:
    """Names of the BatchNormalization nodes to freeze: by their own name, or by that of a statistic or parameter."""
    nodes = [node for node in all_nodes(graph) if is_op(node, "BatchNormalization")]
    known: dict[str, list[str]] = {}
    for node in nodes:
        for name in (node.name, *(v.name for v in node.inputs[1:] if v is not None)):
            known.setdefault(name or "", []).append(node.name or "")
    if isinstance(freeze, bool):
        frozen = frozenset(node.name or "" for node in nodes if freeze)
    else:
        what = "BatchNormalization or statistic in freeze_statistics:"
        frozen = frozenset(select(freeze, known, what=what, see=INSPECT))
    still = [repr(n.name) for n in nodes if n.name not in frozen and Call(n).float("momentum", 0.9) == 1]
    if still:
        warn(
            f"The running statistics of {first_few(still)} will not move, for their momentum in the file is 1. PyTorch's"
            " exporters write that for BatchNorm(momentum=None): export with a number, such as momentum=0.1."
        )
    return frozen


def _facts_of_labels(
    plan: ProgramPlan, values: Mapping[str, ir.Value], targets: Mapping[str, Port]
) -> dict[str, dict[str, Any]]:
    """The options `classes` and `characters` of a manifest: what is known of labels that are classes or texts (CTC)."""
    classes: dict[str, Any] = {}
    characters: dict[str, Any] = {}
    for term in plan.terms:
        shape, port = values[term.output or ""].shape, targets.get(term.target or "")
        if term.loss is None or port is None or not shape:
            continue
        loss = term.loss.called(values[term.output or ""])
        if isinstance(loss, CTC):
            frames = shape[0 if loss.time_first else 1]
            characters[port.name] = {
                "classes": known(shape[2]),
                "frames": frames if isinstance(frames, int) else frames.value,
                "blank": loss.blank,
                "zero_infinity": loss.zero_infinity,
            }
        elif hasattr(loss, "ignore_index") and np.dtype(port.dtype).kind in "iu":
            axis = 0 if len(shape) == 1 else getattr(loss, "axis", 1)
            count = shape[axis] if isinstance(axis, int) and -len(shape) <= axis < len(shape) else None
            if isinstance(count, int):
                classes[port.name] = count, loss.ignore_index
    return {"classes": classes} | ({"characters": characters} if characters else {})


def _axes(plan: ProgramPlan, values: Mapping[str, ir.Value], targets: Mapping[str, Port]) -> dict[str, int]:
    """Input, labels or output -> axis of the samples, where that is not the first."""
    axes = batch_axes(plan.base, [v.name or "" for v in plan.base.graph.inputs])
    for term in plan.terms if axes else ():
        y = values[term.output or ""]
        found = {targets[name].name: _target_axis(targets[name], y, axes) for name in term.targets(y)}
        axes |= {name: axis for name, axis in found.items() if axis}
        if term.loss is not None and term.loss.sample_weight and any(found.values()):
            raise ArgumentError(
                f"sample_weight is for labels with the samples along their first axis, and those of {y.name!r} have them"
                f" along axis {max(found.values())}.",
                hint="Take the weights as a further argument of a function, see docs/how_to/own_loss.md.",
            )
    return axes


def _target_axis(target: Port, y: ir.Value, axes: Mapping[str, int]) -> int:
    """The axis of the samples in labels: where the name of their number stands, or as in the output."""
    axis, shape = axes.get(y.name or "", 0), target.shape or ()
    size = None if y.shape is None or not axis else Port.from_value(y).shape
    name = None if not size else size[axis]
    if isinstance(name, str) and name in shape:
        return shape.index(name)
    return axis if size is not None and len(shape) == len(size) else 0


def _states(plan: ProgramPlan, values: Mapping[str, ir.Value], names: Namespace, *, average: bool) -> list[State]:
    """The values besides parameters that a step updates."""
    found: list[State] = []

    def add(name: str, dtype: str, shape: Any = (), kind: str = "optimizer", **more: str) -> None:
        key = names.claim(name)
        found.append(State(key, dtype, shape, names.claim(f"{key}_next"), kind, **more))

    add("step", "int64", slot="step")
    for name in plan.parameters:
        port, own = Port.from_value(values[name]), plan.optimizer.of(name).optimizer.state()
        for slot, dtype in slots(port, own, average=average, masters=plan.precision.master_weights):
            add(f"{name}_{slot}", dtype, port.shape, of=name, slot=slot)
    shared = {"loss_scale": "float32", "good_steps": "int32"} if plan.precision.scaled else {}
    shared |= {NOISE: "int32", EXPECTED: "float32"} if plan.privacy is not None else {}
    for slot, dtype in shared.items():
        add(slot, dtype, slot=slot)
    averaged = [Port.from_value(values[name]) for name in plan.statistics()]
    found += [State(p.name, p.dtype, p.shape, names.claim(f"{p.name}_next"), "statistic") for p in averaged]
    for p in averaged:
        if plan.precision.master_weights and p.dtype in NARROW:
            add(f"{p.name}_{MASTER}", WIDE, p.shape, "wide statistic", of=p.name, slot=MASTER)
    if dropouts(plan.base.graph):
        add("random_state", "int32", kind="random")
    return found


def with_summands(manifest: Manifest, graph: ir.Graph, summands: Sequence[Summands]) -> Manifest:
    """The manifest with the summands of each term; several of one term are further outputs."""
    names = Namespace.of_values(graph)
    following = [entry.next for entry in manifest.moving()]
    names.used.update((*manifest.inputs(), manifest.loss, *manifest.terms, *following, *manifest.grad_norms().values()))
    outputs, losses = manifest.terms or (manifest.loss,), []
    for term, output, members in zip(manifest.losses, outputs, summands, strict=True):
        weight = 1.0 if len(members) == len(outputs) == 1 else term["weight"]
        entries = [
            {"value": names.claim(output) if len(members) > 1 else output, "weight": weight, "joining": s.joining}
            for s in members
        ]
        losses.append({**term, "summands": entries})
    return replace(manifest, losses=tuple(losses))


def create_manifest(plan: ProgramPlan, options: dict[str, Any]) -> Manifest:
    """Name all inputs and outputs; the names are the same in every graph of the program."""
    graph, names = plan.base.graph, Namespace.of_values(plan.base.graph)
    values = named_values(graph)
    rate = np.float32(plan.optimizer.schedule(0))
    targets = {}
    for term in plan.terms:
        for name, (dtype, shape) in term.targets(values[term.output or ""]).items():
            if name not in targets:
                value = ir.Value(shape=shape, type=ir.TensorType(dtype))
                targets[name] = Port.from_value(value, names.claim(name))
    options = options | _facts_of_labels(plan, values, targets)
    options |= {SAMPLE_WEIGHT: targets[SAMPLE_WEIGHT].name} if SAMPLE_WEIGHT in targets else {}
    several, first = len(plan.terms) > 1, plan.terms[0]
    in_model = not several and first.loss is None and first.weight == 1  # a value of the model is the whole loss
    loss = first.output if in_model and first.output else names.claim("loss")
    parameters = []
    for name in plan.parameters:
        port = Port.from_value(values[name])
        following = names.claim(f"{name}_grad"), names.claim(f"{name}_next")
        parameters.append(Parameter(name, port.dtype, port.shape, *following))
    state = _states(plan, values, names, average="ema" in options)
    axes = _axes(plan, values, targets)
    options |= {"batch_axes": axes} if axes else {}
    terms = tuple(names.claim(f"loss_{t.output}") for t in plan.terms) if several else ()
    losses = tuple(
        t.to_json() | ({} if t.schedule is None else {"weight_input": names.claim(f"weight_{t.output}")})
        for t in plan.terms
    )
    if plan.grad_norm or plan.optimizer.clip_norm is not None:
        options |= {"grad_norm": names.claim("grad_norm")}
    if plan.grad_norm == "layers":
        layers = dict.fromkeys(layer_name(p.name) for p in parameters)
        options |= {"layer_norms": {layer: names.claim(f"grad_norm.{layer}") for layer in layers}}
    return Manifest(
        data=tuple(Port.from_value(v) for v in graph.inputs),
        targets=tuple(targets.values()),
        learning_rate=Port(names.claim("learning_rate"), "float32", ()),
        loss=loss,
        terms=terms,
        outputs=tuple(name for name in plan.outputs if name != loss),
        parameters=tuple(parameters),
        state=tuple(state),
        optimizer={**plan.optimizer.to_json(), "lr": float(rate)},
        losses=losses,
        options=options,
    )
