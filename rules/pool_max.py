"""MaxPool, its abstract gradient operator, and MaxUnpool.

    MaxPool            y[p] = x.flat[i[p]]              with the indices i of the maxima, the node's second output
    MaxPoolGrad(g, x)  dx.flat[j] = sum over the p with i[p] = j of g[p]

`lowering.pool` computes MaxPoolGrad, by these indices or without them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import counting, mix, notation, pick
from onnx_convgrad.autodiff.registry import Cotangents, linear, vjp
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.namespace import second_output
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.pooling import Pool
from onnx_convgrad.ir.scatter import Winners, scatter_to_maxima
from onnx_convgrad.rules.pool import valid_taps

_POOLS, _UNPOOLS = mix("pools along"), pick("moves maxima along")


_MAXIMA = notation("n c *s -> n c *p, n c *p", s=_POOLS, p=_POOLS)


@vjp("MaxPool", wrt=("X",), factors=counting(_MAXIMA, lambda n: len(n.node.outputs) > 1), monotone="rising")
def max_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[p] = x.flat[i[p]]: dx.flat[j] = sum over the p with i[p] = j of g[p]. Of equal elements the one at i[p] gets g."""

    def x_grad() -> ir.Value:
        x = n["X"]
        if n.node.outputs[1:]:  # the node computes the indices anyway
            return scatter_to_maxima(e, Pool.of(n, x), g["Y"], winners_of(e, n), x)
        return e.op("MaxPoolGrad", g["Y"], x, domain=DOMAIN, **_windows(n))

    return {"X": x_grad}


@linear(f"{DOMAIN}::MaxPoolGrad", wrt=("dY",), factors=notation("n c *p, n c *s -> n c *s", s=_POOLS, p=_POOLS))
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
    """The maxima of a pool or of its gradient, by the indices of the model's own pool or else of a new one."""
    x, node = n["X"], own_pool(e, n)
    if node is None:
        y, indices = e.ops("MaxPool", x, outputs=2, **_windows(n))
    else:
        y = node.outputs[0]
        indices = second_output(node, e.graph, "indices", ir.DataType.INT64, y.shape)
    if not _may_be_empty(e, Pool.of(n, x)):
        return Winners(indices, None)
    lowest = np.finfo((x.dtype or ir.DataType.FLOAT).numpy()).min
    return Winners(indices, e.compare("Greater", y, e.scalar(lowest, x)))


def maxima_of(e: Emitter, n: Call) -> ir.Value:
    """The result of the pool of which `n` is the gradient."""
    node = own_pool(e, n)
    return e.op("MaxPool", n["X"], **_windows(n)) if node is None else node.outputs[0]


def own_pool(e: Emitter, n: Call) -> ir.Node | None:
    """The first MaxPool of the graph with the same operand and the same windows."""
    uses = {use.node for use in n["X"].uses() if is_op(use.node, "MaxPool") and use.node.graph is e.graph}
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
    "MaxUnpool", wrt=("X",), factors=counting(notation("n c *s, n c *s -> n c *p", s=_UNPOOLS, p=_UNPOOLS)), moves=True
)
def max_unpool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y.flat[i[p]] = x[p]: dx[p] = g.flat[i[p]]. Of equal indices only the last gets g: its value overwrote the others."""

    def x_grad() -> ir.Value:
        x, indices = n["X"], n["I"]
        minus = e.ints([-1])
        gx = e.op("Gather", e.op("Reshape", g["output"], minus), indices, axis=0)
        kernel = n.ints("kernel_shape") or ()
        strides = n.ints("strides") or (1,) * len(kernel)
        if all(k <= s for k, s in zip(kernel, strides, strict=True)):  # indices of disjoint windows never repeat
            return e.typed(gx, x)
        where = e.op("Reshape", indices, minus)
        count = e.op("Size", indices)
        order = e.op("Range", e.const(np.int64(0)), count, e.const(np.int64(1)))
        size = e.op("Reshape", e.op("Size", g["output"]), e.ints([1]))
        owner = e.op("ScatterElements", e.op("Expand", e.const(np.int64(0)), size), where, order, axis=0)
        kept = e.compare("Equal", e.op("Gather", owner, where, axis=0), order)
        return e.where(e.op("Reshape", kept, e.shape(indices), allowzero=1), e.typed(gx, x), 0)

    return {"X": x_grad}
