"""One number per channel against small images, in a form that ONNX Runtime's CPU provider is fast at.

Elementwise kernels take a call per stretch of one number, here as long as an image. The numbers written out for one sample,
which is little beside a batch, make stretches as long as a sample: images of 4x4 take a quarter of the time, those of 8x8
two thirds, those of 16x16 as long as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_convgrad.emit import Emitter, static_dims

__all__ = ["BROADCASTS"]

_STRETCH = 64
"""Elements that pay for a call."""

_CALLS = 1024
"""Calls that are worth a node."""

_SAMPLES = 4
"""Samples that share what is written out."""


def _written_out(e: Emitter, node: ir.Node) -> ir.Value | None:
    """`a op b` where one operand is `[C, 1, 1]` and the other `[N, C, h, w]`, of small images; every bit stays."""
    a, b = node.inputs
    if a is None or b is None:
        return None
    for wide, narrow in ((a, b), (b, a)):
        shape = _one_sample(static_dims(wide), static_dims(narrow))
        if shape is not None:
            spread = e.op("Expand", narrow, e.ints(shape))
            return e.op(node.op_type, *((wide, spread) if wide is a else (spread, wide)))
    return None


def _one_sample(wide: list[int | None] | None, narrow: list[int | None] | None) -> list[int] | None:
    """The shape of what is shared by all samples, if it is worth it to write the narrow operand out in it."""
    if not wide or not narrow or None in wide or None in narrow or len(narrow) > len(wide):
        return None
    full = [d or 0 for d in wide]
    thin = [1] * (len(full) - len(narrow)) + [d or 0 for d in narrow]
    moving = [axis for axis, size in enumerate(thin) if size != 1]
    if len(moving) != 1 or thin[moving[0]] != full[moving[0]]:
        return None
    axis = moving[0]
    stretch, samples = math.prod(full[axis + 1 :]), math.prod(full[:axis])
    if not 1 < stretch <= _STRETCH or samples < _SAMPLES or samples * full[axis] < _CALLS:
        return None
    return full[axis:]


BROADCASTS: Mapping[str, Callable[[Emitter, ir.Node], ir.Value | None]] = {
    "Add": _written_out,
    "Mul": _written_out,
    "Sub": _written_out,
}
