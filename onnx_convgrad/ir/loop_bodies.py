"""Build the bodies of loops: emit their nodes into the graph as usual, then move them into a Scan."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import ancestors
from onnx_convgrad.ir.notes import ORIGIN


def take_body(e: Emitter, start: int, inner: Collection[ir.Value], result: ir.Value) -> Sequence[ir.Node]:
    """Remove the nodes from the graph that were emitted since `start` and depend on `inner`, the inputs of the body.

    Returns:
        Those of them that `result` depends on, in order.
    """
    depending = set(inner)
    moved = []
    for node in e.emitted[start:]:
        if any(v in depending for v in node.inputs):
            moved.append(node)
            depending.update(node.outputs)
    removed = set(moved)
    e.emitted[start:] = [node for node in e.emitted[start:] if node not in removed]
    e.graph.remove(moved)
    used = ancestors(result)
    body = [node for node in moved if node in used]
    names = itertools.count()
    for node in body:
        node.metadata_props.pop(ORIGIN, None)
        node.name = f"chunk_{len(e.order)}_{next(names)}"
        for value in node.outputs:  # names of the enclosing graph are given without a look at its bodies
            value.name = f"chunk_{len(e.order)}_{next(names)}"
    for node in moved:
        if node not in used:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
    return body


def emit_scan(e: Emitter, body: ir.Graph, operands: Sequence[ir.Value], scanned: int) -> ir.Value:
    """Emit a Scan with one result; the body gets the last `scanned` operands slice by slice."""
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", scanned)]
    node = ir.Node("", "Scan", operands, attributes, num_outputs=1)
    e.place(node)
    result = node.outputs[0]
    result.dtype = body.outputs[0].dtype or ir.DataType.FLOAT
    return result
