"""Operands that are broadcast, in a form that ONNX Runtime's CPU provider is fast at.

One number per channel against small images, and one number for all against axes of 1.

Elementwise kernels take a call per stretch of one number, for a channel as long as an image. Its numbers written out for
one sample, which is little beside a batch, make stretches as long as a sample: images of 4x4 take a quarter of the time,
those of 8x8 two thirds, those of 16x16 as long as before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter, static_dims

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


_NUMBERS = 256
"""Elements that are worth another constant, or a Reshape."""


def _full_rank(e: Emitter, node: ir.Node) -> ir.Value | None:
    """The same with every single number of as many axes as the result.

    The runtime joins neighbouring axes into one stretch, but not across an axis of 1 if an operand has fewer axes: a scalar
    and [N, C, 1, 1], as gates, statistics and weights of 1x1 convolutions are, take a call per element, 40 times as long.
    """
    sizes = static_dims(node.outputs[0])
    if sizes is None or math.prod(d or _NUMBERS for d in sizes) < _NUMBERS:
        return None
    behind = itertools.dropwhile(lambda size: size == 1, sizes)
    if 1 not in behind:
        return None
    operands = [_of_rank(e, value, len(sizes)) for value in node.inputs]
    return None if operands == list(node.inputs) else e.op(node.op_type, *operands)


def _of_rank(e: Emitter, value: ir.Value | None, rank: int) -> ir.Value | None:
    """A single number with so many axes; anything else as it is."""
    own = None if value is None else static_dims(value)
    if value is None or own is None or len(own) == rank or set(own) - {1}:
        return value
    number, shape = constant_of(value), [1] * rank
    return e.reshape(value, shape) if number is None else e.const(number.reshape(shape), value.dtype)


def _broadcast(e: Emitter, node: ir.Node) -> ir.Value | None:
    written = _written_out(e, node)
    return _full_rank(e, node) if written is None else written


BROADCASTS: Mapping[str, Callable[[Emitter, ir.Node], ir.Value | None]] = {
    **dict.fromkeys(("Add", "Mul", "Sub"), _broadcast),
    **dict.fromkeys(("Div", "Max", "Min", "Pow", "Where"), _full_rank),
}
