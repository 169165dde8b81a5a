"""Questions about nodes: their operator, their bodies, the values that they capture, the nodes that they depend on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import onnx
import onnx_ir as ir

_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)

REDUCTIONS = tuple(f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split())
"""Operators that reduce a value over some of its axes."""


def is_op(node: ir.Node | None, *op_types: str) -> TypeGuard[ir.Node]:
    """Whether a node exists and is one of these operators of ai.onnx (onnx_ir writes that domain as empty)."""
    return node is not None and not node.domain and node.op_type in op_types


def subgraphs(node: ir.Node) -> Iterator[tuple[str, ir.Graph]]:
    """Yield the bodies of a node, each with the name of its attribute."""
    for attribute in node.attributes.data.values():  # the dict inside, since most nodes have few attributes and no body
        if attribute.type not in _BODIES or attribute.is_ref():
            continue
        bodies = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs()
        yield from ((attribute.name, body) for body in bodies)


def proto_bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of a node of a proto."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.type == attribute.GRAPH else attribute.graphs


def all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes of a graph, each before those of its bodies; faster than the method of onnx_ir."""
    for node in graph:
        yield node
        for attribute in node.attributes.data.values():
            if attribute.type in _BODIES:
                for _, body in subgraphs(node):
                    yield from all_nodes(body)
                break


def nested_graphs(graph: ir.Graph) -> list[ir.Graph]:
    """The bodies of the nodes of a graph, each before its own bodies; faster than the method of onnx_ir."""
    found: dict[ir.Graph, None] = {}
    for node in graph:
        for attribute in node.attributes.data.values():
            if attribute.type in _BODIES:
                for _, body in subgraphs(node):
                    found.update(dict.fromkeys((body, *nested_graphs(body))))
                break
    return list(found)


def release(node: ir.Node) -> None:
    """Let a node that is out of use read nothing: its operands, and what its bodies capture, no longer count it."""
    for inner in (node, *(n for _, body in subgraphs(node) for n in all_nodes(body))):
        for index in range(len(inner.inputs)):
            inner.replace_input_with(index, None)


def reader_count(value: ir.Value) -> int:
    """The number of operands of nodes that are the value. `uses()` copies them, of which there may be thousands."""
    return len(value._uses)  # noqa: SLF001 - onnx_ir has no public number


def sole_producer(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value with a single reader; `None` if more nodes or the graph's outputs use it."""
    if value is None or value.is_graph_output() or reader_count(value) != 1:
        return None
    return value.producer()


def captured_values(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values of enclosing graphs that the bodies of `node` read."""
    for _, graph in subgraphs(node):
        inner = {id(n) for n in all_nodes(graph)}
        own = {id(v) for g in (graph, *nested_graphs(graph)) for v in (*g.inputs, *g.initializers.values())}
        for n in all_nodes(graph):
            for v in n.inputs:
                if v is not None and id(v) not in own and id(v.producer()) not in inner:
                    yield v


def values_read(node: ir.Node) -> list[ir.Value]:
    """The operands of a node that are present, and the values of outer graphs that its bodies read."""
    captured = captured_values(node) if any(a.type in _BODIES for a in node.attributes.data.values()) else ()
    return [v for v in (*node.inputs, *captured) if v is not None]


def put_in_order(graph: ir.Graph) -> None:
    """Sort the nodes of a graph, unless each stands behind those that it reads: sorting takes three times as long."""
    done: set[ir.Node] = set()
    for node in graph:
        producers = [v.producer() for v in values_read(node)]
        if any(p is not None and p not in done and p.graph is graph for p in producers):
            graph.sort()
            return
        done.add(node)


def ancestors(value: ir.Value) -> set[ir.Node]:
    """The nodes that `value` depends on, through operands and captured values."""
    found: set[ir.Node] = set()
    stack = [value.producer()]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [v.producer() for v in values_read(node)]
    return found
