"""Replace sequences, which have no gradient, by tensors, which have one: by their members, or by stacks of them.

PyTorch's exporter writes `stack` and `cat` of a list as SequenceConstruct, or SequenceEmpty and SequenceInsert, before a
ConcatFromSequence, and `chunk` as SplitToSequence before SequenceAt. Where the members of a sequence are known, its readers
read them.

A scripted model splits a tensor into a list, runs over the list in a Loop, which inserts its results at the end of another
list, and stacks or concatenates that. Such a list is replaced by a stack with one slice per member: a list that is carried
only to be extended is a scan output of the Loop, and an element of a list at a computed place is a Gather. SequenceMap
becomes such a Loop. Members of different shapes cannot be stacked, and stay.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.limits import check_limit
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.loop_bodies import emit_once
from onnx_convgrad.ir.nodes import all_nodes, is_op, subgraphs
from onnx_convgrad.ir.passes import GraphPass

Members = dict[ir.Value, list[ir.Value]]


class _SequencePass(GraphPass):
    """Base class: visits the nodes of a graph in order, each after those in its bodies."""

    @abstractmethod
    def handle(self, e: Emitter, node: ir.Node) -> bool:
        """Rewrite a node of the graph that `e` writes, before the node; return whether anything changed."""

    def visit(self, e: Emitter) -> bool:
        changed = False
        for node in list(e.graph):
            for _, body in subgraphs(node):
                changed |= self.visit(e.of_body(body))
            if not node.domain:
                e.anchor = node
                changed |= self.handle(e, node)
        return changed

    @staticmethod
    def replace(e: Emitter, node: ir.Node, new: ir.Value | None) -> bool:
        """Replace a node that reads a sequence by the value that it gives, if that is known."""
        if new is None:
            return False
        old = node.outputs[0]
        own, name = old.is_graph_output(), old.name
        if own and (new.is_graph_output() or new.producer() is None or new.graph is not e.graph):
            new = e.copied(new)
        if new.dtype is None and old.dtype is not None:
            new.dtype = old.dtype
        old.replace_all_uses_with(new, replace_graph_outputs=own)  # see quirks.DELETED_OUTPUTS
        if own:  # other values keep their names
            old.name, new.name = None, name
        e.graph.remove(node, safe=True)
        return True


# -- known members -----------------------------------------------------------------------------------------------------


class UseSequenceMembers(_SequencePass):
    """Replace SequenceAt by the member and ConcatFromSequence by a Concat of the members, at opset 13 or later.

    A SequenceMap of known members is written out.
    """

    def rewrite(self, model: ir.Model) -> bool:
        graph = model.graph
        if not any(is_op(node, "SequenceConstruct", "SequenceEmpty", "SplitToSequence") for node in all_nodes(graph)):
            return False
        self.lists: Members = {}
        return self.visit(Emitter(graph, opsets=graph.opset_imports))

    def handle(self, e: Emitter, node: ir.Node) -> bool:
        if node.op_type == "SequenceMap":
            self.lists.update(_mapped(e, node, self.lists))
        elif (members := _members_made_by(e, node, self.lists)) is not None:
            self.lists[node.outputs[0]] = members
        elif is_op(node, "ConcatFromSequence", "SequenceAt") and node.inputs[0] in self.lists:
            return self.replace(e, node, _picked(e, Call(node), self.lists[node.inputs[0]]))
        return False


def _members_made_by(e: Emitter, node: ir.Node, lists: Members) -> list[ir.Value] | None:
    """The members of the sequence that the node computes, `None` if they are unknown."""
    if node.op_type == "SequenceConstruct":
        return [v for v in node.inputs if v is not None]
    if node.op_type == "SequenceEmpty":
        return []
    if node.op_type == "SplitToSequence" and any(is_op(use.node, *_HANDLED) for use in node.outputs[0].uses()):
        return _split(e, Call(node))
    source = lists.get(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
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


def _mapped(e: Emitter, node: ir.Node, lists: Members) -> Members:
    """The members of the results of a SequenceMap, if those of its sequences are known: its body for each of them."""
    operands = [v for v in node.inputs if v is not None]
    mapped = [lists[v] for v in operands if v in lists]
    others = any(isinstance(v.type, ir.SequenceType) for v in operands if v not in lists)
    if not mapped or others or len(mapped[0]) > _MOST_MAPPED or len(set(map(len, mapped))) > 1:
        return {}
    body = node.attributes["body"].as_graph()
    made = [emit_once(e, body, [lists[v][i] if v in lists else v for v in operands]) for i in range(len(mapped[0]))]
    return {y: [results[k] for results in made] for k, y in enumerate(node.outputs)}


def _split(e: Emitter, n: Call) -> list[ir.Value] | None:
    """Emit a Split for a SplitToSequence whose part sizes are known; return the parts."""
    x, split, axis = n["input"], n.get("split"), n.int("axis", 0)
    size = None if x.shape is None or not -len(x.shape) <= axis < len(x.shape) else known(x.shape[axis])
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


def _picked(e: Emitter, n: Call, members: list[ir.Value]) -> ir.Value | None:
    """The result of a SequenceAt or a ConcatFromSequence; `None` if it is unknown."""
    if n.node.op_type == "SequenceAt":
        at = _position(n, len(members), default=0)
        return members[at] if at is not None and 0 <= at < len(members) else None
    axis = n.int("axis", 0)
    if not members:
        return None
    parts = [e.unsqueeze(v, [axis]) for v in members] if n.int("new_axis", 0) else members
    return e.op("Concat", *parts, axis=axis)


_HANDLED = ("ConcatFromSequence", "Identity", "SequenceAt", "SequenceErase", "SequenceInsert", "SequenceMap")
"""Readers of a sequence for which it pays to split a tensor."""


# -- stacks ------------------------------------------------------------------------------------------------------------

_READERS = frozenset(("ConcatFromSequence", "SequenceAt", "SequenceLength"))


class StackSequences(_SequencePass):
    """Replace sequences in and around loops by stacks of their members, at opset 13 or later."""

    def rewrite(self, model: ir.Model) -> bool:
        graph = model.graph
        made = {node.op_type for node in all_nodes(graph) if not node.domain}
        if not made & _READERS or not made & {"Loop", "SequenceMap", "Scan", "If"}:
            return False
        self.main = graph
        self.names = {d.value for v in graph.inputs for d in v.shape or () if not isinstance(d, int) and d.value}
        self.stacks: dict[ir.Value, Callable[[], ir.Value]] = {}  # they are emitted at their first use
        return self.visit(Emitter(graph, opsets=graph.opset_imports))

    def handle(self, e: Emitter, node: ir.Node) -> bool:
        if node.op_type == "Loop":
            return self._loop(e, node)
        if node.op_type == "SequenceMap":
            return self._map(e, node)
        if node.op_type == "SplitToSequence":
            self._split(e, Call(node))
        elif node.op_type in _READERS and node.inputs[0] in self.stacks and not self._has_rule(e, node):
            return self.replace(e, node, _read(e, Call(node), self.stacks[node.inputs[0]]()))
        return False

    def _has_rule(self, e: Emitter, node: ir.Node) -> bool:
        """Whether the node is differentiated as it is: see `rules.control`."""
        source = node.inputs[0]
        split = source is not None and is_op(source.producer(), "SplitToSequence")
        return split and e.graph is self.main and node.op_type != "ConcatFromSequence"

    def _split(self, e: Emitter, n: Call) -> None:
        """Note how the parts of a tensor are stacked, if they have one size."""
        x, sizes, axis = n["input"], n.get("split"), n.int("axis", 0)
        if x.shape is None:
            return
        rank, each = len(x.shape), 1
        axis %= rank
        if sizes is not None:
            array = constant_of(sizes)
            if array is None or array.ndim:
                return
            each = int(array)
            count = known(x.shape[axis])
            if each < 1 or (each > 1 and (count is None or count % each)):
                return
        keeps = sizes is not None or bool(n.int("keepdims", 1))

        def stack() -> ir.Value:
            e.anchor, before = n.node, e.anchor
            size = e.dims(x)
            parts = e.reshape(x, [*size[:axis], e.size_div(size[axis], each), each, *size[axis + 1 :]])
            parts = e.transpose(parts, [axis, *range(axis), *range(axis + 1, rank + 1)])
            parts = parts if keeps else e.squeeze(parts, [axis + 1])
            e.anchor = before
            return parts

        self.stacks[n.y] = stack

    # -- Loop ----------------------------------------------------------------------------------------------------------

    def _loop(self, e: Emitter, node: ir.Node) -> bool:
        """Make scan outputs of the sequences that a Loop only extends."""
        body = node.attributes["body"].as_graph()
        states = len(node.inputs) - 2
        members = {j: member for j in range(states) if (member := self._extended(node, body, j)) is not None}
        if not members:
            return False
        kept = [j for j in range(states) if j not in members]
        results, scans = list(body.outputs), list(node.outputs)
        inserts = [insert for j in members if (insert := results[1 + j].producer()) is not None]
        own = [_copied(e, body, member) for member in members.values()]
        new = _new_loop(
            e,
            node,
            [*node.inputs[:2], *(node.inputs[2 + j] for j in kept)],
            [*body.inputs[:2], *(body.inputs[2 + j] for j in kept)],
            [results[0], *(results[1 + j] for j in kept), *results[1 + states :], *own],
        )
        body.remove(inserts, safe=True)
        others = [*(scans[j] for j in kept), *scans[states:]]
        for old, value in zip(others, new.outputs, strict=False):
            e.typed(value, old)
            value.name, old.name = old.name, None
            old.replace_all_uses_with(value, replace_graph_outputs=True)
        for (j, member), value in zip(members.items(), new.outputs[len(others) :], strict=True):
            self._joined(scans[j], value, member)
        e.graph.remove(node)
        return True

    def _extended(self, node: ir.Node, body: ir.Graph, j: int) -> ir.Value | None:
        """The value that a Loop appends to its state `j` in each turn, if that begins empty and is read only outside."""
        first, inner, last = node.inputs[2 + j], body.inputs[2 + j], body.outputs[1 + j]
        insert = last.producer()
        if first is None or not is_op(first.producer(), "SequenceEmpty") or not is_op(insert, "SequenceInsert"):
            return None
        assert insert is not None
        member = insert.inputs[1]
        alone = insert.inputs[0] is inner and len(insert.inputs) == 2 and len(inner.uses()) == 1 and not last.uses()
        return member if alone and member is not None and self._can_stack(node.outputs[j], member) else None

    def _can_stack(self, sequence: ir.Value, member: ir.Value) -> bool:
        """Whether all readers of a sequence can read a stack of members instead."""
        uses = [use.node for use in sequence.uses()]
        if sequence.is_graph_output() or any(user.op_type not in _READERS or user.domain for user in uses):
            return False
        joined = [Call(user) for user in uses if user.op_type == "ConcatFromSequence"]
        if member.shape is None:
            return len(joined) == len(uses) and all(n.int("new_axis", 0) and n.int("axis", 0) == 0 for n in joined)
        # members that are joined are alike, but along an axis that they share
        shared = [n.int("axis", 0) for n in joined if not n.int("new_axis", 0)]
        rank = len(member.shape)
        axes = range(rank) if len(joined) < len(uses) else shared
        return all(-rank <= axis < rank and self._is_fixed(member.shape[axis]) for axis in axes)

    def _is_fixed(self, size: int | ir.SymbolicDim) -> bool:
        """Whether a size of a member is the same in every turn."""
        return isinstance(size, int) or size.value in self.names

    def _joined(self, sequence: ir.Value, stack: ir.Value, member: ir.Value) -> None:
        """Note the scan output that has the members of a sequence."""
        stack.name, sequence.name = sequence.name, None
        stack.dtype = member.dtype or ir.DataType.FLOAT
        sizes = [d if self._is_fixed(d) else None for d in member.shape or ()]
        stack.shape = None if member.shape is None else ir.Shape([None, *sizes])
        self.stacks[sequence] = lambda: stack

    # -- SequenceMap ---------------------------------------------------------------------------------------------------

    def _map(self, e: Emitter, node: ir.Node) -> bool:
        """Make a Loop of a SequenceMap whose sequences can be stacked."""
        body = node.attributes["body"].as_graph()
        lists = [v for v in node.inputs if v is not None and (v in self.stacks or isinstance(v.type, ir.SequenceType))]
        stackable = all(map(self._can_stack, node.outputs, body.outputs))
        if not lists or not stackable or any(v not in self.stacks for v in lists):
            return False
        number, going = (
            ir.Value(name=e.names.claim("inner"), shape=ir.Shape([]), type=ir.TensorType(dtype))
            for dtype in (ir.DataType.INT64, ir.DataType.BOOL)
        )
        members, inside = list(body.outputs), e.of_body(body)
        inside.anchor = next(iter(body), None)
        for inner, value in zip(body.inputs, node.inputs, strict=True):
            assert value is not None
            source = value
            if value in lists:
                source = inside.typed(inside.op("Gather", self.stacks[value](), number, axis=0), inner)
            inner.replace_all_uses_with(source, replace_graph_outputs=True)
        results = [_copied(e, body, result) for result in (going, *body.outputs)]
        e.anchor = node
        turns = e.op("Squeeze", e.op("Shape", self.stacks[lists[0]](), start=0, end=1), e.ints([0]))
        new = _new_loop(e, node, [turns, e.const(np.ones((), np.bool_))], [number, going], results)
        for old, new_value, member in zip(node.outputs, new.outputs, members, strict=True):
            self._joined(old, new_value, member)
        e.graph.remove(node)
        return True


def _copied(e: Emitter, body: ir.Graph, value: ir.Value) -> ir.Value:
    """A copy of a value at the end of a body, with a declared type."""
    copy = e.of_body(body).copied(value)
    copy.dtype = copy.dtype or ir.DataType.FLOAT
    return copy


def _new_loop(
    e: Emitter, node: ir.Node, inputs: list[ir.Value | None], starts: list[ir.Value], results: list[ir.Value]
) -> ir.Node:
    """A Loop before `node` with its body, which gets other inputs and results."""
    body = node.attributes.pop("body").as_graph()
    body.inputs[:] = starts
    body.outputs[:] = results
    new = ir.Node("", "Loop", inputs, [ir.AttrGraph("body", body)], num_outputs=len(results) - 1, name=node.name)
    e.anchor = node
    e.place(new)
    return new


# -- readers -----------------------------------------------------------------------------------------------------------


def _read(e: Emitter, n: Call, stack: ir.Value) -> ir.Value:
    """The result of a node that reads a sequence, computed from the stack of its members."""
    if n.node.op_type == "SequenceLength":
        return e.op("Squeeze", e.op("Shape", stack, start=0, end=1), e.ints([0]))
    if n.node.op_type == "SequenceAt":
        return e.op("Gather", stack, n["position"], axis=0)
    axis = n.int("axis", 0)
    if n.int("new_axis", 0):
        return stack if axis == 0 else e.move_axis(stack, 0, axis)
    sizes = e.dims(stack)
    axis %= len(sizes) - 1
    merged = e.size_mul(sizes[0], sizes[axis + 1])
    return e.reshape(e.move_axis(stack, 0, axis), [*sizes[1 : axis + 1], merged, *sizes[axis + 2 :]])
