"""Infer missing ranks of operands and results from the nodes that read and compute them.

Most derivatives need no sizes, but a rank. A convolution's kernel, for example, has the rank of its data.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import declared_rank
from onnx_convgrad.ir.nodes import all_nodes
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.ir.pooling import POOLS


class InferRanks(GraphPass):
    """Give operands and results of unknown rank the rank that their node requires.

    A value that got its rank here before does not count as a change: shape inference forgets some ranks again, such as that
    of a Squeeze without axes, and would be repeated forever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inferred: set[ir.Value] = set()

    def rewrite(self, model: ir.Model) -> bool:
        values = set()
        for node in all_nodes(model.graph):
            if node.domain or node.op_type not in _RANKS:
                continue
            count, rank_of = _RANKS[node.op_type]
            rank = rank_of(Call(node))
            if rank is None:
                continue
            for value in (*node.inputs[:count], *node.outputs):
                # a branch may read an outer value of another rank where it is not taken
                if value is not None and value.shape is None and value.graph is node.graph:
                    value.shape = ir.Shape([None] * rank)
                    values.add(value)
        changed = bool(values - self.inferred)
        self.inferred |= values
        return changed


def _windows(n: Call) -> int | None:
    """The rank of an operand whose shape is known, or 2 more than the number of spatial axes in an attribute."""
    shapes = (v.shape for v in n.node.inputs[:2] if v is not None)
    axes = declared_rank(n)
    return next((len(shape) for shape in shapes if shape is not None), None if axes is None else 2 + axes)


def _order(n: Call) -> int | None:
    order = n.ints("perm")
    return None if order is None else len(order)


_RANKS: dict[str, tuple[int, Callable[[Call], int | None]]] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), (2, _windows)),
    **dict.fromkeys(POOLS, (1, _windows)),
    "Gemm": (2, lambda _: 2),
    "Transpose": (1, _order),
}
"""Operator -> the number of operands that have the rank of the results, and a function that computes the rank."""
