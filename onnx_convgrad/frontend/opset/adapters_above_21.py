"""Adapters for what opsets 22 to 28 added to operators that exist at 21, and for two of the new operators.

The other new operators are replaced by the function body that the standard gives them. RMSNormalization and Swish are
written by hand because their bodies compute at run time what is known: the reduced axes and the type of a constant.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.frontend.opset.rewriter import Rewriter, Unsupported

__all__ = [
    "cast",
    "cast_like",
    "celu",
    "dequantize",
    "mod",
    "pool",
    "quantize",
    "range_",
    "rms_norm",
    "space_to_depth",
    "swish",
]

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NEWEST_TYPE = ir.DataType.INT4
"""The last element type that opset 21 knows."""


def pool(node: ir.Node, version: int, h: Rewriter) -> None:
    """Since 22, `ceil_mode` drops windows that start in the padding at the end. Such a node is written without it.

    ONNX Runtime drops them at every opset, so that where sizes are unknown only the inferred shape is too large.
    """
    x, kernel = h.required(0), h.get_ints("kernel_shape") or ()
    rank = len(kernel)
    sizes = [] if x.shape is None else [size for size in x.shape[2:] if isinstance(size, int)]
    if not h.get_int("ceil_mode", 0) or h.get_string("auto_pad", "NOTSET") != "NOTSET" or len(sizes) != rank:
        return
    strides, dilations = h.get_ints("strides") or (1,) * rank, h.get_ints("dilations") or (1,) * rank
    pads = h.get_ints("pads") or (0,) * 2 * rank
    ends, dropped = [], False
    for axis, size in enumerate(sizes):
        extent, stride, start, end = (
            dilations[axis] * (kernel[axis] - 1) + 1,
            strides[axis],
            pads[axis],
            pads[rank + axis],
        )
        last = -((extent - size - start - end) // stride) * stride
        if last >= size + start:
            last, dropped = last - stride, True
        ends.append(max(0, last + extent - size - start))
    longer = any(new > old for new, old in zip(ends, pads[rank:], strict=True))
    # What ceil_mode adds beyond the padding is not counted by count_include_pad, and padding must not cover a window.
    fits = all(end < size or end <= old for end, size, old in zip(ends, kernel, pads[rank:], strict=True))
    if dropped and fits and not (longer and h.get_int("count_include_pad", 0)):
        h.set_attribute("ceil_mode", 0)
        h.set_attribute("pads", [*pads[:rank], *ends])


def cast(node: ir.Node, version: int, h: Rewriter) -> None:
    """`round_mode` concerns only an element type that opset 21 does not have."""
    target = ir.DataType(h.get_int("to", 0))
    if target > _NEWEST_TYPE:
        raise Unsupported(f"opset 21 has no element type {target.name}")
    node.attributes.pop("round_mode", None)


def cast_like(node: ir.Node, version: int, h: Rewriter) -> None:
    """The same, the target being the type of the second input."""
    target = h.dtype(h.input(1), node.outputs[0])
    if target is not None and target > _NEWEST_TYPE:
        raise Unsupported(f"opset 21 has no element type {target.name}")
    node.attributes.pop("round_mode", None)


def dequantize(node: ir.Node, version: int, h: Rewriter) -> None:
    """`output_dtype` is the type of the product, which follows from the scale at opset 21."""
    target = h.get_int("output_dtype", 0)
    node.attributes.pop("output_dtype", None)
    scale = h.required(1)
    if target and h.dtype(scale) != target:
        scale = h.emit("Cast", [scale], {"to": target}, dtype=ir.DataType(target))
    h.set_inputs(h.required(0), scale, h.input(2))


def quantize(node: ir.Node, version: int, h: Rewriter) -> None:
    """The division was freed from the type of the data: by `precision`, else by the scale's type."""
    x, scale = h.required(0), h.required(1)
    precision = ir.DataType(h.get_int("precision", 0)) or h.dtype(scale)
    explicit = bool(h.get_int("precision", 0))
    node.attributes.pop("precision", None)

    def converted(value: ir.Value) -> ir.Value:
        if precision is None or (h.dtype(value) == precision) or (h.dtype(value) is None and not explicit):
            return value
        return h.emit("Cast", [value], {"to": precision}, dtype=precision)

    h.set_inputs(converted(x), converted(scale), h.input(2))


def rms_norm(node: ir.Node, version: int, h: Rewriter) -> None:
    """x / sqrt(mean(x^2) + epsilon) in the precision of `stash_type`, then scaled in the type of x."""
    x, scale, axis = h.required(0), h.required(1), h.get_int("axis", -1)
    stash = ir.DataType(h.get_int("stash_type", 1))
    if axis < 0:
        axes = h.ints(list(range(axis, 0)), "axes")
    elif x.shape is not None:
        axes = h.ints(list(range(axis, x.shape.rank())), "axes")
    else:
        rank = h.emit("Size", [h.emit("Shape", [x], dtype=ir.DataType.INT64)], dtype=ir.DataType.INT64)
        axes = h.emit("Range", [h.ints(axis, "axis"), rank, h.ints(1, "one")], dtype=ir.DataType.INT64)
    wide = x if h.dtype(x) == stash else h.emit("Cast", [x], {"to": stash}, dtype=stash)
    epsilon = h.scalar(h.get_float("epsilon", 1e-5), wide, "epsilon")
    square = h.emit("ReduceMean", [h.emit("Mul", [wide, wide], dtype=stash), axes], dtype=stash)
    root = h.emit("Sqrt", [h.emit("Add", [square, epsilon], dtype=stash)], dtype=stash)
    normal = h.emit("Div", [wide, root], dtype=stash)
    if h.dtype(scale) != stash:
        # The result has the type of the scale, which is that of x in all but odd models.
        normal = h.emit("CastLike", [normal, scale], dtype=h.dtype(scale))
    h.become("Mul", [normal, scale])


def swish(node: ir.Node, version: int, h: Rewriter) -> None:
    """x * sigmoid(alpha * x)"""
    x, alpha, y = h.required(0), h.get_float("alpha", 1.0), node.outputs[0]
    dtype = h.dtype(x, y)
    inner = x if alpha == 1.0 else h.emit("Mul", [x, h.scalar(alpha, x, "alpha", y)], dtype=dtype)
    h.become("Mul", [x, h.emit("Sigmoid", [inner], dtype=dtype)])


def celu(node: ir.Node, version: int, h: Rewriter) -> None:
    """Other types than float32 are new: max(x, 0) + alpha (e^(min(x, 0) / alpha) - 1)."""
    x, y = h.required(0), node.outputs[0]
    dtype, alpha = h.dtype(x, y), h.get_float("alpha", 1.0)
    if dtype in (None, ir.DataType.FLOAT):
        return
    zero, one, scale = (
        h.scalar(number, x, name, y) for number, name in ((0.0, "zero"), (1.0, "one"), (alpha, "alpha"))
    )
    power = h.emit("Exp", [h.emit("Div", [h.emit("Min", [x, zero], dtype=dtype), scale], dtype=dtype)], dtype=dtype)
    below = h.emit("Mul", [h.emit("Sub", [power, one], dtype=dtype), scale], dtype=dtype)
    h.become("Add", [h.emit("Max", [x, zero], dtype=dtype), below])


def range_(node: ir.Node, version: int, h: Rewriter) -> None:
    """Half precision is new: it was computed in float32 by its users, and `stash_type` says the same."""
    stash = ir.DataType(h.get_int("stash_type", 1))
    dtype = h.dtype(*node.inputs, node.outputs[0])
    node.attributes.pop("stash_type", None)
    if dtype not in _NARROW:
        return
    if stash in _NARROW:
        raise Unsupported(f"it accumulates in {stash.name}, for which opset 21 has no Range")
    assert dtype is not None
    wide = [h.emit("Cast", [value], {"to": stash}, dtype=stash) for value in node.inputs]
    h.become("Cast", [h.emit("Range", wide, dtype=stash)], {"to": dtype})


def mod(node: ir.Node, version: int, h: Rewriter) -> None:
    """`fmod=0` was for integers. For floats: the truncated remainder, moved by b where its sign is not that of b."""
    a, b = h.required(0), h.required(1)
    dtype = h.dtype(a, b, node.outputs[0])
    if h.get_int("fmod", 0) or dtype is None or not dtype.is_floating_point():
        return
    logic = ir.DataType.BOOL
    zero = h.scalar(0.0, a, "zero", b, node.outputs[0])
    rest = h.emit("Mod", [a, b], {"fmod": 1}, dtype=dtype)
    signs = [h.emit("Less", [value, zero], dtype=logic) for value in (rest, b)]
    differ = h.emit("Xor", signs, dtype=logic)
    nonzero = h.emit("Not", [h.emit("Equal", [rest, zero], dtype=logic)], dtype=logic)
    moved = h.emit("Add", [rest, b], dtype=dtype)
    h.become("Where", [h.emit("And", [differ, nonzero], dtype=logic), moved, rest])


def space_to_depth(node: ir.Node, version: int, h: Rewriter) -> None:
    """CRD order differs from DCR, the only one before, by the order of the blocks and the channels in the new depth."""
    crd = h.get_string("mode", "DCR") == "CRD"
    node.attributes.pop("mode", None)
    if not crd:
        return
    x, size = h.required(0), h.get_int("blocksize", 1)
    dtype, whole = h.dtype(x, node.outputs[0]), ir.DataType.INT64
    deep = h.emit("SpaceToDepth", [x], {"blocksize": size}, dtype=dtype)
    shape = h.emit("Shape", [deep], dtype=whole)
    image = h.emit("Shape", [deep], {"start": 2}, dtype=whole)
    split = h.emit("Concat", [h.ints([0, size * size, -1], "blocks"), image], {"axis": 0}, dtype=whole)
    blocks = h.emit("Reshape", [deep, split], dtype=dtype)
    h.become("Reshape", [h.emit("Transpose", [blocks], {"perm": [0, 2, 1, 3, 4]}, dtype=dtype), shape])
