"""Undo broadcasting: sum a gradient to the shape of an operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter, dims_equal, known


def shapes_differ(a: ir.Value, b: ir.Value) -> bool:
    """Whether the values certainly have different shapes."""
    if a.shape is None or b.shape is None:
        return False
    if len(a.shape) != len(b.shape):
        return True
    return any(isinstance(p, int) and isinstance(q, int) and p != q for p, q in zip(a.shape, b.shape, strict=True))


def unbroadcast(
    e: Emitter,
    value: ir.Value,
    operand: ir.Value,
    result: ir.Value | None = None,
    others: Sequence[ir.Value | None] = (),
) -> ir.Value:
    """Sum `value` over the axes on which `operand` was broadcast, to the shape of `operand`.

    `result` is the output of the operator; its shape is used if that of `value` is unknown. For a symbolic size that may be
    1, the axes are computed at run time. `others` are operands aligned with this one: a symbol counts as equal only if no
    operand has another symbol there (see quirks.BROADCAST_SYMBOLS).
    """
    shape = value.shape if value.shape is not None else (result.shape if result is not None else None)
    if shape is None or operand.shape is None:
        return _unbroadcast_at_run_time(e, value, operand)
    extra = len(shape) - len(operand.shape)
    if extra < 0:  # the local derivative of a unary operator may be a constant of lower rank
        return e.expand(value, operand)
    axes = list(range(extra))
    for i, size in enumerate(operand.shape):
        outer = shape[i + extra]
        undisputed = known(size) is not None or all(
            _agrees(v, size, len(operand.shape) - i) for v in others if v is not None
        )
        if (dims_equal(size, outer) and undisputed) or known(outer) == 1:
            continue
        if known(size) == 1:
            axes.append(i + extra)
        elif known(size) is None:
            return _unbroadcast_at_run_time(e, value, operand)
    if not axes:
        return value
    if len(axes) == extra:
        return e.reduce_sum(value, axes, keepdims=False)
    return e.reshape_like(e.reduce_sum(value, axes), operand)


def _agrees(other: ir.Value, size: Any, from_end: int) -> bool:
    """Whether `other` certainly has this size or 1 at an axis counted from the end."""
    if other.shape is None:
        return False
    if from_end > len(other.shape):
        return True
    own = other.shape[-from_end]
    return known(own) == 1 or dims_equal(own, size)


def _unbroadcast_at_run_time(e: Emitter, value: ir.Value, operand: ir.Value) -> ir.Value:
    """Sum over axes that the graph computes: those with size 1 in the operand's padded shape but not in the value's."""
    have, want = e.op("Shape", value), e.op("Shape", operand)
    missing = e.op("Sub", e.op("Shape", have), e.op("Shape", want))
    padded = e.op("Concat", e.op("Expand", e.ints([1]), missing), want, axis=0)
    axes = e.op("Squeeze", e.op("NonZero", e.op("Not", e.op("Equal", padded, have))), e.ints([0]))
    total = e.op("ReduceSum", value, axes, keepdims=1, noop_with_empty_axes=1)
    return e.typed(e.op("Reshape", total, want, allowzero=1), operand)
