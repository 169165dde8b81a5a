"""Replace sequences that loops read and extend by tensors with one slice per member.

A scripted PyTorch model splits a tensor into a list, runs over the list in a Loop, which inserts its results at the end of
another list, and stacks or concatenates that. A sequence has no gradient, but a stack of its members has: a list that is
carried only to be extended is a scan output of the Loop, and an element of a list at a computed place is a Gather.
SequenceMap becomes such a Loop. Members of different shapes cannot be stacked, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.nodes import all_nodes, is_op, subgraphs
from onnx_convgrad.ir.passes import GraphPass

_READERS = frozenset(("ConcatFromSequence", "SequenceAt", "SequenceLength"))


class StackSequences(GraphPass):
    """Replace sequences in and around loops by stacks of their members, at opset 13 or later."""

    def rewrite(self, model: ir.Model) -> bool:
        graph = model.graph
        made = {node.op_type for node in all_nodes(graph) if not node.domain}
        if not made & _READERS or not made & {"Loop", "SequenceMap", "Scan", "If"}:
            return False
        return _Walk(graph).visit(Emitter(graph, opsets=graph.opset_imports))


class _Walk:
    """One pass over the graphs, with the stack of each sequence that can be one; it is emitted at its first use."""

    def __init__(self, graph: ir.Graph) -> None:
        self.main = graph
        self.names = {d.value for v in graph.inputs for d in v.shape or () if not isinstance(d, int) and d.value}
        self.stacks: dict[ir.Value, Callable[[], ir.Value]] = {}

    def visit(self, e: Emitter) -> bool:
        """Rewrite the nodes of one graph and of the bodies in it; return whether anything changed."""
        changed = False
        for node in list(e.graph):
            for _, body in subgraphs(node):
                changed |= self.visit(e.of_body(body))
            if node.domain:
                continue
            e.anchor = node
            if node.op_type == "SplitToSequence":
                self._split(e, Call(node))
            elif node.op_type in ("Loop", "SequenceMap"):
                changed |= (self._loop if node.op_type == "Loop" else self._map)(e, node)
            elif node.op_type in _READERS and node.inputs[0] in self.stacks and not self._has_rule(e, node):
                changed |= _replace(e, node, _read(e, Call(node), self.stacks[node.inputs[0]]()))
        return changed

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
        made: list[ir.Value] = []

        def stack() -> ir.Value:
            if not made:
                e.anchor, before = n.node, e.anchor
                size = e.dims(x)
                parts = e.reshape(x, [*size[:axis], e.size_div(size[axis], each), each, *size[axis + 1 :]])
                parts = e.transpose(parts, [axis, *range(axis), *range(axis + 1, rank + 1)])
                made.append(parts if keeps else e.squeeze(parts, [axis + 1]))
                e.anchor = before
            return made[0]

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
        inner = [results[0], *(results[1 + j] for j in kept), *results[1 + states :]]
        for member in members.values():
            own = _named(e, ir.node("Identity", [member]), member)
            body.append(own)
            inner.append(own.outputs[0])
        carried = [body.inputs[2 + j] for j in kept]
        starts = [body.inputs[0], body.inputs[1], *carried]
        inputs = [*node.inputs[:2], *(node.inputs[2 + j] for j in kept)]
        outputs = [*(scans[j] for j in kept), *scans[states:], *(scans[j] for j in members)]
        inserts = [insert for j in members if (insert := results[1 + j].producer()) is not None]
        new = _new_loop(e, node, inputs, starts, inner, inserts)
        for old, value in zip(outputs[: len(outputs) - len(members)], new.outputs, strict=False):
            e.typed(value, old)
            value.name, old.name = old.name, None
            old.replace_all_uses_with(value, replace_graph_outputs=True)
        for old, value, member in zip(
            outputs[len(outputs) - len(members) :],
            new.outputs[len(outputs) - len(members) :],
            members.values(),
            strict=True,
        ):
            self._joined(old, value, member)
        e.graph.remove(node, safe=False)
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
        number = ir.Value(name=e.names.claim("inner"), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
        going = ir.Value(name=e.names.claim("inner"), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
        first = next(iter(body), None)
        for inner, value in zip(body.inputs, node.inputs, strict=True):
            assert value is not None
            source = value
            if value in lists:
                pick = _named(e, ir.node("Gather", [self.stacks[value](), number], {"axis": 0}), inner)
                source = pick.outputs[0]
                body.append(pick) if first is None else body.insert_before(first, pick)
            inner.replace_all_uses_with(source, replace_graph_outputs=True)
        results = []
        for result in (going, *body.outputs):
            own = _named(e, ir.node("Identity", [result]), result)
            results.append(own.outputs[0])
            body.append(own)
        e.anchor = node
        turns = e.op("Squeeze", e.op("Shape", self.stacks[lists[0]](), start=0, end=1), e.ints([0]))
        members = list(body.outputs)
        new = _new_loop(e, node, [turns, e.const(np.ones((), np.bool_))], [number, going], results, [])
        for old, value, member in zip(node.outputs, new.outputs, members, strict=True):
            self._joined(old, value, member)
        e.graph.remove(node, safe=False)
        return True


def _named(e: Emitter, node: ir.Node, like: ir.Value) -> ir.Node:
    """A node of a body with names that no other graph uses, and a result with the dtype and shape of `like`."""
    node.outputs[0].type = ir.TensorType(like.dtype or ir.DataType.FLOAT)
    node.outputs[0].shape = like.shape
    node.name = node.outputs[0].name = e.names.claim("inner")
    return node


def _new_loop(
    e: Emitter,
    node: ir.Node,
    inputs: list[ir.Value | None],
    starts: list[ir.Value],
    results: list[ir.Value],
    dropped: Collection[ir.Node],
) -> ir.Node:
    """A Loop in place of `node` with the nodes of its body but those `dropped`, and other inputs and results."""
    body = node.attributes["body"].as_graph()
    nodes = [inner for inner in body if inner not in dropped]
    constants = list(body.initializers.values())
    node.attributes.pop("body")
    body.outputs.clear()
    body.inputs.clear()
    body.initializers.clear()
    body.remove(list(dropped), safe=True)
    body.remove(nodes)
    graph = ir.Graph(starts, results, nodes=nodes, initializers=constants, name=body.name)
    new = ir.Node("", "Loop", inputs, [ir.AttrGraph("body", graph)], num_outputs=len(results) - 1, name=node.name)
    e.anchor = node
    e.place(new)
    new.name = node.name
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
        if axis == 0:
            return e.op("Identity", stack)
        rank = e.rank(stack)
        axis %= rank
        return e.op("Transpose", stack, perm=[*range(1, axis + 1), 0, *range(axis + 1, rank)])
    rank = e.rank(stack) - 1
    axis %= rank
    sizes = e.dims(stack)
    moved = e.move_axis(stack, 0, axis)
    merged = e.size_mul(sizes[0], sizes[axis + 1])
    return e.reshape(moved, [*sizes[1 : axis + 1], merged, *sizes[axis + 2 :]])


def _replace(e: Emitter, node: ir.Node, new: ir.Value) -> bool:
    old = node.outputs[0]
    own, name = old.is_graph_output(), old.name
    if own and (new.is_graph_output() or new.producer() is None or new.graph is not e.graph):
        new = e.copied(new)
    if old.dtype is not None and new.dtype is None:
        new.dtype = old.dtype
    old.replace_all_uses_with(new, replace_graph_outputs=own)
    if own:  # other values keep their names
        old.name, new.name = None, name
    e.graph.remove(node, safe=True)
    return True
