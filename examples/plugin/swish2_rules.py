"""A plugin: the rule of an operator of a private domain.

Once the package is installed, `onnx_convgrad` finds it by its entry point of the group `onnx_convgrad.rules`.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.autodiff.registry import elementwise
from onnx_convgrad.ir.call import Call, declare_signature
from onnx_convgrad.ir.emit import Emitter

declare_signature("my.domain::Swish2", inputs=["X"], outputs=["Y"])


@elementwise("my.domain::Swish2", wrt="X")
def swish2(e: Emitter, n: Call) -> ir.Value:
    """y = x s with s = sigmoid(beta x): dy/dx = s + beta x s (1 - s) = s + beta y (1 - s)."""
    beta = n.float("beta", 2.0)
    s = e.op("Sigmoid", e.mul(n["X"], beta))
    return e.add(s, e.mul(e.mul(n.y, beta), e.sub(1, s)))
