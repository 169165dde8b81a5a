"""Write Relu and steps with comparisons, for ONNX Runtime in WebAssembly: its clamps branch for every element.

    Relu, max(x, 0)                 Where(x <= 0, 0, x), which is 4 times faster
    HardSigmoid, if it is a step    Cast(x > 0)

A Relu behind a Conv stays, since the runtime fuses the two.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.passes import NodePass
from onnx_convgrad.ir.slopes import BELOW

_STEEP = 2.0**100
"""Smallest slope of a HardSigmoid that stands for a step."""


class CompareInsteadOfClamping(NodePass):
    """Write Relu, and HardSigmoids that stand for a step, with comparisons: for targets with `slow_clamps`."""

    operators: ClassVar = ("Relu", "HardSigmoid")
    label: ClassVar = "compare"

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | bool | None:
        """Rewrite a node of float32 values."""
        x = node.inputs[0]
        if x is None or x.dtype != ir.DataType.FLOAT or is_op(sole_producer(x), "Conv"):
            return None
        if node.op_type == "Relu":
            return e.typed(e.where(e.compare("LessOrEqual", x, 0), 0, x), x)  # the derivative at 0 stays 0
        slope, shift = Call(node).float("alpha", 0.2), Call(node).float("beta", 0.5)
        if abs(slope) < _STEEP or shift not in (BELOW, 0, 1):
            return None
        comparison = ("Greater" if slope > 0 else "Less") + ("OrEqual" if shift == 1 else "")
        return e.mask(e.compare(comparison, x, 0), x)
