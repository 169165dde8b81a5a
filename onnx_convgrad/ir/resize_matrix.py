"""The matrix that resizes one axis, as the runtime computes it: whole, in blocks around its diagonal, or by its entries.

Its columns are the results of the operator for unit vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import require
from onnx_convgrad.ir.broadcasting import shapes_differ
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.emit import Dim, Emitter, known
from onnx_convgrad.ir.scatter import scatter

_FILTER = ("mode", "nearest_mode", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "antialias")
CROP = "tf_crop_and_resize"


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
        """These axes with scale 1 if no size changes: the runtime then copies x, whatever the scales are."""
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


# -- the whole matrix -------------------------------------------------------------------------------------------------


def matrix_of(e: Emitter, n: Call, resized: ResizedAxes, position: int, out: Dim) -> ir.Value:
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
    """These axes if the aspect ratio is kept: the scale of one axis then depends on the sizes of all.

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


def blocks_of(e: Emitter, n: Call, resized: ResizedAxes, position: int, out: Dim) -> tuple[ir.Value, ir.Value] | None:
    """The matrix of a long axis in blocks around its diagonal; `None` for other axes.

    Block k maps the outputs `rows[k]` to b inputs, from input k b on: matrices [blocks, rows, b] and rows [blocks, rows].

    See `_combs`, which take the place of all unit vectors.
    """
    x, axis = n["X"], resized.axes[position]
    size = e.dim(x, axis)
    if not isinstance(size, int) or not isinstance(out, int) or size <= LONG or not out:
        return None
    policy = n.string("keep_aspect_ratio_policy", "stretch") != "stretch" and resized.sizes is not None
    if policy or n.string("coordinate_transformation_mode", "half_pixel") == CROP:
        return None  # places depend on more than the two sizes
    ratio = size / out
    near = 2 * max(ratio, 1) if n.int("antialias", 0) else 2
    reach = math.ceil(near) + 2 + (size >> 22)  # in inputs around m, which is rounded to float32
    w = 2 * reach + 1
    b = w * max(96 // w, 1)
    count = -(-size // b)
    attributes = {k: v for k, v in n.attributes().items() if k in _FILTER}
    units = _resize_rows(e, n, resized, position, e.concat(_combs(e, size, w), 0), w + 1, attributes)
    units = e.transpose(e.reshape(units, [w + 1, out]), [1, 0])
    # places differ from p size / out by less than `slack` in every coordinate mode
    slack = 2 + 2 * max(ratio, 1) + reach
    height = min(math.ceil((b + 2 * slack) / ratio) + 2, out)
    first = np.floor((np.arange(count) * b - slack) / ratio).astype(np.int64) - 1
    rows = e.op("Add", e.const(first.clip(0, out - height)[:, None]), e.arange(height))
    entries = e.gather(units, rows, axis=0)  # [count, height, w + 1]
    found, place = e.slice(entries, [0], [w], [2]), e.slice(entries, [w], [w + 1], [2])
    found = e.op("Expand", e.unsqueeze(found, [2]), e.ints([count, height, b // w, w]))
    inputs = e.cast(e.reshape(e.arange(count * b), [count, 1, b]), ir.DataType.FLOAT)
    close = e.compare("LessOrEqual", e.op("Abs", e.sub(inputs, place)), float(reach))
    matrices = e.where(close, e.reshape(found, [count, height, b]), 0)
    return e.cast(matrices, x.dtype or ir.DataType.FLOAT), rows


LONG = 4096
"""Largest size of an axis for which the matrix of a Resize is computed as a whole."""


# -- the matrix by its entries -----------------------------------------------------------------------------------------

ROUNDED = 2**23
"""Most outputs of an axis whose coordinates the runtime, in float32, does not round to other numbers."""

_MOST_ENTRIES = 2**26
"""Most entries of a matrix that are computed all; of larger ones only those that are not zero."""

_DIGIT = 2**12
"""Base in which positions below its square have two digits, which float32 holds exactly."""


def is_sparse(e: Emitter, n: Call, resized: ResizedAxes, position: int, out: Dim) -> bool:
    """Whether an axis is, or may be, too long for a matrix."""
    if (
        n.int("antialias", 0)
        or n.string("coordinate_transformation_mode", "half_pixel") == CROP
        or (n.string("keep_aspect_ratio_policy", "stretch") != "stretch" and resized.sizes is not None)
    ):
        return False
    size, signal = e.dim(n["X"], resized.axes[position]), resized.rank == 3
    if isinstance(size, int) and isinstance(out, int):
        return out * min(size, LONG) > _MOST_ENTRIES
    return signal or (isinstance(size, int) and size > LONG)  # of images, both axes are short


def scattered(e: Emitter, n: Call, resized: ResizedAxes, position: int, g: ir.Value, sizes: list[Dim]) -> ir.Value:
    """The cotangent before the resizing of one axis: each entry of g, times its weights, added where it comes from.

    Updates `sizes`, the dimensions of g.
    """
    axis = resized.axes[position]
    size, out = e.dim(n["X"], axis), sizes[axis]
    before, after = e.size_mul(1, *sizes[:axis]), e.size_mul(1, *sizes[axis + 1 :])
    v = e.reshape(g, [before, 1, out, after])
    if n.string("mode", "nearest") == "nearest":
        where = _nearest(e, n, resized, position, out)
    else:
        where, weights = _entries(e, n, resized, position, out)
        v = e.mul(v, e.unsqueeze(e.cast(weights, v.dtype or ir.DataType.FLOAT), [2]))
    terms: list[Dim] = [before, e.size_mul(e.dim(where, 0), out), after]
    places = e.op("Expand", e.reshape(where, [1, terms[1], 1]), e.vector(terms))
    zeros = e.op("Expand", e.scalar(0, v), e.vector([before, size, after]))
    sizes[axis] = size
    return e.reshape(scatter(e, zeros, places, e.reshape(v, terms), 1, "add"), sizes)


def _nearest(e: Emitter, n: Call, resized: ResizedAxes, position: int, out: Dim) -> ir.Value:
    """The number of the input that each output of an axis copies, [1, out]: a Resize of the inputs' numbers."""
    index = e.arange(e.dim(n["X"], resized.axes[position]))
    digit = e.ints([_DIGIT])
    digits = [e.unsqueeze(e.cast(e.op(op, index, digit), ir.DataType.FLOAT), [0]) for op in ("Div", "Mod")]
    high, low = _resized_rows(e, n, resized, position, digits, out)
    return e.op("Add", e.op("Mul", e.cast(high, ir.DataType.INT64), digit), e.cast(low, ir.DataType.INT64))


def _entries(e: Emitter, n: Call, resized: ResizedAxes, position: int, out: Dim) -> tuple[ir.Value, ir.Value]:
    """Inputs near the place of each output, and their weights: [w, out]. See `_combs`."""
    size, w = e.dim(n["X"], resized.axes[position]), 2 * _REACH + 1
    *found, place = _resized_rows(e, n, resized, position, _combs(e, size, w), out)
    start = e.cast(e.unsqueeze(e.arange(w), [1]), ir.DataType.FLOAT)
    near = e.add(e.mul(e.op("Round", e.div(e.sub(place, start), w)), w), start)
    inside = e.op("Max", e.op("Min", e.cast(near, ir.DataType.INT64), e.vector([e.size_sub(size, 1)])), e.ints([0]))
    return inside, e.concat(found, 0)


def _resized_rows(
    e: Emitter, n: Call, resized: ResizedAxes, position: int, rows: Sequence[ir.Value], out: Dim
) -> list[ir.Value]:
    """Rows [k, size], each resized like one axis, as rows [1, out]."""
    counts = [e.dim(row, 0) for row in rows]
    count = sum(c for c in counts if isinstance(c, int))
    attributes = {k: v for k, v in n.attributes().items() if k in _FILTER}
    units = e.reshape(_resize_rows(e, n, resized, position, e.concat(rows, 0), count, attributes), [count, out])
    return [e.slice(units, [k], [k + 1], [0]) for k in range(count)]


def _combs(e: Emitter, size: Dim, w: int) -> list[ir.Value]:
    """Sums of the unit vectors that are w inputs apart, [w, size], and a ramp, [1, size].

    An output reads only inputs near its place, which is the resized ramp. So of each comb it reads one unit vector.
    """
    index = e.arange(size)
    combs = e.compare("Equal", e.op("Mod", index, e.ints([w])), e.unsqueeze(e.arange(w), [1]))
    return [e.cast(combs, ir.DataType.FLOAT), e.unsqueeze(e.cast(index, ir.DataType.FLOAT), [0])]


_REACH = 4
"""Largest distance of inputs that an output reads, without antialiasing; 2 of it are for roundings."""


def _identity(e: Emitter, size: Dim) -> ir.Value:
    """An identity matrix, in float32: the only dtype that every runtime resizes."""
    if isinstance(size, int):
        e.check_bytes(4 * size**2, f"The matrix of an axis of {size:,}")
        return e.const(np.eye(size, dtype=np.float32))
    index = e.arange(size)
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
    if roi is None or n.string("coordinate_transformation_mode", "half_pixel") != CROP:
        return None
    dtype = roi.dtype or ir.DataType.FLOAT
    count = len(resized.axes)
    starts = e.gather(roi, e.ints(positions), axis=0)
    ends = e.gather(roi, e.ints(count + p for p in positions), axis=0)
    if not lead:
        return e.op("Concat", starts, ends, axis=0)
    return e.op("Concat", e.const(np.zeros(lead), dtype), starts, e.const(np.ones(lead), dtype), ends, axis=0)
