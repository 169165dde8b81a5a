"""Replace reads from sequences whose members are known by the members.

PyTorch's exporter writes `stack` and `cat` of a list as SequenceConstruct, or SequenceEmpty and SequenceInsert, before a
ConcatFromSequence, and `chunk` as SplitToSequence before SequenceAt. A sequence has no gradient, but its members have.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.base.limits import check_limit
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.emit import known as known_size
from onnx_convgrad.ir.loop_bodies import emit_once
from onnx_convgrad.ir.nodes import all_nodes, is_op, subgraphs
from onnx_convgrad.ir.passes import GraphPass

Members = dict[ir.Value, list[ir.Value]]


class UseSequenceMembers(GraphPass):
    """Replace SequenceAt by the member and ConcatFromSequence by a Concat of the members, at opset 13 or later.

    A SequenceMap of known members is written out.
    """

    def rewrite(self, model: ir.Model) -> bool:
        graph = model.graph
        if not any(is_op(node, "SequenceConstruct", "SequenceEmpty", "SplitToSequence") for node in all_nodes(graph)):
            return False
        return self._visit(Emitter(graph, opsets=graph.opset_imports), {})

    def _visit(self, e: Emitter, known: Members) -> bool:
        """Rewrite the nodes of one graph and of those nested in it; `known` are the members of sequences around it."""
        changed = False
        for node in list(e.graph):
            for _, body in subgraphs(node):
                changed |= self._visit(e.of_body(body), known)
            if node.domain:
                continue
            e.anchor = node
            if node.op_type == "SequenceMap":
                known.update(_mapped(e, node, known))
                continue
            members = _members_made_by(e, node, known)
            if members is not None:
                known[node.outputs[0]] = members
            elif node.op_type in _READ and node.inputs[0] in known:
                changed |= _replace(e, node, _READ[node.op_type](e, Call(node), known[node.inputs[0]]))
        return changed


def _members_made_by(e: Emitter, node: ir.Node, known: Members) -> list[ir.Value] | None:
    """The members of the sequence that the node computes, `None` if they are unknown."""
    if node.op_type == "SequenceConstruct":
        return [v for v in node.inputs if v is not None]
    if node.op_type == "SequenceEmpty":
        return []
    if node.op_type == "SplitToSequence" and any(use.node.op_type in _READERS for use in node.outputs[0].uses()):
        return _split(e, Call(node))
    source = known.get(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
    if source is None or node.op_type == "Identity":
        return source
    n = Call(node)
    if node.op_type == "SequenceInsert":
        at = _position(n, len(source), default=len(source))
        return None if at is None else [*source[:at], n["tensor"], *source[at:]]
    if node.op_type == "SequenceErase":
        at = _position(n, len(source), default=len(source) - 1)
        return None if at is None else [*source[:at], *source[at + 1 :]]
    return None


_MOST_MAPPED = 16
"""Most members for which the body of a SequenceMap is written out for each; more become a loop, if they can be stacked."""


def _mapped(e: Emitter, node: ir.Node, known: Members) -> Members:
    """The members of the results of a SequenceMap, if those of its sequences are known: its body for each of them."""
    operands = [v for v in node.inputs if v is not None]
    lists = [known[v] for v in operands if v in known]
    others = any(isinstance(v.type, ir.SequenceType) for v in operands if v not in known)
    if not lists or others or len(lists[0]) > _MOST_MAPPED or len({len(members) for members in lists}) > 1:
        return {}
    body = node.attributes["body"].as_graph()
    made = [emit_once(e, body, [known[v][i] if v in known else v for v in operands]) for i in range(len(lists[0]))]
    return {y: [results[k] for results in made] for k, y in enumerate(node.outputs)}


def _split(e: Emitter, n: Call) -> list[ir.Value] | None:
    """Emit a Split for a SplitToSequence whose part sizes are known; return the parts."""
    x, split, axis = n["input"], n.get("split"), n.int("axis", 0)
    size = None if x.shape is None or not -len(x.shape) <= axis < len(x.shape) else known_size(x.shape[axis])
    lengths = constant_of(split)
    if split is not None and lengths is None:
        return None
    if lengths is not None and lengths.ndim:
        sizes = lengths.tolist()
    else:
        each = 1 if lengths is None else int(lengths)
        if not size or each < 1:
            return None
        check_limit("nodes", -(-size // each), f"Writing out the sequence of {n.node.name!r} (SplitToSequence)")
        sizes = [min(each, size - start) for start in range(0, size, each)]
    parts = list(e.ops("Split", x, e.ints(sizes), outputs=len(sizes), axis=axis))
    if split is None and not n.int("keepdims", 1):
        return [e.op("Squeeze", part, e.ints([axis])) for part in parts]
    return parts


def _position(n: Call, count: int, default: int) -> int | None:
    """The index that the operand `position` has among `count` members; a negative one counts from the end."""
    where = n.get("position")
    if where is None:
        return default
    position = constant_of(where)
    return None if position is None else int(position.item()) + (count if position.item() < 0 else 0)


def _at(_: Emitter, n: Call, members: list[ir.Value]) -> ir.Value | None:
    at = _position(n, len(members), default=0)
    return members[at] if at is not None and 0 <= at < len(members) else None


def _concat(e: Emitter, n: Call, members: list[ir.Value]) -> ir.Value | None:
    axis = n.int("axis", 0)
    if not members:
        return None
    parts = [e.unsqueeze(v, [axis]) for v in members] if n.int("new_axis", 0) else members
    return e.op("Concat", *parts, axis=axis)


_READERS = frozenset({"ConcatFromSequence", "Identity", "SequenceAt", "SequenceErase", "SequenceInsert", "SequenceMap"})

_READ = {"ConcatFromSequence": _concat, "SequenceAt": _at}


def _replace(e: Emitter, node: ir.Node, new: ir.Value | None) -> bool:
    if new is None:
        return False
    old = node.outputs[0]
    own, name = old.is_graph_output(), old.name
    if own and (new.is_graph_output() or new.producer() is None or new.graph is not e.graph):
        new = e.copied(new)
    old.replace_all_uses_with(new, replace_graph_outputs=own)  # see quirks.DELETED_OUTPUTS
    if own:  # other values keep their names
        old.name, new.name = None, name
    e.graph.remove(node, safe=True)
    return True
