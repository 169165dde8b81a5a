"""Compare two values of a graph by the nodes that compute them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.constants import constant_of


def computes_the_same(one: ir.Value, other: ir.Value) -> bool:
    """Whether two values come from equal nodes, attributes and constants, down to values that they share.

    Names do not count. False may also mean that the nodes differ in form only.
    """
    return _Comparison({}).values(one, other)


class _Comparison:
    def __init__(self, pairs: Mapping[ir.Value, ir.Value]) -> None:
        self.pairs = dict(pairs)

    def values(self, one: ir.Value, other: ir.Value) -> bool:
        todo: list[tuple[ir.Value | None, ir.Value | None]] = [(one, other)]
        while todo:
            a, b = todo.pop()
            if a is b:
                continue
            if a is None or b is None:
                return False
            if a in self.pairs:
                if self.pairs[a] is not b:
                    return False
                continue
            x, y = constant_of(a), constant_of(b)
            if x is not None and y is not None:
                if not _equal(x, y):
                    return False
                continue
            p, q = a.producer(), b.producer()
            if p is None or q is None or not self._nodes(p, q) or a.index() != b.index():
                return False
            self.pairs[a] = b
            todo += zip(p.inputs, q.inputs, strict=True)
        return True

    def _nodes(self, p: ir.Node, q: ir.Node) -> bool:
        """Whether two nodes agree in all but their operands."""
        return (
            p.op_identifier() == q.op_identifier()
            and len(p.inputs) == len(q.inputs)
            and p.attributes.keys() == q.attributes.keys()
            and all(self._attributes(p.attributes[key], q.attributes[key]) for key in p.attributes)
        )

    def _attributes(self, a: ir.Attr, b: ir.Attr) -> bool:
        if a.type != b.type or a.is_ref() or b.is_ref():
            return False
        if a.type == ir.AttributeType.GRAPH:
            return self._graphs(a.as_graph(), b.as_graph())
        if a.type == ir.AttributeType.TENSOR:
            return _equal(a.as_tensor().numpy(), b.as_tensor().numpy())
        return bool(a.value == b.value) and a.type not in (ir.AttributeType.GRAPHS, ir.AttributeType.TENSORS)

    def _graphs(self, a: ir.Graph, b: ir.Graph) -> bool:
        if len(a.inputs) != len(b.inputs) or len(a.outputs) != len(b.outputs):
            return False
        if any(x.dtype != y.dtype for x, y in zip(a.inputs, b.inputs, strict=True)):
            return False
        inner = _Comparison({**self.pairs, **dict(zip(a.inputs, b.inputs, strict=True))})
        return all(inner.values(x, y) for x, y in zip(a.outputs, b.outputs, strict=True))


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
