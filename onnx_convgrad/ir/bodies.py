"""Bodies of loops: what was emitted around a loop is moved into it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import captured_values
from onnx_convgrad.ir.notes import ORIGIN

__all__ = ["reaching", "scan", "taken"]


def taken(e: Emitter, start: int, inner: Collection[ir.Value], result: ir.Value) -> Sequence[ir.Node]:
    """Remove from the graph what was emitted since `start` and depends on values of the body; those that count."""
    depending = set(inner)
    moved = []
    for node in e.emitted[start:]:
        if any(v in depending for v in node.inputs):
            moved.append(node)
            depending.update(node.outputs)
    gone = set(moved)
    e.emitted[start:] = [node for node in e.emitted[start:] if node not in gone]
    e.graph.remove(moved)
    kept = reaching(result)
    body = [node for node in moved if node in kept]
    names = itertools.count()
    for node in body:
        node.metadata_props.pop(ORIGIN, None)
        node.name = f"chunk_{len(e.order)}_{next(names)}"
        for value in node.outputs:  # a graph around it names its own values without looking here
            value.name = f"chunk_{len(e.order)}_{next(names)}"
    for node in moved:
        if node not in kept:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
    return body


def scan(e: Emitter, body: ir.Graph, operands: Sequence[ir.Value], scanned: int) -> ir.Value:
    """A Scan with one result; the last `scanned` of the operands are handed out slice by slice."""
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", scanned)]
    node = ir.Node("", "Scan", operands, attributes, num_outputs=1)
    e.place(node)
    result = node.outputs[0]
    result.dtype = body.outputs[0].dtype or ir.DataType.FLOAT
    return result


def reaching(result: ir.Value) -> set[ir.Node]:
    """The nodes that a value depends on: the rest of what was emitted with it will be removed."""
    found: set[ir.Node] = set()
    todo = [result.producer()]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [v.producer() for v in (*node.inputs, *captured_values(node)) if v is not None]
    return found
