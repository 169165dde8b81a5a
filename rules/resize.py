"""Resize: separable, and linear in X except for the extrapolation value. Each resized axis has one matrix A:

    y[.., p, ..] = sum over q of A[p, q] x[.., q, ..]        dx[.., q, ..] = sum over p of A[p, q] g[.., p, ..]

The columns of A are the results of the operator for unit vectors. So the graph computes A as a small Resize of an identity
matrix (see `resize_matrix`), which has the runtime's own arithmetic: the rounding that decides which element is nearest, the
coordinate modes, the cubic and antialiasing filters, also for sizes known only at run time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import along, having, mix
from onnx_convgrad.autodiff.registry import Cotangents, vjp
from onnx_convgrad.ir.axis_products import (
    LONG_AXIS,
    contract,
    contract_blocks,
    contract_unranked,
    sum_blocks,
    weigh_windows,
)
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Dim, Emitter, dims_equal, known
from onnx_convgrad.rules.resize_matrix import (
    CROP,
    LONG,
    ROUNDED,
    ResizedAxes,
    blocks_of,
    is_sparse,
    matrix_of,
    scattered,
)

_CENTRED = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")


def _resized(n: Call, rank: int) -> list[int]:
    """The axes whose size changes, or may change."""
    axes = [axis % rank for axis in n.ints("axes") or range(rank)]
    scales = n.get("scales")
    factors = constant_of(scales)
    if scales is not None and (factors is None or factors.size):  # a factor of 1.2 mixes, even if the size stays
        known_factors = [None] * len(axes) if factors is None else np.ravel(factors).tolist()
        return [axis for axis, factor in zip(axes, known_factors, strict=True) if factor != 1]
    before, after = (v.shape or [None] * rank for v in (n["X"], n.y))
    return [axis for axis in axes if before[axis] is None or before[axis] != after[axis]]


_FACTORS = having(along(_resized, mix("may resize")), counts_all=lambda n: n.get("sizes") is not None, sizes=3)


# Not linear: the extrapolation value is added.
@vjp("Resize", wrt=("X",), note="roi and scales get no gradient", factors=_FACTORS)
def resize_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[p] = sum over q of A[p, q] x[q] along each axis: dx[q] = sum over p of A[p, q] g[p]."""

    def x_grad() -> ir.Value:
        x, gx = n["X"], g["Y"]
        if x.shape is not None and 0 in list(x.shape):
            return e.zeros_like(x)
        resized = ResizedAxes.of(e, n)
        repeats: dict[int, int] = {}
        general: list[int] = []
        for position, axis in enumerate(resized.axes):
            times = _repeats(e, n, resized, position)
            if times is None:
                general.append(position)
            elif times > 1:
                repeats[axis] = times
        resized = resized.copying(e, n) if general else resized
        if resized.rank is None:
            for position, axis in enumerate(resized.axes):
                gx = contract_unranked(e, gx, matrix_of(e, n, resized, position, e.dim(gx, axis)), axis)
            return e.typed(gx, x)
        sizes: list[Dim] = [e.dim(g["Y"], axis) for axis in range(resized.rank)]
        for position in reversed(general):  # the last axis needs no reshape, and the first step is the largest
            gx = _along(e, n, resized, position, gx, sizes)
        if repeats:
            gx = sum_blocks(e, gx, repeats, sizes)
        return e.typed(gx, x)

    return {"X": x_grad}


def _along(e: Emitter, n: Call, resized: ResizedAxes, position: int, gx: ir.Value, sizes: list[Dim]) -> ir.Value:
    """The cotangent before the resizing of one axis; updates `sizes`, the dimensions of gx."""
    axis = resized.axes[position]
    factor = _smooth_factor(e, n, resized, position, sizes[axis])
    if factor is not None:
        return weigh_windows(e, gx, factor, axis, sizes)
    if is_sparse(e, n, resized, position, sizes[axis]):
        return scattered(e, n, resized, position, gx, sizes)
    size, blocks = e.dim(n["X"], axis), blocks_of(e, n, resized, position, sizes[axis])
    if blocks is not None:
        return contract_blocks(e, gx, *blocks, axis, sizes, size)
    return contract(e, gx, matrix_of(e, n, resized, position, sizes[axis]), axis, sizes, size)


def by_matrices(e: Emitter, n: Call) -> ir.Value | None:
    """y as products with the matrices, the last axis first; `None` unless all sizes except the batch are known."""
    x, y = n["X"], n.y
    if x.shape is None or y.shape is None or n.string("coordinate_transformation_mode", "half_pixel") == CROP:
        return None
    resized, sizes, wanted = ResizedAxes.of(e, n), e.dims(x), e.dims(y)
    if resized.rank is None or not all(isinstance(size, int) and size for size in (*sizes[1:], *wanted[1:])):
        return None
    result = x
    for position, axis in reversed(list(enumerate(resized.axes))):
        if _repeats(e, n, resized, position) != 1:
            if axis == 0 or sizes[axis] > LONG:  # type: ignore[operator] # the sizes are numbers
                return None
            matrix = e.transpose(matrix_of(e, n, resized, position, wanted[axis]), [1, 0])
            result = contract(e, result, matrix, axis, sizes, wanted[axis])
    return result


def whole_factors(e: Emitter, n: Call) -> list[int] | None:
    """How often each element is repeated along every axis; `None` if the node does more than repeat elements."""
    resized = ResizedAxes.of(e, n)
    if resized.rank is None:
        return None
    times = [1] * resized.rank
    for position, axis in enumerate(resized.axes):
        count = _repeats(e, n, resized, position)
        if count is None:
            return None
        times[axis] = count
    return times


def _repeats(e: Emitter, n: Call, resized: ResizedAxes, position: int) -> int | None:
    """How often each element is repeated along an axis (1: the axis is kept), or `None` for a general matrix."""
    axis = resized.axes[position]
    policy = n.string("keep_aspect_ratio_policy", "stretch")
    if _fixed(n, resized, axis, policy):
        return 1
    if resized.scales is not None:
        scales = e.constant_of(resized.scales)
        ratio = None if scales is None else float(scales[position])
    else:
        if policy != "stretch":
            return None
        ratio = _ratio(e, n, resized, position)
    if ratio == 1:
        return 1
    if ratio is None or ratio != int(ratio) or n.string("mode", "nearest") != "nearest":
        return None
    out = None if n.y.shape is None else known(n.y.shape[axis])
    if out is not None and out > ROUNDED:
        return None
    coordinates = n.string("coordinate_transformation_mode", "half_pixel")
    rounding = n.string("nearest_mode", "round_prefer_floor")
    # for p = k m + r, the coordinates p / k, (p + 1/2) / k and (p + 1/2) / k - 1/2 are far from a rounding boundary
    block = {"asymmetric": ("floor",), "tf_half_pixel_for_nn": ("floor",)}
    allowed = ("round_prefer_floor", "round_prefer_ceil") if coordinates in _CENTRED else block.get(coordinates, ())
    return int(ratio) if rounding in allowed else None


def _smooth_factor(e: Emitter, n: Call, resized: ResizedAxes, position: int, out: Dim) -> int | None:
    """The power of two by which linear interpolation enlarges a long axis; `None` in all other cases.

    Its weights repeat with that period. For other factors the runtime rounds the coordinates, and so the weights.
    """
    x, axis = n["X"], resized.axes[position]
    size = None if x.shape is None else known(x.shape[axis])
    if n.string("mode", "nearest") != "linear" or x.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return None
    if n.string("coordinate_transformation_mode", "half_pixel") not in _CENTRED or size is None or size < LONG_AXIS:
        return None
    if n.int("antialias", 0) or (
        resized.sizes is not None and n.string("keep_aspect_ratio_policy", "stretch") != "stretch"
    ):
        return None
    scales = e.constant_of(resized.scales)
    ratio = float(scales[position]) if scales is not None else _ratio(e, n, resized, position)
    if ratio is None or ratio not in (2, 4, 8, 16) or out != size * int(ratio):
        return None
    return int(ratio) if size * int(ratio) <= ROUNDED else None


def _fixed(n: Call, resized: ResizedAxes, axis: int, policy: str) -> bool:
    """Whether the scale can only be 1: linear and cubic modes resize spatial axes only."""
    rank = resized.rank or 0
    if n.string("mode", "nearest") == "nearest" or rank < 4:
        return False
    common = policy != "stretch" and resized.sizes is not None and 0 in resized.axes  # one scale for all axes
    return common or axis == 0 or (axis == 1 and rank == 5)


def _ratio(e: Emitter, n: Call, resized: ResizedAxes, position: int) -> float | None:
    """Output size over input size, `None` if unknown while building; 1 for axes whose sizes are provably equal."""
    x, y, axis = n["X"], n.y, resized.axes[position]
    sizes = e.constant_of(resized.sizes)
    wanted = None if sizes is None else int(sizes[position])
    have = None if x.shape is None else known(x.shape[axis])
    if wanted is not None and have:
        return wanted / have
    if _copied(e, resized.sizes, x, axis, position):
        return 1.0
    return 1.0 if x.shape is not None and y.shape is not None and dims_equal(x.shape[axis], y.shape[axis]) else None


def _copied(e: Emitter, sizes: ir.Value | None, x: ir.Value, axis: int, position: int) -> bool:
    """Whether `sizes` is a Concat whose first operand is a leading part of the shape of x that covers `axis`."""
    node = None if sizes is None else sizes.producer()
    if node is None or node.op_type != "Concat" or position != axis:
        return False
    first = node.inputs[0]
    source = None if first is None else first.producer()
    if source is None:
        return False
    if source.op_type == "Shape":
        cut = Call(source)
        return source.inputs[0] is x and cut.int("start", 0) == 0 and axis < cut.int("end", -1)
    if source.op_type != "Slice":
        return False
    data, *bounds = source.inputs
    shape = None if data is None else data.producer()
    if shape is None or shape.op_type != "Shape" or shape.attributes or shape.inputs[0] is not x:
        return False
    start, end, along, step = (_number(e, b, i) for i, b in enumerate((*bounds, None, None)[:4]))
    return (start, along, step) == (0, 0, 1) and end is not None and axis < end


def _number(e: Emitter, value: ir.Value | None, position: int) -> int | None:
    """An operand of a Slice of a vector as a number: start, end, axis (default 0), step (default 1)."""
    if value is None:
        return (None, None, 0, 1)[position]
    number = e.number_of(value)
    return None if number is None else int(number)
