"""Pooling over whole images: the Global pools."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import MEAN, mix, reduced
from onnx_convgrad.autodiff.registry import linear, vjp
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.rules.pool import norm_quotient, signed_power


def _pixels(n: Call, rank: int) -> range:
    """All axes of an image but those of samples and channels."""
    return range(2, rank)


def _area(e: Emitter, x: ir.Value) -> Dim:
    """The number of elements of one channel of one image, for any rank of x."""
    if x.shape is not None:
        return e.size_mul(*e.dims(x)[2:])
    return e.op("ReduceProd", e.op("Shape", x, start=2), e.ints([0]), keepdims=1)


@linear("GlobalAveragePool", wrt="X", factors=reduced(_pixels, MEAN), within="operands", nonnegative=True)
def global_average_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[n, c] = sum over p of x[n, c, p] / P: dx[n, c, p] = g[n, c] / P."""
    return e.expand(e.averaged(g["Y"], _area(e, n["X"])), n["X"])


@vjp(
    "GlobalMaxPool",
    wrt="X",
    factors=reduced(_pixels, mix("takes the maximum along")),
    moves="selects",
    monotone="rising",
)
def global_max_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[n, c] = max over p of x[n, c, p]: dx[n, c, p] = g[n, c] at the first maximum, else 0, as in PyTorch."""
    x = n["X"]
    head = e.op("Shape", x, start=0, end=2)
    count = _area(e, x)
    area = e.vector([count])
    flat = e.op("Reshape", x, e.op("Concat", head, area, axis=0), allowzero=1)
    winner = e.op("ArgMax", flat, axis=2, keepdims=1)
    positions = e.arange(count)
    column = e.op("Reshape", g["Y"], e.op("Concat", head, e.ints([1]), axis=0), allowzero=1)
    return e.reshape_like(e.where(e.compare("Equal", positions, winner), column, 0), x)


@vjp("GlobalLpPool", wrt="X", factors=reduced(_pixels, mix("takes the norm along")))
def global_lp_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = (sum of |x|^q)^(1/q): dx = sign(x) |x|^(q-1) g y^(1-q), and 0 where y = 0."""
    x = n["X"]
    q = n.int("p", 2)
    return e.typed(e.mul(signed_power(e, x, q - 1), norm_quotient(e, g["Y"], n.out("Y"), q)), x)
