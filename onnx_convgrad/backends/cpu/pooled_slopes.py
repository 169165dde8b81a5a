"""Multiply the derivative of an activation before a MaxPool into the pool's cotangent, which is still small.

A pool y = x[i] passes its cotangent g to the maxima, whose values are y. So for any elementwise function f, such as the
derivative of an activation as a function of its result x,

    MaxPoolGrad(g, x) f(x) = MaxPoolGrad(g f(y), x)
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_elementwise
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.maxima import own_pool
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place
from onnx_convgrad.ir.targets import TargetInfo


class MoveSlopesBehindPools(GraphPass):
    """Multiply elementwise functions of a pool's operand into the cotangent of the pool, before lowering.

    Two passes over x become passes over y, which has a quarter or a ninth of the elements. Nodes that are no longer used
    stay in the graph.
    """

    def __init__(self, target: TargetInfo) -> None:
        super().__init__()
        self.target = target

    def rewrite(self, model: ir.Model) -> bool:
        """Rewrite the products that gradients consist of."""
        graph, changed = model.graph, False
        e, outputs = Emitter(graph, opsets=graph.opset_imports, target=self.target), OutputPlaces(graph)
        for node in list(graph):
            if is_op(node, "Mul") and origin_of(node):
                for scattered, slope in (node.inputs, node.inputs[::-1]):
                    if scattered is not None and slope is not None and _move(e, scattered, slope):
                        put_in_place(e, outputs, node.outputs[0], scattered, new=True)
                        graph.remove(node, safe=True)
                        changed = True
                        break
        if changed:
            graph.sort()  # a slope that two cotangents read is emitted before the first of them in the walk
        return changed


def _move(e: Emitter, value: ir.Value, slope: ir.Value) -> bool:
    """Make `value` the product of both, if a pool's gradient computes it and `slope` is a function of the pool's operand."""
    node = sole_producer(value)
    if node is None or (node.domain, node.op_type) != (DOMAIN, "MaxPoolGrad"):
        return False
    n = Call(node)
    x, pool = n["X"], own_pool(e, n)
    if pool is None or set(_arguments(slope)) != {x}:
        return False
    e.anchor, e.origin = node, origin_of(node)
    moved = _substitute(e, slope, {x: pool.outputs[0]})
    node.replace_input_with(0, e.mul(n["dY"], moved))
    return True


def _arguments(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the arguments of an elementwise function, without constants of one element."""
    number, node = constant_of(value), value.producer()
    if number is not None and number.size == 1:
        return
    if node is None or not is_elementwise(node) or not origin_of(node):
        yield value
        return
    for operand in node.inputs:
        if operand is not None:
            yield from _arguments(operand)


def _substitute(e: Emitter, value: ir.Value, known: dict[ir.Value, ir.Value]) -> ir.Value:
    """Emit the function that computes `value` again, with arguments replaced by those in `known`."""
    node = value.producer()
    if value not in known and constant_of(value) is None and node is not None:
        operands = [None if v is None else _substitute(e, v, known) for v in node.inputs]
        copy = e.op(node.op_type, *operands, **Call(node).attributes())
        like = next(v for v in operands if v is not None and constant_of(v) is None)
        copy.shape, copy.type = like.shape, value.type
        known[value] = copy
    return known.get(value, value)
