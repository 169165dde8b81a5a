"""Views that cannot be made before later values are known.

A runtime merges equal nodes, and runs nodes early that depend on early values only. A node that computes a forward value a
second time therefore reads a view whose shape is that of the value plus a zero that is known only when the later values are:
`Shape(NonZero(e > e))`, with `e` the sum of one element of each. No optimizer can fold that zero, and a Reshape copies
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.memory.retained_bytes import is_large


def late_zero(e: Emitter, values: Sequence[ir.Value]) -> ir.Value:
    """Zero as an int64 vector of one element that is known only when all `values` are; they are floats, at least one."""
    kind = values[0].dtype
    parts = []
    for value in values:
        if value.shape is None:
            corner = e.op("Slice", e.op("Reshape", value, e.ints([-1])), e.ints([0]), e.ints([1]))
        elif len(value.shape) == 0:
            corner = e.op("Reshape", value, e.ints([1]))
        else:
            rank = len(value.shape)
            corner = e.op("Slice", value, e.ints([0] * rank), e.ints([1] * rank))
        parts.append(corner if value.dtype == kind else e.op("Cast", corner, to=int(kind or ir.DataType.FLOAT)))
    total = e.op("Sum", *parts) if len(parts) > 1 else parts[0]
    return e.op("Shape", e.op("NonZero", e.op("Greater", total, total)), start=1)


def late_view(e: Emitter, value: ir.Value, zero: ir.Value) -> ir.Value:
    """A view of the value that cannot be made before `zero` is known; a value of 4 bits itself."""
    if value.dtype is not None and value.dtype.bitwidth < 8:  # ONNX Runtime has no Reshape of it
        return value
    shape = e.shape(value)
    return e.op_like(value, "Reshape", value, e.op_like(shape, "Add", shape, zero))


def read_late(e: Emitter, nodes: Sequence[ir.Node], zero: ir.Value, keep: Collection[ir.Value] = ()) -> None:
    """Let `nodes` read views of the large floating values that others compute, except those in `keep`, in place."""
    own, before = set(nodes), e.anchor
    e.anchor = nodes[0]
    e.repeat()  # a view computes the shape of its value itself: a Shape among `nodes` may read the view
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value is None or value in keep or value.producer() in own or is_constant(value):
                continue
            if value.dtype is not None and value.dtype.is_floating_point() and is_large(value):
                node.replace_input_with(index, late_view(e, value, zero))
    e.anchor = before
