"""MaxPool, its abstract gradient operator, and MaxUnpool.

    MaxPool            y[p] = x.flat[i[p]]              with the indices i of the maxima, the node's second output
    MaxPoolGrad(g, x)  dx.flat[j] = sum over the p with i[p] = j of g[p]

`lowering.pool` computes MaxPoolGrad, by these indices or without them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import having, mix, notation, pick
from onnx_convgrad.autodiff.registry import Cotangents, linear, vjp
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.pooling import Pool
from onnx_convgrad.ir.scatter import Winners, scatter_to_maxima
from onnx_convgrad.rules.movement import survive
from onnx_convgrad.rules.pool import valid_taps

_POOLS, _UNPOOLS = mix("pools along"), pick("moves maxima along")


_MAXIMA = notation("n c *s -> n c *p, n c *p", s=_POOLS, p=_POOLS)


@vjp("MaxPool", wrt=("X",), factors=having(_MAXIMA, counts_all=lambda n: len(n.node.outputs) > 1), monotone="rising")
def max_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[p] = x.flat[i[p]]: dx.flat[j] = sum over the p with i[p] = j of g[p]. Of equal elements the one at i[p] gets g."""

    def x_grad() -> ir.Value:
        x = n["X"]
        if n.node.outputs[1:]:  # the node computes the indices anyway
            return scatter_to_maxima(e, Pool.of(n, x), g["Y"], winners_of(e, n), x)
        return e.op("MaxPoolGrad", g["Y"], x, domain=DOMAIN, **_windows(n))

    return {"X": x_grad}


@linear(
    f"{DOMAIN}::MaxPoolGrad",
    wrt=("dY",),
    factors=notation("n c *p, n c *s -> n c *s", s=_POOLS, p=_POOLS),
    of=("MaxPool",),
)
def max_pool_grad_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """<g, MaxPoolGrad(dy, x)> = sum over p of g.flat[i[p]] dy[p]."""

    def dy_grad() -> ir.Value:
        winners = winners_of(e, n)
        picked = e.op("Gather", e.op("Reshape", g["dX"], e.ints([-1])), winners.indices, axis=0)
        return e.typed(picked if winners.exist is None else e.where(winners.exist, picked, 0), n["dY"])

    return {"dY": dy_grad}


def _windows(n: Call) -> dict[str, Any]:
    """The attributes of a pool that define its windows."""
    return {name: value for name, value in n.attributes().items() if name != "storage_order"}


def winners_of(e: Emitter, n: Call) -> Winners:
    """The maxima of a pool or of its gradient, by the indices of the model's own pool if it returns them, else of a new one.

    The model's own pool gets no such output: ONNX Runtime then takes another kernel, with other results for windows of -inf
    and with NaN.
    """
    x, node = n["X"], own_pool(e, n, returns_indices=True)
    indices = e.ops("MaxPool", x, outputs=2, **_windows(n))[1] if node is None else node.outputs[1]
    pool = Pool.of(n, x)
    if not _may_be_empty(e, pool):
        return Winners(indices, None)
    sizes = [e.dim(x, 2 + axis) for axis in range(pool.rank)]
    zeros = e.op("Expand", e.scalar(0, x), e.vector([1, 1, *sizes]))
    return Winners(indices, e.compare("Equal", e.op("MaxPool", zeros, **_windows(n)), 0))


def maxima_of(e: Emitter, n: Call) -> ir.Value:
    """The result of the pool of which `n` is the gradient, from the kernel without indices."""
    node = own_pool(e, n, returns_indices=False)
    return e.op("MaxPool", n["X"], **_windows(n)) if node is None else node.outputs[0]


def own_pool(e: Emitter, n: Call, *, returns_indices: bool | None = None) -> ir.Node | None:
    """The first MaxPool of the graph with the same operand and the same windows, and with indices or without."""
    uses = {use.node for use in n["X"].uses() if is_op(use.node, "MaxPool") and use.node.graph is e.graph}
    if returns_indices is not None:
        uses = {node for node in uses if any(v.name for v in node.outputs[1:]) == returns_indices}
    alike = {node for node in uses if not Call(node).int("storage_order", 0) and _windows(Call(node)) == _windows(n)}
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


@linear(
    "MaxUnpool",
    wrt=("X",),
    factors=having(notation("n c *s, n c *s -> n c *p", s=_UNPOOLS, p=_UNPOOLS), counts_all=True),
    moves=True,
)
def max_unpool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y.flat[i[p]] = x[p]: dx[p] = g.flat[i[p]]. Of equal indices only the last gets g: its value overwrote the others."""

    def x_grad() -> ir.Value:
        x, indices = n["X"], n["I"]
        flat = e.ints([-1])

        def read(v: ir.Value) -> ir.Value:
            return e.op("Gather", v, indices, axis=0)

        gx = e.typed(read(e.op("Reshape", g["output"], flat)), x)
        if _are_distinct(n):
            return gx
        where = e.op("Reshape", indices, flat)
        size = e.op("Reshape", e.op("Size", g["output"]), e.ints([1]))

        def write(data: ir.Value, order: ir.Value) -> ir.Value:
            return e.op("ScatterElements", data, where, e.op("Reshape", order, flat), axis=0)

        return e.where(survive(e, e.op("Expand", e.const(np.int64(0)), size), x, write, read), gx, 0)

    return {"X": x_grad}


def _are_distinct(n: Call) -> bool:
    """Whether the indices of a MaxUnpool are those of a MaxPool whose windows share no element."""
    pool = n["I"].producer()
    if not is_op(pool, "MaxPool"):
        return False
    windows = Pool.of(Call(pool), Call(pool)["X"])
    return all(windows.span(axis) <= windows.strides[axis] for axis in range(windows.rank))
