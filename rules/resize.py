"""Resize: separable, and linear in X except for the extrapolation value. Each resized axis has one matrix A:

    y[.., p, ..] = sum over q of A[p, q] x[.., q, ..]        dx[.., q, ..] = sum over p of A[p, q] g[.., p, ..]

The columns of A are the results of the operator for unit vectors. So the graph computes A as a small Resize of an identity
matrix, which has the runtime's own arithmetic: the rounding that decides which element is nearest, the coordinate modes, the
cubic and antialiasing filters, also for sizes known only at run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import along, counting, mix
from onnx_convgrad.autodiff.registry import Cotangents, vjp
from onnx_convgrad.errors import require
from onnx_convgrad.ir.axis_products import (
    LONG_AXIS,
    contract,
    contract_blocks,
    contract_unranked,
    sum_blocks,
    weigh_windows,
)
from onnx_convgrad.ir.broadcasting import shapes_differ
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of, is_constant
from onnx_convgrad.ir.emit import Dim, Emitter, dims_equal, known
from onnx_convgrad.rules.movement import arange

_FILTER = ("mode", "nearest_mode", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "antialias")
_CENTRED = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
_CROP = "tf_crop_and_resize"


@dataclass(frozen=True, slots=True)
class ResizedAxes:
    """The axes that one node may resize, in their order in `roi`, `scales` and `sizes`."""

    rank: int | None
    axes: tuple[int, ...]
    scales: ir.Value | None
    sizes: ir.Value | None

    @classmethod
    def of(cls, e: Emitter, n: Call) -> ResizedAxes:
        scales, sizes = n.get("scales"), n.get("sizes")
        if scales is not None and e.constant_of(scales) is not None and e.constant_of(scales).size == 0:  # type: ignore[union-attr]
            scales = None  # old models write an empty tensor for an absent one
        operand = scales if scales is not None else sizes
        require(operand is not None, "it has neither scales nor sizes.")
        assert operand is not None
        axes, sizes = n.ints("axes"), sizes if scales is None else None
        rank = _rank(e, n, operand)
        if axes is None:
            return cls(rank, tuple(range(rank or 0)), scales, sizes)
        return cls(rank, tuple(a % rank if rank else a for a in axes), scales, sizes)

    def copying(self, e: Emitter, n: Call) -> ResizedAxes:
        """The same with scale 1 if no size changes: the runtime then copies x, whatever the scales are."""
        if self.scales is None:
            return self  # equal sizes mean scale 1, or `_resize_all` uses all sizes together
        x, y = n["X"], n.y
        factors = e.constant_of(self.scales)
        if factors is not None and (all(f == 1 for f in factors) or any(f < 1 or f >= 2 for f in factors)):
            return self
        if shapes_differ(x, y):
            return self
        equal = e.compare("Equal", e.op("Shape", x), e.op("Shape", y))
        same = e.op("ReduceMin", e.cast(equal, ir.DataType.INT64), keepdims=0)
        unchanged = e.op("Cast", same, to=int(ir.DataType.BOOL))
        return replace(self, scales=e.op("Where", unchanged, e.const(np.float32(1)), self.scales))


def _rank(e: Emitter, n: Call, operand: ir.Value) -> int | None:
    """The rank of X, or `None` if it is unknown and `axes` makes it unnecessary."""
    for value in (n["X"], n.y):
        if value.shape is not None:
            return len(value.shape)
    axes = n.ints("axes")
    if axes is not None and min(axes) >= 0:
        return None
    if axes is None:  # one entry per axis
        if (constant := e.constant_of(operand)) is not None:
            return int(constant.size)
        if operand.shape is not None and (count := known(operand.shape[0])) is not None:
            return count
    return e.rank(n["X"])


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


_FACTORS = counting(along(_resized, mix("may resize")), lambda n: n.get("sizes") is not None)


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
                gx = contract_unranked(e, gx, _matrix(e, n, resized, position, e.dim(gx, axis)), axis)
            return e.typed(gx, x)
        sizes: list[Dim] = [e.dim(g["Y"], axis) for axis in range(resized.rank)]
        for position in reversed(general):  # the last axis needs no reshape, and the first step is the largest
            axis = resized.axes[position]
            factor = _smooth_factor(e, n, resized, position, sizes[axis])
            if factor is not None:
                gx = weigh_windows(e, gx, factor, axis, sizes)
            else:
                blocks = _blocks(e, n, resized, position, sizes[axis])
                if blocks is not None:
                    gx = contract_blocks(e, gx, *blocks, axis, sizes, e.dim(x, axis))
                else:
                    matrix = _matrix(e, n, resized, position, sizes[axis])
                    gx = contract(e, gx, matrix, axis, sizes, e.dim(x, axis))
        if repeats:
            gx = sum_blocks(e, gx, repeats, sizes)
        return e.typed(gx, x)

    return {"X": x_grad}


def by_matrices(e: Emitter, n: Call) -> ir.Value | None:
    """y as products with the matrices, the last axis first; `None` unless all sizes except the batch are known."""
    x, y = n["X"], n.y
    if x.shape is None or y.shape is None or n.string("coordinate_transformation_mode", "half_pixel") == _CROP:
        return None
    resized, sizes, wanted = ResizedAxes.of(e, n), e.dims(x), e.dims(y)
    if resized.rank is None or not all(isinstance(size, int) and size for size in (*sizes[1:], *wanted[1:])):
        return None
    result = x
    for position, axis in reversed(list(enumerate(resized.axes))):
        if _repeats(e, n, resized, position) != 1:
            if axis == 0 or sizes[axis] > _LONG:  # type: ignore[operator] # the sizes are numbers
                return None
            matrix = e.transpose(_matrix(e, n, resized, position, wanted[axis]), [1, 0])
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
    return int(ratio) if ratio in (2, 4, 8, 16) and out == size * int(ratio) else None


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


# -- the interpolation matrix ------------------------------------------------------------------------------------------


def _matrix(e: Emitter, n: Call, resized: ResizedAxes, position: int, out: Dim) -> ir.Value:
    """A transposed, [input size, output size], in the dtype of X: a Resize of the unit vectors of one axis."""
    x, axis = n["X"], resized.axes[position]
    size = e.dim(x, axis)
    attributes: dict[str, Any] = {k: v for k, v in n.attributes().items() if k in _FILTER}
    if n.string("keep_aspect_ratio_policy", "stretch") != "stretch" and resized.sizes is not None:
        units = _resize_all(e, n, resized, position, attributes)
    else:
        units = _resize_rows(e, n, resized, position, _identity(e, size), size, attributes)
    matrix = e.op("Reshape", units, e.vector([size, out]), allowzero=1)
    return e.cast(matrix, x.dtype or ir.DataType.FLOAT)


def _resize_rows(
    e: Emitter, n: Call, resized: ResizedAxes, position: int, rows: ir.Value, count: Dim, attributes: dict[str, Any]
) -> ir.Value:
    """`count` rows of the input size, each resized like one axis: [1, count, 1, output size]."""
    size = e.dim(n["X"], resized.axes[position])
    # the last axis, of one element, is doubled so that a size changes: otherwise the runtime would copy
    basis = e.reshape(rows, [1, count, 1, size])
    roi = _roi(e, n, resized, [position], lead=3)
    if resized.scales is not None:
        lead = e.const(np.array([1, 1, 2], np.float32))
        scales = _place(e, resized.scales, position, lead, computed=_rounded(e, resized.scales, position, size))
        units = e.op("Resize", basis, roi, scales, **attributes)
    else:
        assert resized.sizes is not None
        sizes = _place(e, resized.sizes, position, e.vector([1, count, 2]))
        units = e.op("Resize", basis, roi, None, sizes, **attributes)
    return e.op("Slice", units, e.ints([0]), e.ints([1]), e.ints([2]))


def _resize_all(e: Emitter, n: Call, resized: ResizedAxes, position: int, attributes: dict[str, Any]) -> ir.Value:
    """The same if the aspect ratio is kept: the scale of one axis then depends on the sizes of all.

    The unit vectors of the axis are repeated along the other resized axes; interpolation keeps constants constant.
    """
    assert resized.sizes is not None
    count = len(resized.axes)
    sizes = [e.dim(n["X"], axis) for axis in resized.axes]
    own = sizes[position]
    pad = [1] if count == 1 else []
    rows: list[Dim] = [1, own, *pad, *(own if i == position else 1 for i in range(count))]
    basis = e.op("Expand", e.reshape(_identity(e, own), rows), e.vector([1, own, *pad, *sizes]))
    axes = tuple(range(2 + len(pad), 2 + len(pad) + count))
    policy = n.string("keep_aspect_ratio_policy", "stretch")
    roi = _roi(e, n, resized, list(range(count)), lead=0)
    units = e.op("Resize", basis, roi, None, resized.sizes, **attributes, axes=axes, keep_aspect_ratio_policy=policy)
    others = [a for i, a in enumerate(axes) if i != position]
    return e.slice(units, [0] * len(others), [1] * len(others), others) if others else units


def _blocks(e: Emitter, n: Call, resized: ResizedAxes, position: int, out: Dim) -> tuple[ir.Value, ir.Value] | None:
    """The matrix of a long axis in blocks around its diagonal; `None` for other axes.

    Block k maps the outputs `rows[k]` to b inputs, from input k b on: matrices [blocks, rows, b] and rows [blocks, rows].

    An output p reads inputs near its place m[p] only. So the entries of rows that are w inputs apart are found with one
    Resize of their sum, a comb, and w combs and a ramp, whose result is m, take the place of all unit vectors.
    """
    x, axis = n["X"], resized.axes[position]
    size = e.dim(x, axis)
    if not isinstance(size, int) or not isinstance(out, int) or size <= _LONG or not out:
        return None
    policy = n.string("keep_aspect_ratio_policy", "stretch") != "stretch" and resized.sizes is not None
    if policy or n.string("coordinate_transformation_mode", "half_pixel") == _CROP:
        return None  # places depend on more than the two sizes
    ratio = size / out
    near = 2 * max(ratio, 1) if n.int("antialias", 0) else 2
    reach = math.ceil(near) + 2 + (size >> 22)  # in inputs around m, which is rounded to float32
    w = 2 * reach + 1
    b = w * max(96 // w, 1)
    count = -(-size // b)
    index = arange(e, size)
    combs = e.compare("Equal", e.op("Mod", index, e.ints([w])), e.unsqueeze(arange(e, w), [1]))
    kinds = [e.cast(combs, ir.DataType.FLOAT), e.unsqueeze(e.cast(index, ir.DataType.FLOAT), [0])]
    attributes = {k: v for k, v in n.attributes().items() if k in _FILTER}
    units = _resize_rows(e, n, resized, position, e.concat(kinds, 0), w + 1, attributes)
    units = e.transpose(e.reshape(units, [w + 1, out]), [1, 0])
    # places differ from p size / out by less than `slack` in every coordinate mode
    slack = 2 + 2 * max(ratio, 1) + reach
    height = min(math.ceil((b + 2 * slack) / ratio) + 2, out)
    first = np.floor((np.arange(count) * b - slack) / ratio).astype(np.int64) - 1
    rows = e.op("Add", e.const(first.clip(0, out - height)[:, None]), arange(e, height))
    entries = e.op("Gather", units, rows, axis=0)  # [count, height, w + 1]
    found, place = e.slice(entries, [0], [w], [2]), e.slice(entries, [w], [w + 1], [2])
    found = e.op("Expand", e.unsqueeze(found, [2]), e.ints([count, height, b // w, w]))
    inputs = e.cast(e.reshape(arange(e, count * b), [count, 1, b]), ir.DataType.FLOAT)
    close = e.compare("LessOrEqual", e.op("Abs", e.sub(inputs, place)), float(reach))
    matrices = e.where(close, e.reshape(found, [count, height, b]), 0)
    return e.cast(matrices, x.dtype or ir.DataType.FLOAT), rows


_LONG = 4096
"""Inputs of an axis up to which its matrix is computed as a whole."""


def _identity(e: Emitter, size: Dim) -> ir.Value:
    """An identity matrix, in float32: the only dtype that every runtime resizes."""
    if isinstance(size, int):
        e.check_bytes(4 * size**2, f"The matrix of an axis of {size:,}")
        return e.const(np.eye(size, dtype=np.float32))
    index = arange(e, size)
    return e.cast(e.compare("Equal", e.unsqueeze(index, [1]), index), ir.DataType.FLOAT)


def _rounded(e: Emitter, scales: ir.Value, position: int, size: Dim) -> bool:
    """Whether scales that the graph computes must not become constants.

    ONNX infers sizes from constant scales in double precision, but the runtime rounds the products to float32.
    """
    constant = e.constant_of(scales)
    if constant is None or is_constant(scales) or not isinstance(size, int):
        return False
    return int(np.float32(constant[position]) * np.float32(size)) != int(float(constant[position]) * size)


def _place(e: Emitter, vector: ir.Value, position: int, lead: ir.Value, *, computed: bool = False) -> ir.Value:
    """`lead` followed by one entry of a vector: a constant if both are known, unless `computed`."""
    constant, front = None if computed else e.constant_of(vector), e.constant_of(lead)
    if constant is not None and front is not None:
        return e.const(np.append(front, constant[position : position + 1]).astype(constant.dtype))
    return e.op("Concat", lead, e.op("Slice", vector, e.ints([position]), e.ints([position + 1]), e.ints([0])), axis=0)


def _roi(e: Emitter, n: Call, resized: ResizedAxes, positions: list[int], lead: int) -> ir.Value | None:
    """The region of interest of some axes, after `lead` axes that are kept whole; one coordinate mode uses it."""
    roi = n.get("roi")
    if roi is None or n.string("coordinate_transformation_mode", "half_pixel") != _CROP:
        return None
    dtype = roi.dtype or ir.DataType.FLOAT
    count = len(resized.axes)
    starts = e.op("Gather", roi, e.ints(positions), axis=0)
    ends = e.op("Gather", roi, e.ints(count + p for p in positions), axis=0)
    if not lead:
        return e.op("Concat", starts, ends, axis=0)
    return e.op("Concat", e.const(np.zeros(lead), dtype), starts, e.const(np.ones(lead), dtype), ends, axis=0)
