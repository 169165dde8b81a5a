"""Predict time and workspace of every lowering of a node, or give the reason why it does not apply.

A lowering is emitted into an empty graph (`sketch`) and priced for the target, as a whole and in chunks of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnx_convgrad.errors import LimitError
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.targets import Rates
from onnx_convgrad.lowering.chunks import EACH, counts, emit_in_chunks, part_of
from onnx_convgrad.lowering.cost.node import entering_seconds
from onnx_convgrad.lowering.sketch import SHARES, Sketch, sketch
from onnx_convgrad.lowering.table import Lowering, Query, lowerings, reader_of

Choosing = str | Mapping[str, str]

_GAIN = 0.93
"""Largest share of the time, as predicted, that chunks may take to be considered."""

_WORTH = 1.5
"""Largest time of a lowering that is tried in chunks, as a multiple of the fastest."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Largest rounding errors of the lowerings that are chosen, as multiples of those of a direct sum.

    Attributes:
        forward: For the convolutions of the model, whose errors make some ReLUs fall the other way.
        backward: For those of derivatives, where errors only add up.
    """

    forward: float
    backward: float


ALLOWED = {"auto": Allowed(2.0, 6.0), "exact": Allowed(1.0, 1.0), "fast": Allowed(math.inf, math.inf)}
"""Words for the choice of lowerings.

By default networks are about as precise as in PyTorch, whose own sums round somewhat more than those of ONNX Runtime:
`benchmarks.precision` compares them. The default takes in tiles of 2 x 2 outputs forward, and of 4 x 4 backward.
"""

_CACHED = 0.75
"""Least share of `Sketch.cached` that the chunks take together: small ones have cheaper forms, such as transposed views."""

_TIE, _TIE_SHARE = 2e-6, 0.02
"""Lowerings whose prices differ by fewer seconds, or by a smaller share, count as equal: the fewest nodes decide."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The caller's options for choosing lowerings.

    Attributes:
        choosing: A word of `ALLOWED`, or a mapping from operators or nodes to lowerings; others are chosen as by `"auto"`.
        max_workspace: Bytes that a lowering may hold besides its operands and result, or `None`.
        training: Whether the model's own convolutions, whose weights change from step to step, are lowered too, not only
            those of derivatives.
        compare: Whether every lowering is priced, for reports. Otherwise pricing stops for a lowering that turns out much
            slower than another, and only the forced one is priced where there is one.
    """

    choosing: Choosing = "auto"
    max_workspace: int | None = None
    training: bool = False
    compare: bool = False

    @property
    def word(self) -> str:
        """The choice of every lowering that is not forced."""
        return self.choosing if isinstance(self.choosing, str) else "auto"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A lowering of one node: predicted seconds, workspace in bytes and number of nodes, or the reason against it.

    `chunks` is the number of parts that the batch is cut into; 0 for one part per sample. `rounding` is the size of the
    rounding errors, as a multiple of those of a direct sum.
    """

    name: str
    seconds: float | None
    reason: str | None
    workspace: int = 0
    chunks: int = 1
    nodes: int = 0
    rounding: float = 1.0

    @property
    def rounds(self) -> str:
        """A clause that says how much more it rounds than a direct sum; empty if it does not."""
        return "" if self.rounding == 1 else f"rounds {self.rounding:.3g} times as much as a direct sum"

    def __str__(self) -> str:
        if self.chunks == 1:
            return self.name
        return f"{self.name} sample by sample" if self.chunks == EACH else f"{self.name} in {self.chunks} chunks"


_SKETCHES: dict[Any, Sketch] = {}
_CANDIDATES: dict[Any, tuple[Candidate, ...]] = {}


def candidates(node: ir.Node, query: Query, policy: Policy, forced: str | None = None) -> tuple[Candidate, ...]:
    """Every lowering of the node's operator with its predicted cost or the reason against it.

    `forced` may round as much as it does. Networks repeat their layers, and the result depends on the other arguments alone:
    results are cached by them.
    """
    entries = lowerings()[node.op_type]
    key = (node.op_type, query, policy.word, forced, policy.max_workspace, policy.compare, len(entries))
    if key not in _CANDIDATES:
        _CANDIDATES[key] = tuple(_candidates(entries.values(), node, query, policy, forced))
    return _CANDIDATES[key]


def _candidates(
    entries: Collection[Lowering], node: ir.Node, query: Query, policy: Policy, forced: str | None
) -> list[Candidate]:
    """As `candidates`; what certainly takes too long to be chosen is given up, unless every price is wanted."""
    reasons = {entry.name: _refusal(entry, query, policy, forced=entry.name == forced) for entry in entries}
    every = policy.compare or forced is not None or policy.max_workspace is not None
    whole: dict[str, Sketch] = {}
    least = most = math.inf
    for entry in entries:
        if not reasons[entry.name]:
            try:
                way = whole[entry.name] = _sketched(entry, node, query, 1, most)
                least = min(least, cost(way, query.target.rates))
                most = math.inf if every else _WORTH * tie_limit(least)
            except LimitError as problem:
                reasons[entry.name] = problem.message.rstrip(".")
    near = _WORTH * min((way.seconds for way in whole.values()), default=0.0)
    found = []
    for entry in entries:
        if (reason := reasons[entry.name]) is not None:
            found.append(Candidate(entry.name, None, reason))
            continue
        most = 0.0 if whole[entry.name].seconds > near else math.inf if every else tie_limit(least)
        found.append(_candidate(entry, node, query, policy, most))
        if not found[-1].reason:
            least = min(least, cost(found[-1], query.target.rates))
    return found


def cost(way: Sketch | Candidate, rates: Rates) -> float:
    """Seconds of a lowering, with those for holding its workspace."""
    return (way.seconds or 0.0) + holding_seconds(way.workspace, rates)


def tie_limit(least: float) -> float:
    """The highest cost that counts as equal to this one: among such lowerings, the fewest nodes decide."""
    return least + max(_TIE, _TIE_SHARE * least)


def forced_candidates(node: ir.Node, query: Query, policy: Policy, name: str) -> tuple[Candidate, ...]:
    """The lowering `name` alone, where the prices of the others do not matter."""
    entry = lowerings()[node.op_type][name]
    try:
        alone = not (policy.compare or _refusal(entry, query, policy, forced=True))
        alone = alone and not _cuts(entry, query, _sketched(entry, node, query, 1))
    except LimitError:
        alone = False
    if not alone:
        return candidates(node, query, policy, name)
    return (_candidate(entry, node, query, policy, 0.0),)


def _refusal(entry: Lowering, query: Query, policy: Policy, *, forced: bool) -> str | None:
    reason = next((r for r in (requirement(query) for requirement in entry.requires) if r), None)
    if reason is not None or entry.exact:
        return reason
    if query.dtype != ir.DataType.FLOAT:
        return f"it rounds too much for {query.dtype.name}"
    if forced:
        return None
    allowed = ALLOWED[policy.word]
    most, where = (allowed.forward, "in the forward pass") if query.forward else (allowed.backward, "in gradients")
    if (rounding := entry.rounds(query.spec)) > most:
        return (
            f"it rounds {rounding:.3g} times as much as a direct sum; lowering={policy.word!r} allows {most:g} {where}"
        )
    if query.target.narrow_products:
        return "it rounds too much for TensorFloat-32, in which this provider multiplies float32 by default"
    return None


def _candidate(entry: Lowering, node: ir.Node, query: Query, policy: Policy, most: float) -> Candidate:
    """The lowering in the best number of chunks; chunks are tried that may take less than `most` seconds."""
    ways = dict(_ways(entry, node, query, policy.max_workspace, most))
    budget = policy.max_workspace
    if budget is not None:
        within = {n: way for n, way in ways.items() if way.workspace <= budget}
        if not within:
            least = min(way.workspace for way in ways.values())
            reason = f"it holds {least} bytes besides its operands, more than max_workspace"
            return Candidate(entry.name, None, reason, least)
        ways = within
    chunks, way = min(ways.items(), key=lambda item: cost(item[1], query.target.rates))
    return Candidate(entry.name, way.seconds, None, way.workspace, chunks, way.nodes, entry.rounds(query.spec))


def _ways(
    entry: Lowering, node: ir.Node, query: Query, budget: int | None, most: float
) -> Iterator[tuple[int, Sketch]]:
    """Sketches by number of chunks: the whole batch, chunks that fit the cache, and chunks that fit the budget."""
    whole = _sketched(entry, node, query, 1)
    yield 1, whole
    most = min(most, _GAIN * whole.seconds)
    for chunks in _cuts(entry, query, whole) if most else ():
        if _least(whole, chunks, query) < most:
            cut = _in_chunks(entry, node, query, chunks)
            if cut is not None and cut.seconds < most:
                yield chunks, cut
    if budget is not None:
        for chunks in _counts(entry, query, whole.workspace, budget):
            way = _in_chunks(entry, node, query, chunks)
            if way is None:
                break
            yield chunks, way
            if way.workspace <= budget:
                break


def _least(whole: Sketch, chunks: int, query: Query) -> float:
    """The least seconds of a lowering in chunks, which wait less for memory than the whole does."""
    return _CACHED * whole.cached + entering_seconds(chunks or query.typical.batch, query.target.rates)


def _cuts(entry: Lowering, query: Query, whole: Sketch) -> list[int]:
    """Numbers of chunks at which one chunk may fit the cache, on targets where loops cost little."""
    if not query.target.loops:
        return []
    found: set[int] = set()
    for limit in (query.target.rates.cache / share for share in SHARES):
        for chunks in _counts(entry, query, whole.workspace, limit):
            found.add(chunks)
            if chunks >= -(-whole.workspace // max(int(limit), 1)):
                break  # before that, they are single samples, too large for the limit
    return sorted(found)


def _counts(entry: Lowering, query: Query, workspace: int, limit: float) -> Iterator[int]:
    """Numbers of chunks to which the lowering applies, starting with the fewest that could stay below the limit."""
    for chunks in counts(entry.op_type, query.spec, workspace, limit):
        part = replace(query, spec=part_of(query.spec, chunks), typical=part_of(query.typical, chunks))
        if not any(requirement(part) for requirement in entry.requires):
            yield chunks


def _in_chunks(entry: Lowering, node: ir.Node, query: Query, chunks: int) -> Sketch | None:
    """The sketch of a lowering in chunks; `None` if the tables of their rows are too large."""
    try:
        return _sketched(entry, node, query, chunks)
    except LimitError:
        return None


def _sketched(entry: Lowering, node: ir.Node, query: Query, chunks: int, most: float = math.inf) -> Sketch:
    """The sketch of a lowering, cached by geometry; it may take `most` seconds."""
    spec = query.typical
    key = (entry.op_type, entry.name, replace(query, spec=None, training=False, forward=False), chunks)
    if key not in _SKETCHES:
        shapes = {i: getattr(spec, name) for i, name in enumerate(reader_of(node.op_type).operands)}

        def emit(e: Emitter, copy: ir.Node) -> ir.Value:
            return emit_lowering(e, entry, copy, spec, chunks)

        _SKETCHES[key] = sketch(node, shapes, query.target, emit, query.constant, ends=query.ends, most=most)
    return _SKETCHES[key]


def emit_lowering(e: Emitter, entry: Lowering, node: ir.Node, spec: Any, chunks: int) -> ir.Value:
    """Emit a lowering of `node`, in `chunks` chunks of the batch."""
    if chunks == 1:
        return entry.emit(e, Call(node), spec)
    return emit_in_chunks(e, node, spec, chunks, entry.emit)


def holding_seconds(workspace: int, rates: Rates) -> float:
    """Seconds added for holding a workspace: half a pass over the bytes that do not fit the cache.

    The runtime keeps the largest workspace of a graph from run to run, so of lowerings that are about as fast, one that
    holds little is preferred.
    """
    return max(0.0, workspace - rates.cache) / rates.memory / 2
