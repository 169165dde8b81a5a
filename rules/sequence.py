"""SequenceAt of a sequence that SplitToSequence makes; other sequences are refused. Optional and OptionalGetElement.

    part[i] = x[b_i : b_i + n_i]        dx[b_i : b_i + n_i] = g_i

The cotangent of the sequence is represented by a tensor of the shape of x, so that the walk adds up the cotangents of its
parts as those of any other value. The cotangent of an optional value is that of its element.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import none
from onnx_convgrad.autodiff.registry import linear
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter

_SEQUENCE = none("its operand or result is a sequence")


@linear("SplitToSequence", wrt="input", factors=_SEQUENCE)
def split_to_sequence_vjp(e: Emitter, n: Call, g: dict[str, ir.Value]) -> ir.Value:
    """The cotangent of the sequence already has the shape of x, see `sequence_at_vjp`: dx = g."""
    return g["output_sequence"]


@linear("SequenceAt", wrt="input_sequence", factors=_SEQUENCE)
def sequence_at_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[i] = x[b + i], where b is the sum of the sizes of the parts before: dx[b + i] = g[i], zero elsewhere."""
    source = n["input_sequence"].producer()
    require(
        source is not None and source.op_type == "SplitToSequence",
        "its sequence was not made by a SplitToSequence of the same graph.",
        hint="Export the model with Split in place of sequences.",
    )
    assert source is not None
    split = Call(source)
    x, axis = split["input"], split.int("axis", 0)
    gy = g["tensor"]
    if split.get("split") is None and not split.int("keepdims", 1):
        gy = e.unsqueeze(gy, [axis])
    begin = _begin(e, split, n["position"], e.dim(x, axis))
    end = e.size_sub(e.size_sub(e.dim(x, axis), begin), e.dim(gy, axis))
    return e.typed(e.pad(gy, [begin], [end], [axis]), x)


@linear("Optional", "OptionalGetElement", wrt="input", factors=none("its operand or result is optional"))
def optional_vjp(e: Emitter, n: Call, g: dict[str, ir.Value]) -> ir.Value:
    """y = x, which is there: dx = g."""
    return g["output"]


def _begin(e: Emitter, split: Call, position: ir.Value, size: Dim) -> Dim:
    """The first row of a part. Negative positions count from the last part."""
    sizes, at = split.get("split"), _number(e, position)
    if sizes is None or (sizes.shape is not None and len(sizes.shape) == 0):
        chunk = 1 if sizes is None else _number(e, sizes)
        if not isinstance(at, int) or at < 0:
            parts = e.size_div(e.size_sub(e.size_add(size, chunk), 1), chunk)
            back = e.size_add(parts, at)
            at = back if isinstance(at, int) else e.where(e.compare("Less", at, 0), back, at)
        return e.size_mul(at, chunk)
    require(sizes.shape is not None, "it is unknown whether its operand `split` is one size or a list of sizes.")
    known_sizes = e.constant_of(sizes)
    if known_sizes is not None and isinstance(at, int):
        return int(known_sizes[:at].sum())
    before = e.op("Slice", e.cast(sizes, ir.DataType.INT64), e.ints([0]), e.vector([at]), e.ints([0]))
    return e.op("ReduceSum", before, keepdims=1)


def _number(e: Emitter, value: ir.Value) -> Dim:
    """An operand of rank 0 as a size."""
    array = e.constant_of(value)
    return int(array) if array is not None else e.op("Reshape", e.cast(value, ir.DataType.INT64), e.ints([1]))
