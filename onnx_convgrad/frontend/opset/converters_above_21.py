"""Converters for the features that opsets 22 to 28 added to operators of 21, and for some new operators.

The other new operators are replaced by the function body that the standard gives them. CumProd and TensorScatter have
none; RMSNormalization and Swish are written here because their bodies compute the reduced axes and the type of a constant
at run time.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.frontend.plain_windows import pad_pool
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.loop_bodies import Carried, Layout, Slices, emit_loop, placeholder

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NEWEST_TYPE = ir.DataType.INT4
"""The last element type that opset 21 knows."""


def widened(h: Rewriter) -> None:
    """Compute in float32 and round to bfloat16, which the operator does not take at opset 21."""
    for index, value in enumerate(h.node.inputs):
        if value is not None and value.dtype == ir.DataType.BFLOAT16:
            h.node.replace_input_with(index, h.e.cast(value, ir.DataType.FLOAT))
    for result in h.node.outputs:
        if result.dtype == ir.DataType.BFLOAT16:
            h.append(result, "Cast", to=result.dtype)
            result.type = ir.TensorType(ir.DataType.FLOAT)


def pool(h: Rewriter) -> None:
    """Since 22, `ceil_mode` drops windows that start in the padding at the end: give such a node explicit padding.

    ONNX Runtime drops them at every opset, so that where sizes are unknown only the inferred shape is too large.
    """
    pad_pool(h.node)


def cast(h: Rewriter) -> None:
    """Drop `round_mode`: it concerns only an element type that opset 21 does not have."""
    target = h.element_type("to", 0) if h.node.op_type == "Cast" else h.dtype(h.operand(1), h.y)
    if target is not None and target > _NEWEST_TYPE:
        raise UnsupportedCase(f"opset 21 has no element type {target.name}")
    h.drop("round_mode")


def dequantize(h: Rewriter) -> None:
    """Cast the scale to `output_dtype`: at opset 21 the type of the result is that of the scale."""
    target = h.element_type("output_dtype", 0)
    h.drop("output_dtype")
    scale = h.required(1)
    h.set_inputs(h.required(0), h.e.cast(scale, target) if target else scale, h.operand(2))


def quantize(h: Rewriter) -> None:
    """Cast data and scale to `precision`, or the data to the scale's type: opset 21 divides in the type of the data."""
    explicit, scale = h.element_type("precision", 0), h.required(1)
    precision = explicit or scale.dtype
    h.drop("precision")

    def converted(value: ir.Value) -> ir.Value:
        if precision is None or (value.dtype is None and not explicit):
            return value
        return h.e.cast(value, precision)

    h.set_inputs(converted(h.required(0)), converted(scale), h.operand(2))


def rms_norm(h: Rewriter) -> ir.Value:
    """An RMSNormalization, which ONNX Runtime has as SimplifiedLayerNormalization, too."""
    return root_mean_square(h, h.required(0), h.required(1))


def root_mean_square(h: Rewriter, x: ir.Value, scale: ir.Value) -> ir.Value:
    """x / sqrt(mean(x^2) + epsilon) in the precision of `stash_type`, then scaled in the type of x."""
    axis = h.int("axis", -1)
    stash = h.element_type("stash_type", 1)
    if axis < 0:
        axes = h.e.ints(list(range(axis, 0)))
    elif x.shape is not None:
        axes = h.e.ints(list(range(axis, x.shape.rank())))
    else:
        rank = h.e.op("Size", h.e.op("Shape", x))
        axes = h.e.op("Range", h.e.const(np.int64(axis)), rank, h.e.const(np.int64(1)))
    wide = h.e.cast(x, stash)
    square = h.e.op("ReduceMean", h.e.square(wide), axes)
    normal = h.e.div(wide, h.e.op("Sqrt", h.e.add(square, h.float("epsilon", 1e-5))))
    if scale.dtype != stash:
        # The result has the type of the scale, which is that of x in all but odd models.
        normal = h.e.op("CastLike", normal, scale)
    return h.e.mul(normal, scale)


def swish(h: Rewriter) -> ir.Value:
    """x Sigmoid(alpha x)"""
    x, alpha = h.required(0), h.finite("alpha", 1.702 if h.node.op_type == "QuickGelu" else 1.0)
    return h.e.mul(x, h.e.op("Sigmoid", h.e.mul(x, alpha)))


def celu(h: Rewriter) -> ir.Value | None:
    """Write a Celu of another type than float32 as max(x, 0) + alpha (e^(min(x, 0) / alpha) - 1)."""
    x, e = h.required(0), h.e
    if h.dtype(x, h.y) in (None, ir.DataType.FLOAT):
        return None
    alpha = h.finite("alpha", 1.0)
    if abs(alpha) < 1e-7:  # 0 in half precision
        raise UnsupportedCase(f"its attribute alpha is {alpha}")
    power = e.op("Exp", e.div(e.op("Min", x, 0), alpha))
    return e.add(e.op("Max", x, 0), e.mul(e.sub(power, 1), alpha))


def range_(h: Rewriter) -> ir.Value | None:
    """Accumulate a Range of half precision in the type `stash_type`, by default float32."""
    stash = h.element_type("stash_type", 1)
    dtype = h.dtype(*h.node.inputs, h.y)
    h.drop("stash_type")
    if dtype not in _NARROW:
        return None
    if stash in _NARROW:
        raise UnsupportedCase(f"it accumulates in {stash.name}, for which opset 21 has no Range")
    assert dtype is not None
    return h.e.cast(h.e.op("Range", *(h.e.op("Cast", value, to=stash) for value in h.node.inputs)), dtype)


def mod(h: Rewriter) -> ir.Value | None:
    """Write `fmod=0` of floats as the truncated remainder, plus b where its sign is not that of b."""
    a, b, e = h.required(0), h.required(1), h.e
    dtype = h.dtype(a, b, h.y)
    if h.int("fmod", 0) or dtype is None or not dtype.is_floating_point():
        return None
    rest = e.op("Mod", a, b, fmod=1)
    differ = e.op("Xor", e.compare("Less", rest, 0), e.compare("Less", b, 0))
    nonzero = e.op("Not", e.compare("Equal", rest, 0))
    return e.where(e.op("And", differ, nonzero), e.add(rest, b), rest)


def space_to_depth(h: Rewriter) -> ir.Value | None:
    """Write CRD order as DCR, the only one before, which has blocks and channels of the new depth in the other order."""
    crd = h.string("mode", "DCR") == "CRD"
    h.drop("mode")
    if not crd:
        return None
    e, size = h.e, h.int("blocksize", 1)
    deep = e.op("SpaceToDepth", h.required(0), blocksize=size)
    split = e.op("Concat", e.ints([0, size * size, -1]), e.op("Shape", deep, start=2), axis=0)
    blocks = e.op("Transpose", e.op("Reshape", deep, split), perm=[0, 2, 1, 3, 4])
    return e.op("Reshape", blocks, e.op("Shape", deep))


def cum_prod(h: Rewriter) -> ir.Value:
    """y[j] = product of x[i] over i <= j: the products of 1, 2, 4, ... neighbors, each from two of the row before.

    Where the size or the axis is unknown, a Scan multiplies row by row, from a row of ones on: see quirks.EMPTY_SCAN.
    """
    x, place, e = h.required(0), h.required(1), h.e
    exclusive, reverse = bool(h.int("exclusive", 0)), bool(h.int("reverse", 0))
    at = constant_of(place)
    axis = None if at is None or x.shape is None else int(at.item()) % x.shape.rank()
    size = None if axis is None or x.shape is None else x.shape[axis]
    if isinstance(size, int) and axis is not None:
        y = x
        for step in (*([1] if exclusive else []), *(2**k for k in range(max(size - 1, 0).bit_length()))):
            low, high = (-step, step) if reverse else (step, -step)
            moved = e.pad(y, [low], [high], [axis], 1)
            y = moved if exclusive and y is x else e.mul(y, moved)
        return y
    shape = e.op("Shape", x)
    where = e.op("Reshape", e.cast(place, ir.DataType.INT64), e.ints([1]))
    where = e.op("Where", e.op("Less", where, e.ints([0])), e.op("Add", where, e.op("Shape", shape)), where)
    following = e.op("Add", where, e.ints([1]))
    ends = e.ints([np.iinfo(np.int64).max])
    before = e.op("ReduceProd", e.op("Slice", shape, e.ints([0]), where), keepdims=1)
    after = e.op("ReduceProd", e.op("Slice", shape, following, ends), keepdims=1)
    rows = e.op("Reshape", x, e.op("Concat", before, e.gather(shape, where), after, axis=0), allowzero=1)
    rows.dtype, rows.shape = x.dtype or h.dtype(h.y) or ir.DataType.FLOAT, ir.Shape([None, None, None])
    first = e.op("Expand", e.scalar(1, rows), e.op("Concat", before, after, axis=0))
    ones = e.unsqueeze(first, [1])
    rows = e.typed(e.concat([rows, ones] if reverse else [ones, rows], 1), rows)
    layout, start = Layout(1, backwards=reverse), len(e.emitted)
    product, row = (placeholder(e, rows, ir.Shape([None, None])) for _ in range(2))
    following = e.typed(e.mul(product, row), row)
    state = Carried(e.typed(first, row), product, following)
    _, (made,) = emit_loop(
        e, start, [state], {row: Slices(rows, layout)}, [(product if exclusive else following, layout)]
    )
    made = e.op("Slice", made, e.ints([0 if reverse else 1]), e.ints([-1]) if reverse else ends, e.ints([1]))
    return e.op("Reshape", made, shape, allowzero=1)


def tensor_scatter(h: Rewriter) -> ir.Value:
    """Write `update` into `past_cache` along an axis, behind the place that `write_indices` gives for each sample."""
    cache, update, first, axis = h.required(0), h.required(1), h.operand(2), h.int("axis", -2)
    circular = h.string("mode", "linear") == "circular"
    rank = next((v.shape.rank() for v in (cache, update) if v.shape is not None), None)
    if rank is None:
        raise UnsupportedCase("its replacement by ScatterElements needs a rank that is unknown")
    axis, e = axis % rank, h.e
    places = e.reshape(e.arange(e.dim(update, axis)), [-1, *[1] * (rank - 1 - axis)])
    if first is not None:
        places = e.add(e.reshape(first, [-1, *[1] * (rank - 1)]), places)
    if circular:
        places = e.op("Mod", places, e.vector([e.dim(cache, axis)]))
    return e.op("ScatterElements", cache, e.expand(places, update), update, axis=axis)
