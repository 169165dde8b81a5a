"""Search of graphs for sizes in half types."""

from __future__ import annotations

import onnx
from onnx import TensorProto

_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)

_OF_DATA = frozenset(
    "Reshape Expand Squeeze Unsqueeze Slice Gather Transpose ReduceSum ReduceProd ReduceMax Identity".split()
)
_OF_ALL = frozenset("Add Sub Mul Div Max Min Neg Abs Range Concat Where CumSum".split())
"""Operators whose results are sizes, or positions below them, if their first operand is or if any operand is."""


def sizes_in_halves(graph: onnx.GraphProto, sizes: set[str] | None = None) -> list[str]:
    """The names of the integers that follow from sizes and are cast to a half type."""
    sizes, found = set() if sizes is None else sizes, []
    for node in graph.node:
        for attribute in node.attribute:
            found += sizes_in_halves(attribute.g, sizes)
        read = node.input if node.op_type in _OF_ALL else node.input[:1]
        if node.op_type in ("Shape", "Size"):
            sizes.update(node.output)
        elif not sizes.intersection(read):
            continue
        elif node.op_type == "Cast" and node.attribute[0].i in _HALVES:
            found.append(node.input[0])
        elif node.op_type in _OF_DATA | _OF_ALL or (
            node.op_type == "Cast" and node.attribute[0].i == TensorProto.INT32
        ):
            sizes.update(node.output)
    return found
