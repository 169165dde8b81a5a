"""The stage that replaces abstract gradient operators: each becomes the cheapest sequence of plain operators that applies.

The cheapest of the candidates is taken that stays within the workspace budget; or the caller forces one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_convgrad.candidates import Candidate, Choosing, Policy, candidates, emit_lowering, holding
from onnx_convgrad.constants import Folding, is_constant
from onnx_convgrad.cost import Target
from onnx_convgrad.emit import DOMAIN, Emitter
from onnx_convgrad.errors import ArgumentError, LoweringError
from onnx_convgrad.lowering import Query, lowerings, reader_of
from onnx_convgrad.registry import Call, check_names
from onnx_convgrad.typical import TypicalSizes

__all__ = ["Choice", "check_choice", "check_workspace", "lower"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision for one abstract node."""

    node: str
    op_type: str
    spec: Any
    chosen: str
    forced: bool
    candidates: tuple[Candidate, ...]


def check_choice(choosing: Choosing) -> None:
    """Raise `ArgumentError` for unknown operators' lowerings in the caller's mapping."""
    table = lowerings()
    if isinstance(choosing, str):
        check_names([choosing], ["auto", "exact"], "lowering")
        return
    for key, name in choosing.items():
        options = table.get(key) or {n: entry for ops in table.values() for n, entry in ops.items()}
        check_names([name], sorted(options), f"lowering for {key}:")


def check_workspace(limit: int | None) -> None:
    """Raise `ArgumentError` for a budget that is no positive number of bytes."""
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ArgumentError(f"max_workspace must be a positive number of bytes, not {limit!r}.")


def lower(graph: ir.Graph, target: Target, policy: Policy | None = None) -> list[Choice]:
    """Replace every abstract operator of `graph` (and operators that the target lacks for a dtype) in place.

    Raises:
        LoweringError: No candidate applies to a node, or the forced one does not; with each reason.
    """
    policy = policy or Policy()
    choosing = policy.choosing
    check_choice(choosing)
    todo = [node for node in graph if _needs_lowering(node, target, policy)]
    if not isinstance(choosing, str):
        nodes = {node: _origin(node) for node in todo}
        qualified = {f"{node.op_type}:{origin}" for node, origin in nodes.items()}
        check_names(
            list(choosing), sorted({*lowerings(), *nodes.values(), *qualified}), "operator or node in lowering:"
        )
    if not todo:
        return []
    e = Emitter(graph, target=target, samples=policy.training)
    sizes = TypicalSizes(graph)
    folded = Folding()
    choices = [_lower_node(e, node, policy, sizes, folded) for node in todo]
    graph.remove(todo, safe=True)
    return choices


def _origin(node: ir.Node) -> str:
    """The name of the forward node that an abstract node belongs to."""
    return node.metadata_props.get("onnx_convgrad.origin", node.name or "")


def _needs_lowering(node: ir.Node, target: Target, policy: Policy) -> bool:
    if node.domain == DOMAIN:
        return True
    if node.domain not in ("", "ai.onnx") or node.op_type not in lowerings() or node.inputs[0] is None:
        return False
    dtype = node.inputs[0].dtype
    if dtype is not None and dtype not in target.conv_dtypes:
        return True
    return policy.training and node.op_type == "Conv" and not is_constant(node.inputs[1])


def _forced(choosing: Choosing, node: ir.Node, origin: str) -> str | None:
    """The caller's choice for this node: by the name of the forward node first, then by operator."""
    if isinstance(choosing, str):
        return None
    return choosing.get(origin) or choosing.get(f"{node.op_type}:{origin}") or choosing.get(node.op_type)


def _lower_node(e: Emitter, node: ir.Node, policy: Policy, sizes: TypicalSizes, folded: Folding) -> Choice:
    origin, target = _origin(node), e.target
    try:
        spec = reader_of(node.op_type).build(Call(node))
    except ValueError as problem:
        raise LoweringError(f"{node.op_type} of node {origin!r} has an impossible geometry: {problem}.") from problem
    dtype = (node.inputs[0].dtype if node.inputs[0] is not None else None) or ir.DataType.FLOAT
    present = tuple(v is not None for v in node.inputs)
    constant = tuple(i for i, v in enumerate(node.inputs) if target.lays_out_constants and v is not None and folded(v))
    query = Query(spec, _typical(node, spec, sizes), dtype, target, policy.training, present, constant)
    wanted = _forced(policy.choosing, node, origin)
    if wanted is not None and wanted not in lowerings()[node.op_type]:
        wanted = None  # a choice for the node's other gradient operator
    found = candidates(node, query, policy)
    usable = [c for c in found if c.seconds is not None]
    if wanted is not None:
        chosen = next(c for c in found if c.name == wanted)
        if chosen.reason:
            raise LoweringError(
                f"Lowering {wanted!r} was asked for {node.op_type} of node {origin!r}, but {chosen.reason}.",
                hint=f"Usable here: {', '.join(c.name for c in usable) or 'none'}.",
            )
    elif usable:
        chosen = min(usable, key=lambda c: (c.seconds or 0.0) + holding(c.workspace, target.rates))
    else:
        reasons = "; ".join(f"{c.name}: {c.reason}" for c in found)
        least = min((c.workspace for c in found if c.workspace), default=0)
        hint = f"The smallest max_workspace that suffices is {least}." if least else ""
        raise LoweringError(f"No lowering of {node.op_type} applies to node {origin!r} ({spec}): {reasons}.", hint=hint)
    e.anchor, e.origin = node, origin
    before = len(e.emitted)
    result = emit_lowering(e, lowerings()[node.op_type][chosen.name], node, spec, chosen.chunks)
    _replace(e, node, result, new=result.producer() in e.emitted[before:])
    return Choice(origin, node.op_type, spec, chosen.name, wanted is not None, found)


def _typical(node: ir.Node, spec: Any, sizes: TypicalSizes) -> Any:
    """The spec with every unknown size at a typical one, which the cost model looks at."""
    hinted = spec.hinted()
    if hinted == spec:
        return spec
    try:
        return reader_of(node.op_type).build(Call(sizes.node(node))).hinted()
    except ValueError:  # the typical input does not fit: it may be too small, or not divisible
        return hinted


def _replace(e: Emitter, node: ir.Node, result: ir.Value, *, new: bool) -> None:
    """Put `result` in the place of the node's output, under the same name."""
    old = node.outputs[0]
    e.typed(result, old)
    is_output = old.is_graph_output()
    if is_output:
        name = old.name
        old.name = None
        if result.producer() is None or result.is_graph_output():
            result = e.op("Identity", result)
        result.name = name
    elif new:
        result.name, old.name = old.name, None
    old.replace_all_uses_with(result, replace_graph_outputs=is_output)
