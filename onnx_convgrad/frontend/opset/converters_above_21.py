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
from onnx_convgrad.ir.loop_bodies import Carried, Layout, Slices, emit_loop, placeholder

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NEWEST_TYPE = ir.DataType.INT4
"""The last element type that opset 21 knows."""


def widened(h: Rewriter) -> None:
    """Compute in float32 and round to bfloat16, which the operator does not take at opset 21."""
    for index, value in enumerate(h.node.inputs):
        if value is not None and value.dtype == ir.DataType.BFLOAT16:
            h.node.replace_input_with(index, h.e.op("Cast", value, to=ir.DataType.FLOAT))
    for result in h.node.outputs:
        if result.dtype == ir.DataType.BFLOAT16:
            cast = ir.node(
                "Cast", [None], {"to": int(ir.DataType.BFLOAT16)}, name=h.e.names.claim(f"{result.name}_Cast")
            )
            h.redirect(result, cast.outputs[0])
            cast.replace_input_with(0, result)
            result.type = ir.TensorType(ir.DataType.FLOAT)
            h.e.graph.insert_after(h.node, cast)


def pool(h: Rewriter) -> None:
    """Since 22, `ceil_mode` drops windows that start in the padding at the end: give such a node explicit padding.

    ONNX Runtime drops them at every opset, so that where sizes are unknown only the inferred shape is too large.
    """
    pad_pool(h.node, h.required(0))


def cast(h: Rewriter) -> None:
    """Drop `round_mode`: it concerns only an element type that opset 21 does not have."""
    target = h.element_type("to", 0) if h.node.op_type == "Cast" else h.dtype(h.operand(1), h.y)
    if target is not None and target > _NEWEST_TYPE:
        raise UnsupportedCase(f"opset 21 has no element type {target.name}")
    h.drop("round_mode")


def dequantize(h: Rewriter) -> None:
    """Cast the scale to `output_dtype`: at opset 21 the type of the result is that of the scale."""
    target = h.int("output_dtype", 0)
    h.drop("output_dtype")
    scale = h.required(1)
    if target and h.dtype(scale) != target:
        scale = h.e.op("Cast", scale, to=target)
    h.set_inputs(h.required(0), scale, h.operand(2))


def quantize(h: Rewriter) -> None:
    """Cast data and scale to `precision`, or the data to the scale's type: opset 21 divides in the type of the data."""
    x, scale = h.required(0), h.required(1)
    precision = h.element_type("precision", 0) or h.dtype(scale)
    explicit = bool(h.int("precision", 0))
    h.drop("precision")

    def converted(value: ir.Value) -> ir.Value:
        if precision is None or (h.dtype(value) == precision) or (h.dtype(value) is None and not explicit):
            return value
        return h.e.op("Cast", value, to=precision)

    h.set_inputs(converted(x), converted(scale), h.operand(2))


def rms_norm(h: Rewriter) -> None:
    """x / sqrt(mean(x^2) + epsilon) in the precision of `stash_type`, then scaled in the type of x."""
    root_mean_square(h, h.required(0), h.required(1))


def root_mean_square(h: Rewriter, x: ir.Value, scale: ir.Value) -> None:
    """Make an RMSNormalization of `x` of the node."""
    axis = h.int("axis", -1)
    stash = h.element_type("stash_type", 1)
    if axis < 0:
        axes = h.e.ints(list(range(axis, 0)))
    elif x.shape is not None:
        axes = h.e.ints(list(range(axis, x.shape.rank())))
    else:
        rank = h.e.op("Size", h.e.op("Shape", x))
        axes = h.e.op("Range", h.e.const(np.int64(axis)), rank, h.e.const(np.int64(1)))
    wide = x if h.dtype(x) == stash else h.e.op("Cast", x, to=stash)
    epsilon = h.scalar(h.float("epsilon", 1e-5), wide)
    square = h.e.op("ReduceMean", h.e.op("Mul", wide, wide), axes)
    root = h.e.op("Sqrt", h.e.op("Add", square, epsilon))
    normal = h.e.op("Div", wide, root)
    if h.dtype(scale) != stash:
        # The result has the type of the scale, which is that of x in all but odd models.
        normal = h.e.op("CastLike", normal, scale)
    h.become("Mul", normal, scale)


def swish(h: Rewriter) -> None:
    """x * sigmoid(alpha * x), also for ONNX Runtime's QuickGelu."""
    x, alpha = h.required(0), h.finite("alpha", 1.702 if h.node.op_type == "QuickGelu" else 1.0)
    inner = x if alpha == 1.0 else h.e.op("Mul", x, h.scalar(alpha, x, h.y))
    h.become("Mul", x, h.e.op("Sigmoid", inner))


def celu(h: Rewriter) -> None:
    """Write a Celu of another type than float32 as max(x, 0) + alpha (e^(min(x, 0) / alpha) - 1)."""
    x = h.required(0)
    if h.dtype(x, h.y) in (None, ir.DataType.FLOAT):
        return
    alpha = h.finite("alpha", 1.0)
    if abs(alpha) < 1e-7:  # 0 in half precision
        raise UnsupportedCase(f"its attribute alpha is {alpha}")
    zero, one, scale = (h.scalar(number, x, h.y) for number in (0.0, 1.0, alpha))
    power = h.e.op("Exp", h.e.op("Div", h.e.op("Min", x, zero), scale))
    below = h.e.op("Mul", h.e.op("Sub", power, one), scale)
    h.become("Add", h.e.op("Max", x, zero), below)


def range_(h: Rewriter) -> None:
    """Accumulate a Range of half precision in the type `stash_type`, by default float32."""
    stash = h.element_type("stash_type", 1)
    dtype = h.dtype(*h.node.inputs, h.y)
    h.drop("stash_type")
    if dtype not in _NARROW:
        return
    if stash in _NARROW:
        raise UnsupportedCase(f"it accumulates in {stash.name}, for which opset 21 has no Range")
    assert dtype is not None
    wide = [h.e.op("Cast", value, to=stash) for value in h.node.inputs]
    h.become("Cast", h.e.op("Range", *wide), to=dtype)


def mod(h: Rewriter) -> None:
    """Write `fmod=0` of floats as the truncated remainder, plus b where its sign is not that of b."""
    a, b = h.required(0), h.required(1)
    dtype = h.dtype(a, b, h.y)
    if h.int("fmod", 0) or dtype is None or not dtype.is_floating_point():
        return
    zero = h.scalar(0.0, a, b, h.y)
    rest = h.e.op("Mod", a, b, fmod=1)
    signs = [h.e.op("Less", value, zero) for value in (rest, b)]
    differ = h.e.op("Xor", *signs)
    nonzero = h.e.op("Not", h.e.op("Equal", rest, zero))
    moved = h.e.op("Add", rest, b)
    h.become("Where", h.e.op("And", differ, nonzero), moved, rest)


def space_to_depth(h: Rewriter) -> None:
    """Write CRD order as DCR, the only one before, which has blocks and channels of the new depth in the other order."""
    crd = h.string("mode", "DCR") == "CRD"
    h.drop("mode")
    if not crd:
        return
    x, size = h.required(0), h.int("blocksize", 1)
    deep = h.e.op("SpaceToDepth", x, blocksize=size)
    shape = h.e.op("Shape", deep)
    image = h.e.op("Shape", deep, start=2)
    split = h.e.op("Concat", h.e.ints([0, size * size, -1]), image, axis=0)
    blocks = h.e.op("Reshape", deep, split)
    h.become("Reshape", h.e.op("Transpose", blocks, perm=[0, 2, 1, 3, 4]), shape)


def cum_prod(h: Rewriter) -> None:
    """y[j] = product of x[i] over i <= j: the products of 1, 2, 4, ... neighbors, each from two of the row before.

    Where the size or the axis is unknown, a Scan multiplies row by row, from a row of ones on: see quirks.EMPTY_SCAN.
    """
    x, place, e = h.required(0), h.required(1), h.e
    exclusive, reverse = bool(h.int("exclusive", 0)), bool(h.int("reverse", 0))
    at = h.array(place)
    axis = None if at is None or x.shape is None else int(at.item()) % x.shape.rank()
    size = None if axis is None or x.shape is None else x.shape[axis]
    if isinstance(size, int) and axis is not None:
        y = x
        for step in (*([1] if exclusive else []), *(2**k for k in range(max(size - 1, 0).bit_length()))):
            low, high = (-step, step) if reverse else (step, -step)
            moved = e.pad(y, [low], [high], [axis], 1)
            y = moved if exclusive and y is x else e.mul(y, moved)
        h.become("Identity", y)
        return
    shape = e.op("Shape", x)
    where = e.op("Reshape", e.cast(place, ir.DataType.INT64), e.ints([1]))
    where = e.op("Where", e.op("Less", where, e.ints([0])), e.op("Add", where, e.op("Shape", shape)), where)
    following = e.op("Add", where, e.ints([1]))
    ends = e.ints([np.iinfo(np.int64).max])
    before = e.op("ReduceProd", e.op("Slice", shape, e.ints([0]), where), keepdims=1)
    after = e.op("ReduceProd", e.op("Slice", shape, following, ends), keepdims=1)
    rows = e.op("Reshape", x, e.op("Concat", before, e.op("Gather", shape, where), after, axis=0), allowzero=1)
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
    h.become("Reshape", made, shape, allowzero=1)


def tensor_scatter(h: Rewriter) -> None:
    """Write `update` into `past_cache` along an axis, behind the place that `write_indices` gives for each sample."""
    cache, update, first, axis = h.required(0), h.required(1), h.operand(2), h.int("axis", -2)
    circular = h.string("mode", "linear") == "circular"
    rank = next((v.shape.rank() for v in (cache, update) if v.shape is not None), None)
    if rank is None:
        raise UnsupportedCase("its replacement by ScatterElements needs a rank that is unknown")
    axis, e = axis % rank, h.e
    count = e.op("Squeeze", e.op("Shape", update, start=axis, end=axis + 1), e.ints([0]))
    places = e.op("Range", e.const(np.int64(0)), count, e.const(np.int64(1)))
    places = e.op("Reshape", places, e.ints([-1, *[1] * (rank - 1 - axis)]))
    if first is not None:
        places = e.op("Add", e.op("Reshape", first, e.ints([-1, *[1] * (rank - 1)])), places)
    if circular:
        places = e.op("Mod", places, e.op("Shape", cache, start=axis, end=axis + 1))
    h.become("ScatterElements", cache, e.op("Expand", places, e.op("Shape", update)), update, axis=axis)
