"""Replace abstract gradient operators by plain ones: the cheapest lowering within the workspace budget, or a forced one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex

import onnx_ir as ir

from onnx_convgrad.base.names import INSPECT, check_names
from onnx_convgrad.errors import ArgumentError, LoweringError, RuleContractError
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import Folding, is_constant
from onnx_convgrad.ir.convolution import biased, input_grad
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.nodes import all_nodes, is_op, nested_graphs
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place
from onnx_convgrad.ir.targets import Rates, TargetInfo
from onnx_convgrad.lowering.candidates import (
    ALLOWED,
    Candidate,
    Choosing,
    Policy,
    candidates,
    cost,
    emit_lowering,
    forced_candidates,
    tie_limit,
)
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.lowering.loops import note_loop
from onnx_convgrad.lowering.table import Query, lowerings, reader_of


@dataclass(frozen=True, slots=True)
class Choice:
    """The lowering of one node; `candidates` may hold the forced one alone."""

    node: str
    op_type: str
    spec: Any
    chosen: str
    forced: bool
    candidates: tuple[Candidate, ...]

    @property
    def way(self) -> str:
        """The chosen lowering, with the number of its chunks."""
        return str(self._taken)

    @property
    def workspace(self) -> int:
        """Bytes that the chosen lowering holds besides its operands and result."""
        return self._taken.workspace

    @property
    def _taken(self) -> Candidate:
        return next(c for c in self.candidates if c.name == self.chosen)


def check_choice(choosing: Choosing) -> None:
    """Raise `ArgumentError` for unknown lowerings in the caller's mapping."""
    table = lowerings()
    if isinstance(choosing, str):
        check_names([choosing], list(ALLOWED), "lowering")
        return
    if not isinstance(choosing, Mapping):
        raise ArgumentError(
            f"lowering must be 'auto', 'exact', 'fast' or a mapping from operators or nodes to lowerings, not {choosing!r}."
        )
    for key, name in choosing.items():
        if not isinstance(key, str):
            raise ArgumentError(f"The keys of lowering must be operators or nodes, not {key!r}.")
        if not isinstance(name, str):
            raise ArgumentError(f"The lowering for {key} must be a name, not {name!r}.")
        operator = key.partition(":")[0]
        options = table.get(operator) or {n: entry for ops in table.values() for n, entry in ops.items()}
        check_names([name], sorted(options), f"lowering for {key}:")


def check_workspace(limit: int | None) -> None:
    """Raise `ArgumentError` for a budget that is not a positive number of bytes."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, SupportsIndex) or index(limit) < 1):
        raise ArgumentError(f"max_workspace must be a positive number of bytes, not {limit!r}.")


def lower(graph: ir.Graph, target: TargetInfo, policy: Policy | None = None) -> list[Choice]:
    """Replace the abstract operators in `graph`, the convolutions of derivatives, and operators that a dtype lacks.

    Those in the bodies of nodes are replaced too.

    Raises:
        LoweringError: No candidate applies to a node, or the forced one does not; with each reason.
    """
    policy = policy or Policy()
    choosing = policy.choosing
    check_choice(choosing)
    e, outputs = Emitter(graph, target=target, samples=policy.training), OutputPlaces(graph)
    from_transposed, stand_ins = _transposed_as_gradients(graph, e, outputs) if policy.training else ({}, {})
    bodies = nested_graphs(graph)
    todo = {g: [node for node in g if _needs_lowering(node, target, policy)] for g in (graph, *bodies)}
    if not isinstance(choosing, str):
        _check_keys(choosing, graph, [node for nodes in todo.values() for node in nodes])
    sizes, folded, choices = TypicalSizes(graph), Folding(), []
    for g, nodes in todo.items():
        if not nodes:
            continue
        if g is not graph:
            e, outputs = e.of_body(g), OutputPlaces(g)
        stage = _Stage(e, policy, sizes, folded, outputs, from_transposed)
        choices += [stage.lower(node) for node in nodes]
        g.remove(nodes, safe=True)
    for like, x in stand_ins.items():
        like.replace_all_uses_with(x)
    return choices


def _check_keys(choosing: Collection[str], graph: ir.Graph, todo: Sequence[ir.Node]) -> None:
    """Raise `ArgumentError` for a key that is not OP, NODE or OP:NODE for an operator and a node of the graph.

    OP:NODE is valid too where that node has no such operator, because its gradient is not wanted.
    """
    origins = {_origin(node) for node in todo}
    named = origins | {node.name for node in all_nodes(graph)}

    def elsewhere(key: str) -> bool:
        operator, colon, name = key.partition(":")
        return bool(colon) and operator in lowerings() and name in named

    options = {*lowerings(), *origins, *(f"{node.op_type}:{_origin(node)}" for node in todo)}
    unknown = [key for key in choosing if not elsewhere(key)]
    check_names(unknown, sorted(options), "operator or node in lowering:", INSPECT)


def _origin(node: ir.Node) -> str:
    """The name of the forward node that an abstract node belongs to."""
    return origin_of(node) or node.name or ""


def _needs_lowering(node: ir.Node, target: TargetInfo, policy: Policy) -> bool:
    if node.domain == DOMAIN:
        return True
    if node.domain or node.op_type not in lowerings() or node.inputs[0] is None:
        return False
    dtype = node.inputs[0].dtype
    if dtype is not None and dtype not in target.conv_dtypes:
        return True
    if node.op_type != "Conv" or is_constant(node.inputs[1]):
        return False
    if policy.training:
        return True
    # part of a derivative, such as that of ConvTranspose, with elements to compute
    empty = any(v is not None and v.shape is not None and 0 in v.shape for v in (*node.inputs, *node.outputs))
    return bool(origin_of(node)) and not empty and "auto_pad" not in node.attributes


def _forced(choosing: Choosing, node: ir.Node, origin: str, *, transposed: bool) -> str | None:
    """The caller's choice for this node: by OP:NODE with the forward node, by that node, or by operator.

    A data gradient that replaces a transposed convolution is chosen by OP:NODE alone: the caller sees no gradient there.
    """
    if isinstance(choosing, str):
        return None
    keys = [f"{node.op_type}:{origin}", *([] if transposed else [origin, node.op_type])]
    names = (choosing.get(key) for key in keys)
    return next((name for name in names if name in lowerings()[node.op_type]), None)  # by node: of one of its gradients


@dataclass(frozen=True, slots=True)
class _Stage:
    """One graph being lowered: emitter, options, and results shared by all its nodes."""

    e: Emitter
    policy: Policy
    sizes: TypicalSizes
    folded: Folding
    outputs: OutputPlaces
    from_transposed: Mapping[ir.Node, bool]
    """Data gradients that replace transposed convolutions, and whether these belong to the model itself."""

    def lower(self, node: ir.Node) -> Choice:
        """Replace a node by its cheapest lowering."""
        e, origin = self.e, _origin(node)
        try:
            spec = reader_of(node.op_type).build(Call(node))
        except ValueError as problem:
            message = f"{node.op_type} of node {origin!r} has an impossible geometry: {problem}."
            raise RuleContractError(message, suspect=message) from problem
        transposed = node in self.from_transposed
        wanted = _forced(self.policy.choosing, node, origin, transposed=transposed)
        query = self._query(node, spec)
        arguments = node, query, self.policy
        found = candidates(*arguments) if wanted is None else forced_candidates(*arguments, wanted)
        chosen = _chosen(node.op_type, origin, spec, found, wanted, e.target.rates)
        plain = transposed or (node.op_type == "Conv" and not self.policy.training)  # one node without lowering
        if wanted is None and plain:
            chosen = _worthwhile(chosen, found)
        e.anchor, e.origin = node, origin
        before = len(e.emitted)
        result = emit_lowering(e, lowerings()[node.op_type][chosen.name], node, spec, chosen.chunks)
        new = result.producer() in e.emitted[before:]
        whole = put_in_place(e, self.outputs, node.outputs[0], result, new=new)
        if chosen.chunks != 1:
            note_loop(e, node, whole, chosen.name, chosen.chunks)
        return Choice(origin, node.op_type, spec, chosen.name, wanted is not None, found)

    def _query(self, node: ir.Node, spec: Any) -> Query:
        target = self.e.target
        dtype = (node.inputs[0].dtype if node.inputs[0] is not None else None) or ir.DataType.FLOAT
        present = tuple(v is not None for v in node.inputs)
        known = [i for i, v in enumerate(node.inputs) if v is not None and self.folded(v)]
        constant = tuple(known) if target.lays_out_constants else ()
        ends = node.outputs[0].is_graph_output()
        forward = self.from_transposed.get(node, node.op_type == "Conv" and not origin_of(node))
        typical, training = self._typical(node, spec), self.policy.training
        return Query(spec, typical, dtype, target, training, present, constant, ends, forward)

    def _typical(self, node: ir.Node, spec: Any) -> Any:
        """The spec with every unknown size replaced by a typical one, for the cost model."""
        hinted = spec.hinted()
        if hinted == spec:
            return spec
        try:
            return reader_of(node.op_type).build(Call(self.sizes.node(node))).hinted()
        except ValueError:  # the typical input does not fit: it is too small, or not divisible
            return hinted


_WORTH = 0.75
"""Largest share of a convolution's time, as predicted, that several nodes in its place may take."""


def _worthwhile(chosen: Candidate, found: Sequence[Candidate]) -> Candidate:
    """The chosen candidate, or the runtime's own operator, one node, where that is about as fast."""
    operators = ("conv", "conv_transpose")
    itself = next((c for c in found if c.name in operators and c.seconds is not None), chosen)
    return chosen if (chosen.seconds or 0.0) <= _WORTH * (itself.seconds or 0.0) else itself


def _chosen(
    op_type: str, origin: str, spec: Any, found: Sequence[Candidate], wanted: str | None, rates: Rates
) -> Candidate:
    """The forced candidate, else the one with the fewest nodes among those about as cheap as the cheapest."""
    usable = [c for c in found if c.seconds is not None]
    if wanted is not None:
        chosen = next(c for c in found if c.name == wanted)
        if chosen.reason:
            raise LoweringError(
                f"Lowering {wanted!r} was asked for {op_type} of node {origin!r}, but {chosen.reason}.",
                hint=f"Usable here: {', '.join(c.name for c in usable) or 'none'}.",
            )
        return chosen
    if usable:
        costs = {c: cost(c, rates) for c in usable}
        least = min(costs.values())
        about = [c for c in usable if costs[c] <= tie_limit(least)]
        return min(about, key=lambda c: (c.nodes, costs[c]))
    reasons = "; ".join(f"{c.name}: {c.reason}" for c in found)
    least = min((c.workspace for c in found if c.workspace), default=0)
    hint = f"The smallest max_workspace that suffices is {least}." if least else ""
    raise LoweringError(f"No lowering of {op_type} applies to node {origin!r} ({spec}): {reasons}.", hint=hint)


# -- transposed convolutions of a training step as data gradients, which have many lowerings ---------------------------


def _transposed_as_gradients(
    graph: ir.Graph, e: Emitter, outputs: OutputPlaces
) -> tuple[dict[ir.Node, bool], dict[ir.Value, ir.Value]]:
    """Replace the transposed convolutions of a training step by data gradients, which have more lowerings.

    Returns these, with whether each replaces a node of the model, not of a derivative; and the values that stand in for the
    shapes of their results, with the operand of the node: only the batch, in which they agree, is read at run time.
    """
    gradients: dict[ir.Node, bool] = {}
    stand_ins: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if is_op(node, "ConvTranspose")]:
        e.anchor, e.origin = node, _origin(node)
        x, y = node.inputs[0], node.outputs[0]
        like = ir.Value(shape=y.shape, type=y.type)
        found = _as_data_gradient(e, node, like)
        if found is not None and x is not None:
            gradients[found[0]], stand_ins[like] = not origin_of(node), x
            put_in_place(e, outputs, y, found[1], new=True)
            graph.remove(node, safe=True)
    return gradients, stand_ins


def _as_data_gradient(e: Emitter, node: ir.Node, like: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """Emit the data gradient of the convolution that maps the result's size to the operand's, of the shape of `like`.

    Returns the abstract node, and the result with the bias; `None` where the weight is constant, so that the runtime
    prepares it, or where a size other than the batch is unknown, or one is 0.
    """
    n = Call(node)
    if is_constant(n["W"]):
        return None
    x, y, bias = n["X"], n.y, n.get("B")
    try:
        spec = reader_of("ConvTranspose").build(n)
    except ValueError:
        return None
    sizes = (spec.channels, spec.features, *spec.x, *spec.kernel, *spec.y)
    if x.dtype not in e.target.conv_dtypes or y.shape is None or None in sizes or 0 in (*sizes, spec.batch):
        return None
    result = input_grad(e, x, n["W"], like, spec.window)
    emitted, result = e.emitted[-1], e.typed(result, y)
    return emitted, biased(e, result, bias, spec.rank)
