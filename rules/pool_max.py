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
from onnx_convgrad.autodiff.registry import linear, vjp
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.maxima import windows_of, winners_of
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.pooling import Pool
from onnx_convgrad.ir.scatter import scatter_to_maxima
from onnx_convgrad.rules.movement import survive

_POOLS, _UNPOOLS = mix("pools along"), pick("moves maxima along")


_MAXIMA = notation("n c *s -> n c *p, n c *p", s=_POOLS, p=_POOLS)


@vjp(
    "MaxPool",
    wrt="X",
    factors=having(_MAXIMA, counts_all=lambda n: len(n.node.outputs) > 1),
    moves="selects",
    monotone="rising",
)
def max_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[p] = x.flat[i[p]]: dx.flat[j] = sum over the p with i[p] = j of g[p]. Of equal elements the one at i[p] gets g."""
    x = n["X"]
    if n.node.outputs[1:]:  # the node computes the indices anyway
        return scatter_to_maxima(e, Pool.of(n, x), g["Y"], winners_of(e, n), x)
    return e.op("MaxPoolGrad", g["Y"], x, domain=DOMAIN, **windows_of(n))


@linear(
    f"{DOMAIN}::MaxPoolGrad",
    wrt="dY",
    factors=notation("n c *p, n c *s -> n c *s", s=_POOLS, p=_POOLS),
    of=("MaxPool",),
)
def max_pool_grad_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """<g, MaxPoolGrad(dy, x)> = sum over p of g.flat[i[p]] dy[p]."""
    winners = winners_of(e, n)
    picked = e.op("Gather", e.op("Reshape", g["dX"], e.ints([-1])), winners.indices, axis=0)
    return e.typed(picked if winners.exist is None else e.where(winners.exist, picked, 0), n["dY"])


@linear(
    "MaxUnpool",
    wrt="X",
    factors=having(notation("n c *s, n c *s -> n c *p", s=_UNPOOLS, p=_UNPOOLS), counts_all=True),
    moves="fills",
)
def max_unpool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y.flat[i[p]] = x[p]: dx[p] = g.flat[i[p]]. Of equal indices only the last gets g: its value overwrote the others."""
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


def _are_distinct(n: Call) -> bool:
    """Whether the indices of a MaxUnpool are those of a MaxPool whose windows share no element."""
    pool = n["I"].producer()
    if not is_op(pool, "MaxPool"):
        return False
    windows = Pool.of(Call(pool), Call(pool)["X"])
    return all(windows.span(axis) <= windows.strides[axis] for axis in range(windows.rank))
