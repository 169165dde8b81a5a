"""Softmax and LogSoftmax. The cross-entropy losses are differentiated through the bodies that ONNX gives them."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.emit import Emitter
from onnx_convgrad.registry import Call, Cotangents, vjp, zero


def _total(e: Emitter, n: Call, value: ir.Value) -> ir.Value:
    """Sum along the axis of the operator, which is kept with size one."""
    return e.reduce_sum(value, [n.int("axis", -1)])


@vjp("Softmax", wrt=("input",))
def softmax_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """dy[i]/dx[j] = y[i] ([i = j] - y[j]): dx = y g - y sum over j of y[j] g[j]."""

    def cotangent() -> ir.Value:
        weighted = e.mul(n.y, g["output"])
        return e.sub(weighted, e.mul(n.y, _total(e, n, weighted)))

    return {"input": cotangent}


@vjp("LogSoftmax", wrt=("input",))
def log_softmax_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """dy[i]/dx[j] = [i = j] - exp y[j]: dx = g - exp(y) sum over i of g[i]."""
    gy = g["output"]
    return {"input": lambda: e.sub(gy, e.mul(e.op("Exp", n.y), _total(e, n, gy)))}


zero("Hardmax")
