"""Derivatives of functions with kinks: masks of 0 and 1, and the scales of a Selu."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter

STEEP = 2.0**124
"""Slope of the HardSigmoid that stands for a step: only numbers within 2^-124 of zero lie on its ramp."""

BELOW = -(2.0**-100)
"""Shift of a step at 0: it changes no result, and is not 0, which OpenVINO ignores (quirks.OPENVINO_ZERO_SHIFT)."""


def step(e: Emitter, value: ir.Value, at: float = 0.0, *, up: bool = True) -> ir.Value:
    """[value > at] as 0 and 1, or [value < at] with `up=False`; `at` is a float32 number of at most 8.

    In float32 this is one node, a HardSigmoid with the slope `STEEP`; otherwise a comparison and a Cast.
    """
    if value.dtype != ir.DataType.FLOAT:
        return e.mask(e.compare("Greater" if up else "Less", value, at), value)
    slope = STEEP if up else -STEEP
    return e.typed(e.op("HardSigmoid", value, alpha=slope, beta=-slope * at or BELOW), value)


def selu_scales(n: Call) -> tuple[float, float]:
    """The attributes alpha and gamma of a Selu."""
    return n.float("alpha", 1.67326319217681884765625), n.float("gamma", 1.05070102214813232421875)
