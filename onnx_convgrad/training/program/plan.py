"""Resolve the arguments of a training program against the model, and name everything in its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.parameters import resolve_wrt
from onnx_convgrad.ir.namespace import Namespace, named_values
from onnx_convgrad.ir.targets import Target
from onnx_convgrad.pipeline.modes import batch_normalizations
from onnx_convgrad.pipeline.options import Names, Options
from onnx_convgrad.training.optim.optimizers import Optimizer
from onnx_convgrad.training.program.manifest import Manifest, Parameter, Port, State
from onnx_convgrad.training.program.terms import Term
from onnx_convgrad.training.program.training_mode import dropouts
from onnx_convgrad.training.program.update import LossScale


@dataclass(frozen=True, eq=False)
class Plan:
    """The resolved arguments of a training program.

    Attributes:
        source: The original model.
        base: The canonical model, which is copied for every graph.
        target: The target, with the speeds of this machine.
        options: How gradients are computed.
        parameters: Names of the initializers to train.
        outputs: Names of the model's outputs that are outputs of the graphs.
        frozen: Names of the BatchNormalization nodes that keep to their stored statistics.
        unbiased: Whether running variances are unbiased.
        seed: Seed of the Dropout masks.
        precision: `"float32"`, or a key of `precision.NARROW`.
        scale: The loss scale; `None` if the precision needs none.
    """

    source: ir.Model
    base: ir.Model
    target: Target
    options: Options
    terms: tuple[Term, ...]
    optimizer: Optimizer
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    frozen: frozenset[str]
    unbiased: bool
    seed: int
    precision: str
    scale: LossScale | None

    def statistics(self) -> tuple[str, ...]:
        """Names of the running statistics that are updated."""
        nodes = [n for n in batch_normalizations(self.base.graph) if n.name not in self.frozen]
        stored = [v for n in nodes for v in n.inputs[3:5] if v is not None and v.is_initializer()]
        return tuple(dict.fromkeys(v.name or "" for v in stored))


def parameter_names(graph: ir.Graph, wrt: Names, freeze: Names) -> tuple[str, ...]:
    """Names of the initializers to train; running statistics only if listed, not if a glob (`bn1.*`) matches them."""
    listed = set(as_names(wrt, "wrt"))
    statistics = {v.name for n in batch_normalizations(graph) for v in n.inputs[3:5] if v is not None} - listed
    values = [v for v in resolve_wrt(graph, wrt) if v.name not in statistics]
    for value in values:
        if not value.is_initializer():
            raise ArgumentError(
                f"wrt names {value.name!r}, which is not an initializer of the model and cannot be trained."
            )
    frozen = _matching(freeze, list(graph.initializers), "initializer in freeze:")
    names = tuple(v.name or "" for v in values if v.name not in frozen)
    if not names:
        raise ArgumentError("Every parameter is frozen: there is nothing to train.")
    return names


def check_groups(optimizer: Optimizer, parameters: Sequence[str]) -> None:
    """Raise `ArgumentError` for a group without parameters."""
    _matching(tuple(optimizer.groups), parameters, "parameter in groups:")


def output_names(graph: ir.Graph, outputs: Names | None) -> tuple[str, ...]:
    """Names of the chosen outputs, in the model's order."""
    names = list(dict.fromkeys(v.name or "" for v in graph.outputs))
    if outputs is None:
        return tuple(names)
    chosen = _matching(outputs, names, "output")
    return tuple(name for name in names if name in chosen)


def frozen_nodes(graph: ir.Graph, freeze: bool | Names) -> frozenset[str]:
    """Names of the BatchNormalization nodes to freeze: by their own name, or by that of a statistic or parameter."""
    names_of = {n.name or "": [n.name or "", *(v.name or "" for v in n.inputs[1:] if v is not None)]
                for n in batch_normalizations(graph)}  # fmt: skip
    if isinstance(freeze, bool):
        return frozenset(names_of) if freeze else frozenset()
    known = [name for names in names_of.values() for name in names]
    chosen = _matching(freeze, known, "BatchNormalization or statistic in freeze_statistics:")
    return frozenset(node for node, names in names_of.items() if chosen.intersection(names))


def _matching(globs: Names, names: Sequence[str], what: str) -> set[str]:
    """The names that match any glob; raises `ArgumentError` for a glob without a match."""
    matches: set[str] = set()
    for glob in as_names(globs, what.rstrip(":")):
        matched = {name for name in names if name == glob} or {name for name in names if fnmatchcase(name, glob)}
        if not matched:
            check_names([glob], names, what)
        matches |= matched
    return matches


def create_manifest(plan: Plan, options: dict[str, Any]) -> Manifest:
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
    several, first = len(plan.terms) > 1, plan.terms[0]
    in_model = not several and first.loss is None and first.weight == 1  # a value of the model is the whole loss
    loss = first.output if in_model and first.output else names.claim("loss")
    parameters = []
    for name in plan.parameters:
        port = Port.from_value(values[name])
        following = names.claim(f"{name}_grad"), names.claim(f"{name}_next")
        parameters.append(Parameter(name, port.dtype, port.shape, *following))
    state = [State(names.claim("step"), "int64", (), names.claim("step_next"), "optimizer", slot="step")]
    for name in plan.parameters:
        port = Port.from_value(values[name])
        for slot in (*plan.optimizer.of(name)[0].state(), *(["ema"] if "ema" in options else [])):
            key = names.claim(f"{name}_{slot}")
            state.append(State(key, port.dtype, port.shape, names.claim(f"{key}_next"), "optimizer", name, slot))
    if plan.scale is not None:
        for slot, kind in (("loss_scale", "float32"), ("good_steps", "int32")):
            key = names.claim(slot)
            state.append(State(key, kind, (), names.claim(f"{key}_next"), "optimizer", None, slot))
    for name in plan.statistics():
        port = Port.from_value(values[name])
        state.append(State(name, port.dtype, port.shape, names.claim(f"{name}_next"), "statistic"))
    if dropouts(graph):
        state.append(State(names.claim("random_state"), "int32", (), names.claim("random_state_next"), "random"))
    return Manifest(
        data=tuple(Port.from_value(v) for v in graph.inputs),
        targets=tuple(targets.values()),
        learning_rate=Port(names.claim("learning_rate"), "float32", ()),
        loss=loss,
        terms=tuple(names.claim(f"loss_{t.output}") for t in plan.terms) if several else (),
        outputs=tuple(name for name in plan.outputs if name != loss),
        parameters=tuple(parameters),
        state=tuple(state),
        optimizer={**plan.optimizer.options(), "lr": float(rate)},
        losses=tuple(t.options() for t in plan.terms),
        options=options,
    )
