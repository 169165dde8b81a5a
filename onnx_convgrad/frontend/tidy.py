"""Sort and name nodes, and store and mark constants."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import ModelError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import Namespace, rename, values_of
from onnx_convgrad.ir.nodes import all_nodes, is_op, nested_graphs
from onnx_convgrad.ir.notes import mark_lifted
from onnx_convgrad.ir.passes import GraphPass


class SortNodes(GraphPass):
    """Sort the nodes topologically and name the graph; ONNX Runtime requires neither, ONNX requires both."""

    def rewrite(self, model: ir.Model) -> bool:
        graph = model.graph
        graph.name = graph.name or "main_graph"
        done: set[ir.Node | None] = {None}
        for node in graph:
            if any(v is not None and v.producer() not in done for v in node.inputs):
                try:
                    graph.sort()
                except ValueError as problem:
                    name = node.name or node.outputs[0].name
                    raise ModelError(f"Node {name!r} ({node.op_type}) depends on its own result.") from problem
                return True
            done.add(node)
        return False


class NameInnerValues(GraphPass):
    """Give values of nested graphs names of their own: sibling branches may use one name, and their nodes may move out."""

    def rewrite(self, model: ir.Model) -> bool:
        names, changed = Namespace.of_values(model.graph), False
        seen = {value.name for value in values_of(model.graph)}
        inner = nested_graphs(model.graph)
        for value in [value for graph in inner for value in values_of(graph) if value.name]:
            if value.name in seen:
                rename(value, names.claim(value.name or ""))
                changed = True
            seen.add(value.name)
        return changed


class NameNodes(GraphPass):
    """Give every node of a graph a name of its own: messages refer to it, and ONNX Runtime refuses duplicates."""

    def rewrite(self, model: ir.Model) -> bool:
        for graph in (model.graph, *nested_graphs(model.graph)):
            names = Namespace.of_nodes(graph)
            seen: set[str | None] = {"", None}
            for number, node in enumerate(graph):
                if node.name in seen:
                    node.name = names.claim(node.name or f"{node.op_type}_{number}")
                seen.add(node.name)
        return True


class GiveConditions(GraphPass):
    """Give every Loop without a condition the constant True; shape inference knows no other form."""

    def rewrite(self, model: ir.Model) -> bool:
        loops = [n for n in all_nodes(model.graph) if is_op(n, "Loop") and len(n.inputs) > 1 and n.inputs[1] is None]
        if not loops:
            return False
        true = Emitter(model.graph).const(np.ones((), np.bool_))
        for loop in loops:
            loop.replace_input_with(1, true)
        return True


class RenameRuntimeShapes(GraphPass):
    """Rename the shapes that ONNX Runtime's optimizer added: it refuses a file that already uses its own names."""

    _NAMES = re.compile(r"gemm_(input|output)_shape(_token_\d+)?")

    def rewrite(self, model: ir.Model) -> bool:
        stored = model.graph.initializers
        clashing = [v for name, v in stored.items() if self._NAMES.fullmatch(name) and v.dtype == ir.DataType.INT64]
        names = Namespace.of_values(model.graph)
        for value in clashing:
            rename(value, names.claim(f"kept_{value.name}"))
        return bool(clashing)


def store(graph: ir.Graph, name: str, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
    """Add an initializer to a graph."""
    tensor = ir.Tensor(array, dtype=dtype, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


class MarkConstants(GraphPass):
    """Note which constants the file stores as Constant nodes, before they become initializers."""

    def rewrite(self, model: ir.Model) -> bool:
        for graph in (model.graph, *nested_graphs(model.graph)):
            for value in graph.initializers.values():
                mark_lifted(value, from_node=False)
        for node in all_nodes(model.graph):
            if node.op_type == "Constant":
                mark_lifted(node.outputs[0], from_node=True)
        return False
