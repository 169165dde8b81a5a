"""Lowering: each abstract gradient operator becomes the cheapest sequence of plain operators that applies.

A lowering is a function with a cost and named requirements; a requirement answers with the reason when it does not hold.
Choosing happens here, never in a rule: by the cost model of the target, or as the caller forces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.cost import Cost, Target
from onnx_convgrad.emit import DOMAIN, Emitter
from onnx_convgrad.errors import LoweringError
from onnx_convgrad.geometry import ConvSpec
from onnx_convgrad.registry import Call, Decorator, F, check_names, load_rules

__all__ = ["Candidate", "Choice", "Lowering", "Query", "candidates", "lower", "lowering", "lowerings", "spec_builder"]

Choosing = str | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Query:
    """What a requirement or a cost looks at."""

    spec: ConvSpec
    dtype: ir.DataType
    target: Target


Requirement = Callable[[Query], str | None]
"""Answers `None` when it holds, else the reason why not."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """One way of computing an abstract operator with plain ones."""

    op_type: str
    name: str
    emit: Callable[[Emitter, Call, ConvSpec], ir.Value]
    requires: tuple[Requirement, ...]
    cost: Callable[[Query], Cost]
    summary: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A lowering considered for one node: its predicted seconds, or the reason for rejecting it."""

    name: str
    seconds: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision for one abstract node."""

    node: str
    op_type: str
    spec: ConvSpec
    chosen: str
    forced: bool
    candidates: tuple[Candidate, ...]


_LOWERINGS: dict[str, dict[str, Lowering]] = {}
_SPECS: dict[str, Callable[[Call], ConvSpec]] = {}


def lowering(
    op_type: str, name: str, *, requires: Sequence[Requirement] = (), cost: Callable[[Query], Cost]
) -> Decorator:
    """Declare a lowering of an operator: `emit(e, call, spec) -> value`."""

    def decorate(function: F) -> F:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        entry = Lowering(op_type, name, function, tuple(requires), cost, summary)
        _LOWERINGS.setdefault(op_type, {})[name] = entry
        return function

    return decorate


def spec_builder(*op_types: str) -> Decorator:
    """Declare how the `ConvSpec` of these operators is read off a node."""

    def decorate(function: F) -> F:
        _SPECS.update(dict.fromkeys(op_types, function))
        return function

    return decorate


def lowerings() -> dict[str, dict[str, Lowering]]:
    """All lowerings: operator -> name -> lowering."""
    load_rules()
    return _LOWERINGS


def candidates(op_type: str, query: Query) -> list[Candidate]:
    """Every lowering of `op_type` with its predicted cost or its reason against."""
    found = []
    for entry in lowerings()[op_type].values():
        reason = next((r for r in (requirement(query) for requirement in entry.requires) if r), None)
        found.append(Candidate(entry.name, None if reason else query.target.seconds(entry.cost(query)), reason))
    return found


def _needs_lowering(node: ir.Node, target: Target) -> bool:
    if node.domain == DOMAIN:
        return True
    if node.domain not in ("", "ai.onnx") or node.op_type not in _LOWERINGS or node.inputs[0] is None:
        return False
    dtype = node.inputs[0].dtype
    return dtype is not None and dtype not in target.conv_dtypes


def _forced(choosing: Choosing, node: ir.Node, origin: str) -> str | None:
    """The caller's choice for this node: by the name of the forward node first, then by operator."""
    if isinstance(choosing, str):
        return None
    return choosing.get(origin) or choosing.get(f"{node.op_type}:{origin}") or choosing.get(node.op_type)


def check_choice(choosing: Choosing) -> None:
    """Raise `ArgumentError` for unknown operators' lowerings in the caller's mapping."""
    table = lowerings()
    if isinstance(choosing, str):
        check_names([choosing], ["auto"], "lowering")
        return
    for key, name in choosing.items():
        options = table.get(key) or {n: entry for ops in table.values() for n, entry in ops.items()}
        check_names([name], sorted(options), f"lowering for {key}:")


def lower(graph: ir.Graph, target: Target, choosing: Choosing = "auto") -> list[Choice]:
    """Replace every abstract operator of `graph` (and operators that the target lacks for a dtype) in place.

    Raises:
        LoweringError: No candidate applies to a node, or the forced one does not; with each reason.
    """
    check_choice(choosing)
    todo = [node for node in graph if _needs_lowering(node, target)]
    if not isinstance(choosing, str):
        nodes = {node: _origin(node) for node in todo}
        qualified = {f"{node.op_type}:{origin}" for node, origin in nodes.items()}
        check_names(list(choosing), sorted({*_LOWERINGS, *nodes.values(), *qualified}), "operator or node in lowering:")
    if not todo:
        return []
    e = Emitter(graph, target=target)
    choices = [_lower_node(e, node, target, choosing) for node in todo]
    graph.remove(todo, safe=True)
    return choices


def _origin(node: ir.Node) -> str:
    """The name of the forward node that an abstract node belongs to."""
    return node.metadata_props.get("onnx_convgrad.origin", node.name or "")


def _lower_node(e: Emitter, node: ir.Node, target: Target, choosing: Choosing) -> Choice:
    call = Call(node)
    origin = _origin(node)
    try:
        spec = _SPECS[node.op_type](call)
    except ValueError as problem:
        raise LoweringError(f"{node.op_type} of node {origin!r} has an impossible geometry: {problem}.") from problem
    dtype = (node.inputs[0].dtype if node.inputs[0] is not None else None) or ir.DataType.FLOAT
    found = candidates(node.op_type, Query(spec, dtype, target))
    wanted = _forced(choosing, node, origin)
    if wanted is not None and wanted not in lowerings()[node.op_type]:
        wanted = None  # a choice for the node's other gradient operator
    by_name = {c.name: c for c in found}
    usable = [c for c in found if c.seconds is not None]
    if wanted is not None:
        if by_name[wanted].reason:
            raise LoweringError(
                f"Lowering {wanted!r} was asked for {node.op_type} of node {origin!r}, but {by_name[wanted].reason}.",
                hint=f"Usable here: {', '.join(c.name for c in usable) or 'none'}.",
            )
        chosen = wanted
    elif usable:
        chosen = min(usable, key=lambda c: c.seconds or 0.0).name
    else:
        reasons = "; ".join(f"{c.name}: {c.reason}" for c in found)
        raise LoweringError(f"No lowering of {node.op_type} applies to node {origin!r} ({spec}): {reasons}.")
    e.anchor, e.origin = node, origin
    result = lowerings()[node.op_type][chosen].emit(e, call, spec)
    _replace(e, node, result)
    return Choice(origin, node.op_type, spec, chosen, wanted is not None, tuple(found))


def _replace(e: Emitter, node: ir.Node, result: ir.Value) -> None:
    old = node.outputs[0]
    e.typed(result, old)
    is_output = old.is_graph_output()
    if is_output:
        name = old.name
        old.name = None
        if result.producer() is None or result.is_graph_output():
            result = e.op("Identity", result)
        result.name = name
    old.replace_all_uses_with(result, replace_graph_outputs=is_output)
