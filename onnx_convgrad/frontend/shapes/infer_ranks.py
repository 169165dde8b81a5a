"""Ranks that operators tell of their operands, where the model declares no shape and inference finds none.

Most derivatives need no size, but a rank, and a convolution's kernel, for one, tells that of its data.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnx_convgrad.ir.call import Call

__all__ = ["tell_ranks"]


def tell_ranks(graph: ir.Graph) -> set[ir.Value]:
    """Give operands of unknown rank the one that their node tells; which were given one."""
    told: set[ir.Value] = set()
    for node in graph:
        if node.domain or node.op_type not in _TOLD:
            continue
        count, rank_of = _TOLD[node.op_type]
        rank = rank_of(Call(node))
        if rank is None:
            continue
        for value in node.inputs[:count]:
            if value is not None and value.shape is None:
                value.shape = ir.Shape([None] * rank)
                told.add(value)
    return told


def _windows(n: Call) -> int | None:
    """That of the kernel: of one of the operands, or of a list with an entry for each of its axes."""
    shapes = (v.shape for v in n.node.inputs[:2] if v is not None)
    lists = (n.ints(name) for name in ("kernel_shape", "strides", "dilations"))
    ranks = (*(len(shape) for shape in shapes if shape is not None), *(2 + len(sizes) for sizes in lists if sizes))
    return next(iter(ranks), None)


def _order(n: Call) -> int | None:
    order = n.ints("perm")
    return None if order is None else len(order)


_TOLD: dict[str, tuple[int, Callable[[Call], int | None]]] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), (2, _windows)),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), (1, _windows)),
    "Gemm": (2, lambda _: 2),
    "Transpose": (1, _order),
}
"""Operator -> how many of its operands have the rank, and what that is."""
