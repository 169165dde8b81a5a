"""Operators of ONNX Runtime (com.microsoft) that its optimizer does not make: their authors write them into a file."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.cofactors import cofactors
from onnx_convgrad.ir.constants import constant_of


def plain(h: Rewriter) -> None:
    """The operator of ai.onnx that has its name"""
    h.node.domain = ""


def newer(h: Rewriter) -> None:
    """The operator of ai.onnx 27 that has its name"""
    for name in ("state_window", "channels_last", "state_update_capacity", "dilation", "ndim"):
        usual = int(name in ("dilation", "ndim"))
        if h.int(name, usual) != usual:
            raise UnsupportedCase(f"its attribute {name} is {h.int(name, usual)}, which ai.onnx has not")
        h.drop(name)
    h.node.domain, h.node.version = "", 27


def grid_modes(h: Rewriter) -> None:
    """Rename the modes of GridSample to those of opset 20"""
    mode = h.string("mode", "bilinear")
    h.set_attributes(mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


def grid_sample(h: Rewriter) -> None:
    """The operator of ai.onnx that has its name"""
    grid_modes(h)
    plain(h)


def expand_dims(h: Rewriter) -> ir.Value:
    """Unsqueeze(X, axis)"""
    axis = h.e.reshape(h.e.cast(h.required(1), ir.DataType.INT64), [1])
    return h.e.op("Unsqueeze", h.required(0), axis)


def range_(h: Rewriter) -> ir.Value:
    """Range(start, limit, delta or 1)"""
    start, limit, delta = (
        None if value is None else h.e.reshape(value, []) for value in (h.required(0), h.required(1), h.operand(2))
    )
    assert start is not None
    return h.e.op("Range", start, limit, h.e.scalar(1, start) if delta is None else delta)


def inverse(h: Rewriter) -> ir.Value:
    """Transposed cofactors of X, which are determinants, divided by Det(X)"""
    x = h.required(0)
    rank = h.e.rank(x, "its replacement by determinants")
    swapped = h.e.op("Transpose", cofactors(h.e, x), perm=[*range(rank - 2), rank - 1, rank - 2])
    return h.e.div(swapped, h.e.unsqueeze(h.e.op("Det", x), [-2, -1]))


def distances(h: Rewriter) -> ir.Value:
    """Sums over n of (A[m, n] - B[k, n])^2, or their roots"""
    metric = h.string("metric", "sqeuclidean")
    if metric not in ("sqeuclidean", "euclidean"):
        raise UnsupportedCase(f"its metric is {metric!r}, which ONNX Runtime's CPU kernel lacks")
    differences = h.e.sub(h.e.unsqueeze(h.required(0), [1]), h.e.unsqueeze(h.required(1), [0]))
    squares = h.e.op("ReduceSum", h.e.square(differences), h.e.ints([2]), keepdims=0)
    return squares if metric == "sqeuclidean" else h.e.op("Sqrt", squares)


def gated_add(h: Rewriter) -> ir.Value:
    """X + Y gate"""
    if h.operand(3) is not None:
        raise UnsupportedCase("its gate has a weight, which ONNX Runtime's CPU kernel lacks")
    return h.e.add(h.required(0), h.e.mul(h.required(1), h.required(2)))


def scaled_silu(h: Rewriter) -> ir.Value:
    """z Sigmoid(z) with z = scale X"""
    x, scale = h.required(0), h.operand(1)
    z = h.e.mul(x, h.float("alpha", 1.0)) if scale is None else h.e.mul(x, h.e.op("CastLike", scale, x))
    return h.e.mul(z, h.e.op("Sigmoid", z))


def attention_gate(h: Rewriter) -> list[ir.Value | None]:
    """decay_scale Softplus(a + dt_bias), and Sigmoid(b)"""
    e, a, b = h.e, h.required(0), h.operand(3)
    wide = e.add(e.cast(a, ir.DataType.FLOAT), h.required(1))
    decay = e.op("CastLike", e.mul(e.op("Softplus", wide), h.required(2)), a)
    return [decay, None if b is None else e.op("Sigmoid", b)]


def _wide(h: Rewriter, place: int) -> ir.Value:
    """The operand at `place` in float32, in which kernels compute."""
    return h.e.cast(h.required(place), ir.DataType.FLOAT)


def _normal(h: Rewriter, x: ir.Value) -> ir.Value:
    """X / sqrt(mean(X^2) + epsilon) along the last axis."""
    mean = h.e.op("ReduceMean", h.e.square(x), h.e.ints([-1]))
    return h.e.div(x, h.e.op("Sqrt", h.e.add(mean, h.float("epsilon", 1e-5))))


def gated_rms_norm(h: Rewriter) -> ir.Value:
    """X / sqrt(mean(X^2) + epsilon) scale activation(gate), over as many numbers as there are scales"""
    e, x, scale, z = h.e, *(_wide(h, index) for index in range(3))
    groups = e.op("Reshape", x, e.vector([-1, e.dim(scale, 0)]))
    gate = e.op("Sigmoid", z)
    gate = gate if h.string("activation", "silu") == "sigmoid" else e.mul(z, gate)
    y = e.mul(e.op("Reshape", e.mul(_normal(h, groups), scale), e.op("Shape", x)), gate)
    return e.op("CastLike", y, h.required(0))


def engram_gate(h: Rewriter) -> list[ir.Value]:
    """Sigmoid(sign(d) sqrt(max(|d|, 1e-6))) value, with d = normal key normal query / sqrt(size); and its normal form"""
    e, (key, query, value, of_keys, of_queries) = h.e, (_wide(h, index) for index in range(5))
    products = e.mul(e.mul(_normal(h, key), of_keys), e.mul(_normal(h, query), of_queries))
    size = e.op("Sqrt", e.cast(e.op("Shape", key, start=3, end=4), ir.DataType.FLOAT))
    dot = e.div(e.op("ReduceSum", products, e.ints([-1])), size)
    root = e.op("Sqrt", e.op("Max", e.op("Abs", dot), e.scalar(1e-6, dot)))
    y = e.mul(e.op("Sigmoid", e.mul(e.op("Sign", dot), root)), e.unsqueeze(value, [2]))
    results = [y] if h.operand(5) is None else [y, e.mul(_normal(h, y), _wide(h, 5))]
    return [e.op("CastLike", result, h.required(0)) for result in results]


# -- residual streams --------------------------------------------------------------------------------------------------


def _in_branches(h: Rewriter, place: int) -> ir.Value:
    """Streams, or their gates, as `[..., branches, size]`: in streams, `num_branches` says that these axes are one."""
    e, x, count = h.e, h.required(0), h.int("num_branches", 0)
    rank = e.rank(x, "its replacement by plain operators") - (1 if count else 2)
    sizes = e.vector([*[0] * rank, count or e.dim(x, rank), -1])
    return e.op("Reshape", _wide(h, place), sizes)


def branchwise_rms_norm(h: Rewriter) -> ir.Value:
    """X / sqrt(mean(X^2) + epsilon) scale of each branch"""
    e, x = h.e, _in_branches(h, 0)
    y = _normal(h, x)
    if h.operand(1) is not None:
        y = e.mul(y, e.op("Reshape", _wide(h, 1), e.vector([-1, e.dim(x, -1)])))
    return e.op("CastLike", e.op("Reshape", y, e.op("Shape", h.required(0))), h.required(0))


def pre_mix(h: Rewriter) -> ir.Value:
    """reduction_scale times the sum over branches of streams times gates"""
    e = h.e
    y = e.op("ReduceSum", e.mul(_in_branches(h, 0), _in_branches(h, 1)), e.ints([-2]), keepdims=0)
    return e.op("CastLike", e.mul(y, h.float("reduction_scale", 1.0)), h.required(0))


def post_mix(h: Rewriter) -> ir.Value:
    """Transpose(stream_mix) streams + gates block_output"""
    e, x, streams = h.e, h.required(0), _in_branches(h, 0)
    if h.operand(3) is not None:
        mix = _wide(h, 3)
        rank = e.rank(mix, "its replacement by plain operators")
        streams = e.matmul(e.op("Transpose", mix, perm=[*range(rank - 2), rank - 1, rank - 2]), streams)
    y = e.add(streams, e.mul(_in_branches(h, 2), e.unsqueeze(_wide(h, 1), [-2])))
    return e.op("CastLike", e.op("Reshape", y, e.op("Shape", x)), x)


# -- windows -----------------------------------------------------------------------------------------------------------


def unique(h: Rewriter) -> list[ir.Value]:
    """Unique(X, sorted=0), without the indices of the first"""
    y, _, which, counts = h.e.ops("Unique", h.required(0), outputs=4, sorted=0)
    return [y, which, counts]


def unfold(h: Rewriter) -> ir.Value:
    """Gather of the windows of `size` along an axis, with their numbers along a new last axis"""
    e, x, size, step = h.e, h.required(0), h.int("size", 1), h.int("step", 1)
    rank = e.rank(x, "its replacement by Gather")
    axis = h.int("dim", -1) % rank
    count = e.size_add(e.size_div(e.size_sub(e.dim(x, axis), size), step), 1)
    starts = e.reshape(e.arange(count, step), [-1, 1])
    windows = e.gather(x, e.op("Add", starts, e.const(np.arange(size))), axis=axis)
    order = [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1]
    return e.op("Transpose", windows, perm=order)


def crop_and_resize(h: Rewriter) -> ir.Value:
    """Rows X Columns', the weights of pixels for the rows and columns of each crop, in the image of each box"""
    sizes = constant_of(h.operand(3))
    if sizes is None:
        raise UnsupportedCase("its operand crop_size is not stored: replace it by a constant")
    e, images = h.e, h.e.gather(h.required(0), h.required(2), axis=0)
    (rows, above), (columns, left) = (_pixels_of_crops(h, axis, int(size)) for axis, size in enumerate(sizes))
    columns = e.op("Transpose", e.unsqueeze(columns, [1]), perm=[0, 1, 3, 2])
    y = e.matmul(e.matmul(e.unsqueeze(rows, [1]), images), columns)
    inside = e.op("And", e.unsqueeze(above, [1, 3]), e.unsqueeze(left, [1, 2]))
    return e.where(inside, y, h.float("extrapolation_value", 0.0))


def _pixels_of_crops(h: Rewriter, axis: int, count: int) -> tuple[ir.Value, ir.Value]:
    """The weights `[boxes, count, size]` of pixels along an axis, and whether the places `[boxes, count]` are in the image.

    The first place is at the beginning of a box and the last at its end; a single one is in the middle.
    """
    e, x = h.e, h.required(0)
    shares = np.linspace(0, 1, count, dtype=np.float32) if count > 1 else np.array([0.5], np.float32)
    first, last = (e.slice(h.required(1), [at], [at + 1], [1]) for at in (axis, axis + 2))
    end = e.sub(e.cast(e.vector([e.dim(x, axis + 2)]), ir.DataType.FLOAT), 1)
    places = e.mul(e.add(e.mul(first, e.const(1 - shares)), e.mul(last, e.const(shares))), end)
    inside = e.op("And", e.op("GreaterOrEqual", places, e.scalar(0, places)), e.op("LessOrEqual", places, end))
    pixels, at = e.cast(e.arange(e.dim(x, axis + 2)), ir.DataType.FLOAT), e.unsqueeze(places, [2])
    if h.string("mode", "bilinear") == "nearest":
        nearest = e.op("Equal", e.op("Floor", e.add(at, 0.5)), pixels)
        return e.cast(nearest, ir.DataType.FLOAT), inside
    return e.op("Relu", e.sub(e.scalar(1, places), e.op("Abs", e.sub(at, pixels)))), inside


def conv_transpose(h: Rewriter) -> ir.Value:
    """ConvTranspose with the stored operand Pads as its attribute"""
    pads = constant_of(h.operand(2))
    if h.operand(2) is not None and pads is None:
        raise UnsupportedCase("its operand Pads is not stored: replace it by a constant")
    padding = None if pads is None else [int(number) for number in pads]
    return h.e.op("ConvTranspose", h.required(0), h.required(1), h.operand(3), pads=padding, **h.attributes())
