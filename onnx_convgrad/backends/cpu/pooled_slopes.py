"""The derivative of an activation in front of a MaxPool, multiplied in where the pool's cotangent is still small.

A pool y = x[i] hands its cotangent g to the elements that won, which are as large as y. So for any function f of single
elements, as the derivative of an activation is of its result x,

    MaxPoolGrad(g, x) f(x) = MaxPoolGrad(g f(y), x)

and two passes over x become passes over y, of which there are a quarter or a ninth as many elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place
from onnx_convgrad.rules.pool_max import own_pool

__all__ = ["move_slopes_behind_pools"]

_OF_ELEMENTS = frozenset({"Add", "Cast", "Greater", "HardSigmoid", "Less", "Max", "Min", "Mul", "Neg", "Sub"})


def move_slopes_behind_pools(graph: ir.Graph, e: Emitter) -> None:
    """Rewrite products of a pool's scattered cotangent with functions of what it pooled, in place.

    Args:
        graph: A differentiated graph. What is not used any more stays in it.
        e: Writes to it.
    """
    outputs, late = OutputPlaces(graph), False
    for node in list(graph):
        if is_op(node, "Mul") and origin_of(node):
            for handed, slope in (node.inputs, node.inputs[::-1]):
                if handed is not None and slope is not None and _moved(e, handed, slope):
                    put_in_place(e, outputs, node.outputs[0], handed, new=True)
                    graph.remove(node, safe=True)
                    late = True
                    break
    if late:
        graph.sort()  # a slope that two cotangents want stands in front of the one that was seen first


def _moved(e: Emitter, value: ir.Value, slope: ir.Value) -> bool:
    """Make `value` the product of both, if it comes from a pool's gradient and `slope` is a function of what was pooled."""
    node = sole_producer(value)
    if node is None or (node.domain, node.op_type) != (DOMAIN, "MaxPoolGrad"):
        return False
    n = Call(node)
    x, pool = n["X"], own_pool(e, n)
    if pool is None or set(_arguments(slope)) != {x}:
        return False
    e.anchor, e.origin = node, origin_of(node)
    there = _again(e, slope, {x: pool.outputs[0]})
    node.replace_input_with(0, e.mul(n["dY"], there))
    return True


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
