"""What is asked of a node: which operator it is, who reads its result, for which other it was added; and replacing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

import onnx_ir as ir

__all__ = ["become", "is_op", "sole_producer", "subgraphs"]


def is_op(node: ir.Node | None, *op_types: str) -> TypeGuard[ir.Node]:
    """Whether there is a node, and it is one of these operators of ai.onnx, a domain that onnx_ir writes as empty."""
    return node is not None and not node.domain and node.op_type in op_types


def subgraphs(node: ir.Node) -> Iterator[tuple[str, ir.Graph]]:
    """The bodies of a node, with the names of the attributes that hold them."""
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield name, attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from ((name, body) for body in attribute.as_graphs())


def sole_producer(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value for one reader alone: it is read once, and is no output of the graph."""
    if value is None or value.is_graph_output() or len(value.uses()) != 1:
        return None
    return value.producer()


def become(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Iterable[ir.Attr] = ()) -> None:
    """Make another operator with one result of a node: it stays where it is, so that its result does too."""
    node.op_type = op_type
    node.attributes.clear()
    node.attributes.update({a.name: a for a in attributes})
    node.resize_outputs(1)
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def captured_values(node: ir.Node) -> Iterator[ir.Value]:
    """Values of enclosing graphs that the subgraphs of `node` read."""
    for _, graph in subgraphs(node):
        inner = {id(n) for n in graph.all_nodes()}
        own = {id(v) for g in (graph, *graph.subgraphs()) for v in (*g.inputs, *g.initializers.values())}
        for n in graph.all_nodes():
            for v in n.inputs:
                if v is not None and id(v) not in own and id(v.producer()) not in inner:
                    yield v
