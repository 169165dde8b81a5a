"""Names of values and nodes: look values up by name, and claim free names, where a clash gets `_1`, `_2`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Self

import onnx_ir as ir

from onnx_convgrad.ir.nodes import nested_graphs


def named_values(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every value of the main graph by name, in order of appearance."""
    return {v.name: v for v in values_of(graph) if v.name}


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """The inputs, the initializers and the results of the nodes of one graph, without those of nested graphs."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def rename(value: ir.Value, name: str | None) -> None:
    """Rename a value but not its tensor, which may belong to the caller's model."""
    tensor = value.const_value
    value.const_value = None
    value.name = name
    if tensor is not None:
        value.const_value = ir.Tensor(tensor, dtype=tensor.dtype, shape=tensor.shape, name=name)  # type: ignore[arg-type]


class Namespace:
    """The names in use, of values or of nodes; ONNX Runtime refuses a graph with duplicates."""

    def __init__(self, used: Iterable[str | None] = ()) -> None:
        self.used = set(used)
        self._counts: dict[str, int] = {}

    @classmethod
    def of_values(cls, graph: ir.Graph) -> Self:
        """The names of a graph's values, including those of nested graphs."""
        return cls(v.name for scope in (graph, *nested_graphs(graph)) for v in values_of(scope))

    @classmethod
    def of_nodes(cls, graph: ir.Graph) -> Self:
        """The names of a graph's nodes."""
        return cls(node.name for node in graph)

    def claim(self, name: str, also: Container[str] = ()) -> str:
        """Reserve and return `name`, or `name_1`, `name_2`, ... if it is in use here or in `also`."""
        candidate, count = name, self._counts.get(name, 0)
        while candidate in self.used or candidate in also:
            count += 1
            candidate = f"{name}_{count}"
        self._counts[name] = count
        self.used.add(candidate)
        return candidate


def second_output(node: ir.Node, graph: ir.Graph, suffix: str, dtype: ir.DataType, shape: ir.Shape | None) -> ir.Value:
    """The optional second output of a node, added if it is absent, with a dtype and, if it has none, a shape."""
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    first, second = node.outputs[:2]
    if not second.name:  # an unnamed optional output would be removed as unused
        second.name = Namespace.of_values(graph).claim(f"{first.name}_{suffix}")
    second.dtype = dtype
    if second.shape is None and shape is not None:
        second.shape = shape
    return second
