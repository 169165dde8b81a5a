"""Broadcast operands in a form that ONNX Runtime's CPU provider is fast at.

Elementwise kernels make one call per stretch of a broadcast number. Two cases have short stretches:

- One number per channel with small images, one call per image and channel: expanded to one sample, which is small beside the
  batch, the operand gives one call per sample. Images of 4x4 take a quarter of the time, 8x8 two thirds, 16x16 the same.
- One number for all with axes of 1, one call per element: see `_full_rank`.
"""

from __future__ import annotations

import itertools
import math

import onnx_ir as ir

from onnx_convgrad.backends.cpu import Forms
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter, static_dims

_STRETCH = 64
"""Largest number of elements of a stretch for which a call per stretch is slow."""

_CALLS = 1024
"""Smallest number of calls for which another node is faster."""

_SAMPLES = 4
"""Fewest samples that share the expanded operand."""


def _per_channel(e: Emitter, node: ir.Node) -> ir.Value | None:
    """`a op b` with operands [C, 1, 1] and [N, C, h, w] of small images; the result is equal to the bit."""
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
    """The shape of one sample, if the nodes are faster with the narrow operand expanded to it."""
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
"""Smallest number of elements for which another constant or a Reshape is faster."""


def _full_rank(e: Emitter, node: ir.Node) -> ir.Value | None:
    """Give operands of one element as many axes as the result.

    The runtime merges neighboring axes into one stretch, but not across an axis of 1 if an operand has fewer axes: a scalar
    with [N, C, 1, 1] (gates, statistics, weights of 1x1 convolutions) makes a call per element and takes 40 times as long.
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
    """Reshape an operand of one element to this rank; return others unchanged."""
    own = None if value is None else static_dims(value)
    if value is None or own is None or len(own) == rank or set(own) - {1}:
        return value
    number, shape = constant_of(value), [1] * rank
    return e.reshape(value, shape) if number is None else e.const(number.reshape(shape), value.dtype)


def _broadcast(e: Emitter, node: ir.Node) -> ir.Value | None:
    result = _per_channel(e, node)
    return _full_rank(e, node) if result is None else result


BROADCASTS: Forms = {
    **dict.fromkeys(("Add", "Mul", "Sub"), _broadcast),
    **dict.fromkeys(("Div", "Max", "Min", "Pow", "Where"), _full_rank),
}
