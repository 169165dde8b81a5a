"""Lowering: each abstract gradient operator becomes the cheapest sequence of plain operators that applies.

A lowering is a function with named requirements; a requirement answers with the reason when it does not hold. Choosing
happens here, never in a rule: every lowering that applies is sketched and priced for the target, the cheapest is taken
that stays within the workspace budget; or the caller forces one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import onnx_ir as ir

from onnx_convgrad.chunks import EACH, counts, emit_in_chunks
from onnx_convgrad.constants import is_constant, is_folded
from onnx_convgrad.cost import Rates, Target
from onnx_convgrad.emit import DOMAIN, Emitter
from onnx_convgrad.errors import ArgumentError, LoweringError
from onnx_convgrad.registry import Call, Decorator, F, check_names, load_rules
from onnx_convgrad.sketch import Sketch, sketch
from onnx_convgrad.typical import TypicalSizes

__all__ = [
    "Candidate",
    "Choice",
    "Choosing",
    "Lowering",
    "Policy",
    "Query",
    "Spec",
    "candidates",
    "check_choice",
    "check_workspace",
    "lower",
    "lowering",
    "lowerings",
    "lowerings_of",
    "spec_builder",
]

Choosing = str | Mapping[str, str]

_GAIN = 0.93
"""Chunks must promise to take at most this part of the time."""

_WORTH = 1.5
"""A form this much slower than the fastest as a whole is not tried in chunks."""

_SHARES = (4, 8, 16)
"""Chunks are tried of which this part of the cache holds the workspace."""


class Spec(Protocol):
    """What an operator's lowerings need to know about one node: frozen, hashable, printed as one line."""

    def hinted(self) -> Self:
        """The same with every unknown size at a typical one."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How to choose: the caller's word, and what is allowed.

    Attributes:
        choosing: `"auto"`, `"exact"` (without lowerings that round more than a direct sum) or a mapping.
        max_workspace: Bytes that a lowering may hold besides its operands and result, or `None`.
        training: Whether the forward convolutions, whose weights change from step to step, are lowered too.
    """

    choosing: Choosing = "auto"
    max_workspace: int | None = None
    training: bool = False


@dataclass(frozen=True, slots=True)
class Query:
    """What a requirement looks at.

    Attributes:
        typical: `spec` with every unknown size at a typical one.
        training: Whether the graph trains, on a batch that is never empty.
    """

    spec: Any
    typical: Any
    dtype: ir.DataType
    target: Target
    training: bool = False


Requirement = Callable[[Query], str | None]
"""Answers `None` when it holds, else the reason why not."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """One way of computing an abstract operator with plain ones."""

    op_type: str
    name: str
    emit: Callable[[Emitter, Call, Any], ir.Value]
    requires: tuple[Requirement, ...]
    exact: bool
    summary: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A lowering considered for one node: its predicted seconds and workspace in bytes, or the reason against it.

    `chunks` is the number of parts that the batch is cut into, or 0 for one part per sample.
    """

    name: str
    seconds: float | None
    reason: str | None
    workspace: int = 0
    chunks: int = 1

    def __str__(self) -> str:
        if self.chunks == 1:
            return self.name
        return f"{self.name} sample by sample" if self.chunks == EACH else f"{self.name} in {self.chunks} chunks"


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision for one abstract node."""

    node: str
    op_type: str
    spec: Any
    chosen: str
    forced: bool
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class _Reader:
    """How the spec of an operator is read off a node, and which of its shapes each operand has."""

    build: Callable[[Call], Any]
    operands: tuple[str, ...]


_LOWERINGS: dict[str, dict[str, Lowering]] = {}
_SPECS: dict[str, _Reader] = {}
_SKETCHES: dict[Any, Sketch] = {}


def lowering(op_type: str, name: str, *, requires: Sequence[Requirement] = (), exact: bool = True) -> Decorator:
    """Declare a lowering of an operator: `emit(e, call, spec) -> value`.

    `exact=False` says that it rounds more than a direct sum does: `lowering="exact"` leaves it out.
    """

    def decorate(function: F) -> F:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        entry = Lowering(op_type, name, function, tuple(requires), exact, summary)
        _LOWERINGS.setdefault(op_type, {})[name] = entry
        return function

    return decorate


def spec_builder(op_type: str, operands: Sequence[str]) -> Decorator:
    """Declare how the spec of an operator is read off a node.

    `operands` names, per operand of the operator, the property of the spec that holds its shape.
    """

    def decorate(function: F) -> F:
        _SPECS[op_type] = _Reader(function, tuple(operands))
        return function

    return decorate


def lowerings() -> dict[str, dict[str, Lowering]]:
    """All lowerings: operator -> name -> lowering."""
    load_rules()
    return _LOWERINGS


def lowerings_of(op_type: str) -> Mapping[str, Lowering]:
    """The lowerings of one operator that are declared so far: for modules that derive others from them."""
    return _LOWERINGS[op_type]


def candidates(node: ir.Node, query: Query, policy: Policy) -> list[Candidate]:
    """Every lowering of the node's operator with its predicted cost or the reason against it."""
    entries = lowerings()[node.op_type].values()
    reasons = {entry.name: _refusal(entry, query, policy) for entry in entries}
    whole = {entry.name: _sketched(entry, node, query, 1) for entry in entries if not reasons[entry.name]}
    least = min((way.seconds for way in whole.values()), default=0.0)
    return [
        Candidate(entry.name, None, reason)
        if (reason := reasons[entry.name]) is not None
        else _candidate(entry, node, query, policy, near=whole[entry.name].seconds <= _WORTH * least)
        for entry in entries
    ]


def _refusal(entry: Lowering, query: Query, policy: Policy) -> str | None:
    reason = next((r for r in (requirement(query) for requirement in entry.requires) if r), None)
    if reason is None and not entry.exact and policy.choosing == "exact":
        reason = "it rounds more than a direct sum"
    if reason is None and not entry.exact and query.dtype != ir.DataType.FLOAT:
        reason = f"it rounds too much for {query.dtype.name}"
    if reason is None and not entry.exact and query.target.narrow_products and not _asked_for(entry, policy.choosing):
        reason = "it rounds too much for TensorFloat-32, in which float32 is multiplied unless told otherwise"
    return reason


def _candidate(entry: Lowering, node: ir.Node, query: Query, policy: Policy, *, near: bool) -> Candidate:
    """The lowering in as many chunks as are best; `near` says whether chunks are worth a try."""
    ways = dict(_ways(entry, node, query, policy.max_workspace, near=near))
    budget = policy.max_workspace
    if budget is not None:
        within = {n: way for n, way in ways.items() if way.workspace <= budget}
        if not within:
            least = min(way.workspace for way in ways.values())
            reason = f"it holds {least} bytes besides its operands, more than max_workspace"
            return Candidate(entry.name, None, reason, least)
        ways = within
    rates = query.target.rates
    chunks, way = min(ways.items(), key=lambda item: item[1].seconds + _holding(item[1].workspace, rates))
    return Candidate(entry.name, way.seconds, None, way.workspace, chunks)


def _asked_for(entry: Lowering, choosing: Choosing) -> bool:
    return not isinstance(choosing, str) and entry.name in choosing.values()


def _ways(
    entry: Lowering, node: ir.Node, query: Query, budget: int | None, *, near: bool
) -> Iterator[tuple[int, Sketch]]:
    """The lowering of the whole batch, in chunks that the cache holds, and in chunks that the budget allows."""
    whole = _sketched(entry, node, query, 1)
    yield 1, whole
    if near and query.target.loops:
        limits = [query.target.rates.cache / share for share in _SHARES]
        tried = {next(counts(entry.op_type, query.spec, whole.workspace, limit), 1) for limit in limits} - {1}
        for chunks in sorted(tried):
            cut = _sketched(entry, node, query, chunks)
            if cut.seconds < _GAIN * whole.seconds:
                yield chunks, cut
    if budget is not None:
        for chunks in counts(entry.op_type, query.spec, whole.workspace, budget):
            way = _sketched(entry, node, query, chunks)
            yield chunks, way
            if way.workspace <= budget:
                break


def _sketched(entry: Lowering, node: ir.Node, query: Query, chunks: int) -> Sketch:
    """The price of a lowering; the same geometry is sketched once."""
    spec = query.typical
    present = tuple(v is not None for v in node.inputs)
    known = query.target.lays_out_constants
    constant = tuple(i for i, v in enumerate(node.inputs) if known and v is not None and is_folded(v))
    key = (entry.op_type, entry.name, spec, query.dtype, query.target, present, constant, chunks)
    if key not in _SKETCHES:
        shapes = {i: getattr(spec, name) for i, name in enumerate(_SPECS[node.op_type].operands)}
        _SKETCHES[key] = sketch(
            node, shapes, query.target, lambda e, copy: _emit(e, entry, copy, spec, chunks), constant
        )
    return _SKETCHES[key]


def _emit(e: Emitter, entry: Lowering, node: ir.Node, spec: Any, chunks: int) -> ir.Value:
    if chunks == 1:
        return entry.emit(e, Call(node), spec)
    return emit_in_chunks(e, node, spec, chunks, entry.emit)


def _needs_lowering(node: ir.Node, target: Target, policy: Policy) -> bool:
    if node.domain == DOMAIN:
        return True
    if node.domain not in ("", "ai.onnx") or node.op_type not in _LOWERINGS or node.inputs[0] is None:
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
        check_names(list(choosing), sorted({*_LOWERINGS, *nodes.values(), *qualified}), "operator or node in lowering:")
    if not todo:
        return []
    e = Emitter(graph, target=target, samples=policy.training)
    sizes = TypicalSizes(graph)
    choices = [_lower_node(e, node, policy, sizes) for node in todo]
    graph.remove(todo, safe=True)
    return choices


def _origin(node: ir.Node) -> str:
    """The name of the forward node that an abstract node belongs to."""
    return node.metadata_props.get("onnx_convgrad.origin", node.name or "")


def _holding(workspace: int, rates: Rates) -> float:
    """What memory costs besides the time to fill it: half a pass over what the cache does not hold.

    The runtime keeps the largest workspace of a graph from run to run, so a form that holds little wins where it is about
    as fast.
    """
    return max(0.0, workspace - rates.cache) / rates.memory / 2


def _lower_node(e: Emitter, node: ir.Node, policy: Policy, sizes: TypicalSizes) -> Choice:
    origin, target = _origin(node), e.target
    try:
        spec = _SPECS[node.op_type].build(Call(node))
    except ValueError as problem:
        raise LoweringError(f"{node.op_type} of node {origin!r} has an impossible geometry: {problem}.") from problem
    dtype = (node.inputs[0].dtype if node.inputs[0] is not None else None) or ir.DataType.FLOAT
    query = Query(spec, _typical(node, spec, sizes), dtype, target, policy.training)
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
        chosen = min(usable, key=lambda c: (c.seconds or 0.0) + _holding(c.workspace, target.rates))
    else:
        reasons = "; ".join(f"{c.name}: {c.reason}" for c in found)
        least = min((c.workspace for c in found if c.workspace), default=0)
        hint = f"The smallest max_workspace that suffices is {least}." if least else ""
        raise LoweringError(f"No lowering of {node.op_type} applies to node {origin!r} ({spec}): {reasons}.", hint=hint)
    e.anchor, e.origin = node, origin
    before = len(e.emitted)
    result = _emit(e, lowerings()[node.op_type][chosen.name], node, spec, chosen.chunks)
    _replace(e, node, result, new=result.producer() in e.emitted[before:])
    return Choice(origin, node.op_type, spec, chosen.name, wanted is not None, tuple(found))


def _typical(node: ir.Node, spec: Any, sizes: TypicalSizes) -> Any:
    """The spec with every unknown size at a typical one, which the cost model looks at."""
    try:
        return _SPECS[node.op_type].build(Call(sizes.node(node))).hinted()
    except ValueError:  # the typical input does not fit: it may be too small, or not divisible
        return spec.hinted()


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
