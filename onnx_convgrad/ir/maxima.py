"""The maxima of a pool and their indices, from a MaxPool of the model where it has one that fits, else from a new one."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.pooling import Pool, valid_taps
from onnx_convgrad.ir.scatter import Winners


def windows_of(n: Call) -> dict[str, Any]:
    """The attributes of a pool that define its windows."""
    return {name: value for name, value in n.attributes().items() if name != "storage_order"}


def winners_of(e: Emitter, n: Call) -> Winners:
    """The maxima of a pool or of its gradient, by the indices of the model's own pool if it returns them, else of a new one.

    The model's own pool gets no such output: ONNX Runtime then takes another kernel, with other results for windows of -inf
    and with NaN.
    """
    x, node = n["X"], own_pool(e, n, returns_indices=True)
    indices = e.ops("MaxPool", x, outputs=2, **windows_of(n))[1] if node is None else node.outputs[1]
    pool = Pool.of(n, x)
    if not _may_be_empty(e, pool):
        return Winners(indices, None)
    sizes = [e.dim(x, 2 + axis) for axis in range(pool.rank)]
    zeros = e.op("Expand", e.scalar(0, x), e.vector([1, 1, *sizes]))
    return Winners(indices, e.compare("Equal", e.op("MaxPool", zeros, **windows_of(n)), 0))


def maxima_of(e: Emitter, n: Call) -> ir.Value:
    """The result of the pool of which `n` is the gradient, from the kernel without indices."""
    node = own_pool(e, n, returns_indices=False)
    return e.op("MaxPool", n["X"], **windows_of(n)) if node is None else node.outputs[0]


def own_pool(e: Emitter, n: Call, *, returns_indices: bool | None = None) -> ir.Node | None:
    """The first MaxPool of the graph with the same operand and the same windows, and with indices or without."""
    uses = {use.node for use in n["X"].uses() if is_op(use.node, "MaxPool") and use.node.graph is e.graph}
    if returns_indices is not None:
        uses = {node for node in uses if any(v.name for v in node.outputs[1:]) == returns_indices}
    alike = {
        node for node in uses if not Call(node).int("storage_order", 0) and windows_of(Call(node)) == windows_of(n)
    }
    for node in e.graph if alike else ():
        if node in alike:
            return node
        if node is n.node:  # results of later nodes cannot be used here
            break
    return None


def _may_be_empty(e: Emitter, pool: Pool) -> bool:
    """Whether a window may consist of padding only, which needs dilation; its index is then undefined."""
    for axis in range(pool.rank):
        if pool.dilations[axis] == 1 or pool.pads is None:
            continue
        low, high = pool.pads[axis]
        if low == 0 and high == 0 and not pool.ceil:
            continue
        if pool.sizes[axis] is None or 0 in valid_taps(e, pool, axis, end_counts=False):
            return True
    return pool.pads is None and set(pool.dilations) != {1}
