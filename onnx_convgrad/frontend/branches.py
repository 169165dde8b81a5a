"""Replace every If whose condition is known by the branch that is taken.

PyTorch's exporter writes an If wherever a squeeze or a check depends on a size, and other exporters where a mode was a
variable; once sizes are static the condition is a constant.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnx_convgrad.frontend.shapes.declared import DeclaredShapes, DeclaredShapesPass
from onnx_convgrad.frontend.shapes.infer import UNKNOWN_SIZE
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.nodes import all_nodes, is_op, release


class TakeKnownBranches(DeclaredShapesPass):
    """Replace every If of known condition by its branch, in nested graphs too, and inside of such a branch.

    The shapes that a branch declares move to `declared`, so that they are inferred: exporters declare the shape of the
    other branch.
    """

    def rewrite(self, model: ir.Model) -> bool:
        changed = False
        while (found := next(_known_conditions(model.graph), None)) is not None:
            _inline_branch(*found, self.declared)
            changed = True
        if changed:
            _forget_unknown_sizes(model.graph)
        return changed


def _forget_unknown_sizes(graph: ir.Graph) -> None:
    """Forget shapes with sizes that inference did not know while the branch was open, so that it finds them now."""
    for value in (v for node in graph for v in node.outputs if v.shape is not None):
        if any(isinstance(d, ir.SymbolicDim) and UNKNOWN_SIZE.fullmatch(d.value or "") for d in value.shape or ()):
            value.shape = None


def _known_conditions(graph: ir.Graph) -> Iterator[tuple[ir.Node, np.ndarray]]:
    for node in all_nodes(graph):
        condition = constant_of(node.inputs[0]) if is_op(node, "If") else None
        if condition is not None:
            yield node, condition


def _inline_branch(node: ir.Node, condition: np.ndarray, declared: DeclaredShapes) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    body = node.attributes["then_branch" if condition.all() else "else_branch"].as_graph()
    results, nodes, stored = list(body.outputs), list(body), list(body.initializers.values())
    body.outputs.clear()
    body.initializers.clear()
    body.remove(nodes)
    for value in stored:
        graph.register_initializer(value)
    graph.insert_before(node, nodes)
    for value in (v for inner in nodes if not inner.domain for v in inner.outputs):
        if value.shape is not None:
            declared[value], value.shape = value.shape, None
    for old, new in zip(node.outputs, results, strict=True):
        name, old.name = old.name, None
        same = ir.node("Identity", [new], outputs=[ir.Value(name=name, type=old.type)])
        shape = declared.pop(old, old.shape)
        if shape is not None:
            declared[same.outputs[0]] = shape
        graph.insert_before(node, same)
        old.replace_all_uses_with(same.outputs[0], replace_graph_outputs=True)
    graph.remove(node)
    release(node)
