"""Dropout, by the mask that the node itself returns.

    y = x mask / (1 - ratio) in training, else y = x        dx = g mask / (1 - ratio), or g

If the node has no output for the mask, it gets one. Outside training the mask is all true.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import first_operand
from onnx_convgrad.autodiff.registry import elementwise
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, Operand
from onnx_convgrad.ir.namespace import second_output


def _scaled(n: Call) -> str:
    """In training, two runs drop different numbers."""
    return "" if n.get("training_mode") is not None else "rising"


@elementwise("Dropout", wrt="data", factors=first_operand, affine=("data",), monotone=_scaled, keeps_zero=True)
def dropout(e: Emitter, n: Call) -> Operand:
    """y = x mask / (1 - ratio) in training, else y = x: dy/dx = mask / (1 - ratio), or 1."""
    x, ratio, training = n["data"], n.get("ratio"), n.get("training_mode")
    mode = e.number_of(training)
    share = 0.5 if ratio is None else e.number_of(ratio)
    if training is None or mode is False or share == 0:
        return 1
    if share is not None:
        kept: ir.Value | float = 1 / (1 - share) if share < 1 else 0
    else:
        assert ratio is not None
        kept = e.op("Reciprocal", e.sub(1, e.cast(ratio, x.dtype or ir.DataType.FLOAT)))
    if mode is None:
        kept = e.where(training, kept if isinstance(kept, ir.Value) else e.scalar(kept, x), 1)
    return e.mul(e.mask(second_output(n.node, e.graph, "mask", ir.DataType.BOOL, x.shape), x), kept)
