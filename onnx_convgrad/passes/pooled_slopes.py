"""The derivative of an activation in front of a MaxPool, multiplied in where the pool's cotangent is still small.

A pool y = x[i] hands its cotangent g to the elements that won, which are as large as y. So for any function f of single
elements, as the derivative of an activation is of its result x,

    scatter(g, i) f(x) = scatter(g f(y), i)

and two passes over x become passes over y, of which there are a quarter or a ninth as many elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.emit import Emitter
from onnx_convgrad.graph.constants import constant_of
from onnx_convgrad.graph.nodes import is_op, origin_of, sole_producer
from onnx_convgrad.graph.outputs import OutputPlaces
from onnx_convgrad.registry import Call

__all__ = ["move_slopes_behind_pools"]

_OF_ELEMENTS = frozenset({"Add", "Cast", "Greater", "HardSigmoid", "Less", "Max", "Min", "Mul", "Neg", "Sub"})


@dataclass(frozen=True, slots=True)
class _Scattered:
    """A cotangent handed to the elements that won: by `node`, from operand `position` of `reader`."""

    node: ir.Node
    reader: ir.Node
    position: int

    @property
    def cotangent(self) -> ir.Value | None:
        return self.reader.inputs[self.position]


def move_slopes_behind_pools(graph: ir.Graph, e: Emitter) -> None:
    """Rewrite products of a pool's scattered cotangent with functions of what it pooled, in place.

    Args:
        graph: A differentiated graph. What is not used any more stays in it.
        e: Writes to it.
    """
    outputs, late = OutputPlaces(graph), False
    for node in list(graph):
        if is_op(node, "Mul") and origin_of(node):
            for scattered, slope in (node.inputs, node.inputs[::-1]):
                if scattered is not None and slope is not None and _moved(e, scattered, slope):
                    old = node.outputs[0]
                    e.typed(scattered, old)
                    outputs.replace(old, scattered)
                    scattered.name, old.name = old.name, None
                    graph.remove(node, safe=True)
                    late = True
                    break
    if late:
        graph.sort()  # a slope that two cotangents want stands in front of the one that was seen first


def _moved(e: Emitter, value: ir.Value, slope: ir.Value) -> bool:
    """Make `value` the product of both, if it is a scattered cotangent and `slope` a function of what was pooled."""
    found = _scattered(value)
    cotangent = None if found is None else found.cotangent
    if found is None or cotangent is None:
        return False
    for x in _arguments(slope):
        pool = _pool(x, origin_of(found.node))
        if pool is not None and all(v is x for v in _arguments(slope)):
            e.anchor, e.origin = found.reader, origin_of(found.node)
            there = _again(e, slope, {x: pool.outputs[0]})
            found.reader.replace_input_with(found.position, e.mul(cotangent, there))
            return True
    return False


def _scattered(value: ir.Value) -> _Scattered | None:
    """How `value` was scattered, if nothing else reads it, nor what lies between."""
    node = sole_producer(value)
    while is_op(node, "Reshape"):
        node = sole_producer(node.inputs[0])
    if is_op(node, "MaxUnpool"):
        return _Scattered(node, node, 0)
    if not is_op(node, "ScatterElements", "ScatterND"):
        return None
    row = sole_producer(node.inputs[2])
    return _Scattered(node, row, 0) if is_op(row, "Reshape") else None


def _arguments(value: ir.Value) -> Iterator[ir.Value]:
    """What a function of single elements is a function of; numbers do not count."""
    number, node = constant_of(value), value.producer()
    if number is not None and number.size == 1:
        return
    if not is_op(node, *_OF_ELEMENTS) or not origin_of(node):
        yield value
        return
    for operand in node.inputs:
        if operand is not None:
            yield from _arguments(operand)


def _again(e: Emitter, value: ir.Value, known: dict[ir.Value, ir.Value]) -> ir.Value:
    """The same function of other elements: of those in `known`."""
    node = value.producer()
    if value not in known and constant_of(value) is None and node is not None:
        operands = [None if v is None else _again(e, v, known) for v in node.inputs]
        copy = e.op(node.op_type, *operands, **Call(node).attributes())
        like = next(v for v in operands if v is not None and constant_of(v) is None)
        copy.shape, copy.type = like.shape, value.type
        known[value] = copy
    return known.get(value, value)


def _pool(x: ir.Value, name: str) -> ir.Node | None:
    """The only MaxPool of the model's own that has this name and takes `x`."""
    pools = {use.node for use in x.uses() if is_op(use.node, "MaxPool") and not origin_of(use.node)}
    named = [node for node in pools if name and node.name == name]
    return named[0] if len(named) == 1 else None
