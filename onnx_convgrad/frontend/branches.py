"""An If whose condition is known is the branch that is taken.

PyTorch's exporter writes an If wherever a squeeze or a check depends on a size, and other exporters where a mode was a
variable; once sizes are static the condition is a constant.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import onnx_ir as ir

from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.namespace import Namespace, rename
from onnx_convgrad.ir.nodes import is_op

__all__ = ["take_known_branches"]


def take_known_branches(graph: ir.Graph, declared: MutableMapping[ir.Value, ir.Shape]) -> bool:
    """Put the branch in place of every If of known condition; those that this brings to light too.

    The shapes that a branch declares go to `declared`, for inference to find better ones: exporters write that of the
    other branch.

    Returns:
        Whether there was one.
    """
    found = False
    while (node := next(filter(_known, graph), None)) is not None:
        _take(graph, node, declared)
        found = True
    return found


def _known(node: ir.Node) -> bool:
    return is_op(node, "If") and constant_of(node.inputs[0]) is not None


def _take(graph: ir.Graph, node: ir.Node, declared: MutableMapping[ir.Value, ir.Shape]) -> None:
    condition = constant_of(node.inputs[0])
    assert condition is not None, "only an If of known condition is taken apart"
    body = node.attributes["then_branch" if condition.all() else "else_branch"].as_graph()
    results, nodes, stored = list(body.outputs), list(body), list(body.initializers.values())
    body.outputs.clear()
    body.initializers.clear()
    for inner in nodes:
        body.remove(inner)
    names = Namespace.of_values(graph)
    for value in (*stored, *(v for inner in nodes for v in inner.outputs)):
        name = names.claim(value.name) if value.name else None  # several branches may use one name
        if name != value.name:
            rename(value, name)
    for value in stored:
        graph.register_initializer(value)
    for inner in nodes:
        graph.insert_before(node, inner)
        for value in () if inner.domain else inner.outputs:
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
    graph.remove(node, safe=True)
