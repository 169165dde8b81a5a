"""Resize: separable and, but for a constant, linear in X: y = A_1 x_1 A_2 x_2 ..., one matrix per resized axis.

    y[.., p, ..] = sum over q of A[p, q] x[.., q, ..]      dx[.., q, ..] = sum over p of A[p, q] g[.., p, ..]

The matrix is not computed here. Its columns are what the operator itself makes of the unit vectors, so a small Resize
of an identity gives it with the execution provider's own arithmetic: the rounding that decides which element is
nearest, the coordinate modes, cubic and antialiasing filters, for sizes known only at run time too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Cotangents, vjp
from onnx_convgrad.errors import require
from onnx_convgrad.ir.broadcasting import shapes_differ
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.emit import Dim, Emitter, dims_equal, known
from onnx_convgrad.rules.resize_products import contract, contract_unranked, sum_blocks, weigh_windows

_FILTER = ("mode", "nearest_mode", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "antialias")
_CROP = "tf_crop_and_resize"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The axes that one node may resize, and for each its position in `roi`, `scales` and `sizes`."""

    rank: int | None
    axes: tuple[int, ...]
    scales: ir.Value | None
    sizes: ir.Value | None

    @classmethod
    def of(cls, e: Emitter, n: Call) -> Geometry:
        scales, sizes = n.get("scales"), n.get("sizes")
        if scales is not None and e.constant_of(scales) is not None and e.constant_of(scales).size == 0:  # type: ignore[union-attr]
            scales = None  # an empty tensor stands for an absent one in old models
        given = scales if scales is not None else sizes
        require(given is not None, "it has neither scales nor sizes.")
        assert given is not None
        axes, sizes = n.ints("axes"), sizes if scales is None else None
        rank = _rank(e, n, given)
        if axes is None:
            return cls(rank, tuple(range(rank or 0)), scales, sizes)
        return cls(rank, tuple(a % rank if rank else a for a in axes), scales, sizes)

    def copying(self, e: Emitter, n: Call) -> Geometry:
        """The same, but with scale 1 if no size changes: the runtime then copies, whatever the scales."""
        if self.scales is None:
            return self  # equal sizes mean scale 1, or the matrix is made from all sizes together
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


def _rank(e: Emitter, n: Call, given: ir.Value) -> int | None:
    """The rank of X, or `None` where `axes` makes do without it."""
    for value in (n["X"], n.y):
        if value.shape is not None:
            return len(value.shape)
    axes = n.ints("axes")
    if axes is not None and min(axes) >= 0:
        return None
    if axes is None:  # then there is one entry per axis
        if (constant := e.constant_of(given)) is not None:
            return int(constant.size)
        if given.shape is not None and (count := known(given.shape[0])) is not None:
            return count
    return e.rank(n["X"])


@vjp("Resize", wrt=("X",), note="roi and scales get no gradient")  # not linear: the extrapolation value is added
def resize_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[.., p, ..] = sum over q of A[p, q] x[.., q, ..] on each axis: dx[q] = sum over p of A[p, q] g[p]."""

    def x_grad() -> ir.Value:
        x, gx = n["X"], g["Y"]
        if x.shape is not None and 0 in list(x.shape):
            return e.zeros_like(x)
        geometry = Geometry.of(e, n)
        repeats: dict[int, int] = {}
        general: list[int] = []
        for position, axis in enumerate(geometry.axes):
            times = _repeats(e, n, geometry, position)
            if times is None:
                general.append(position)
            elif times > 1:
                repeats[axis] = times
        geometry = geometry.copying(e, n) if general else geometry
        if geometry.rank is None:
            for position, axis in enumerate(geometry.axes):
                gx = contract_unranked(e, gx, _matrix(e, n, geometry, position, e.dim(gx, axis)), axis)
            return e.typed(gx, x)
        sizes: list[Dim] = [e.dim(g["Y"], axis) for axis in range(geometry.rank)]
        for position in reversed(general):  # the last axis needs no reshaping, and the first step costs most
            axis = geometry.axes[position]
            factor = _smooth_factor(e, n, geometry, position, sizes[axis])
            if factor is not None:
                gx = weigh_windows(e, gx, factor, axis, sizes)
            else:
                matrix = _matrix(e, n, geometry, position, sizes[axis])
                gx = contract(e, gx, matrix, axis, sizes, e.dim(x, axis))
        if repeats:
            gx = sum_blocks(e, gx, repeats, sizes)
        return e.typed(gx, x)

    return {"X": x_grad}


def by_matrices(e: Emitter, n: Call) -> ir.Value | None:
    """y as products with the matrices, the last axis first; for known sizes but that of the batch, else `None`."""
    x, y = n["X"], n.y
    if x.shape is None or y.shape is None or n.string("coordinate_transformation_mode", "half_pixel") == _CROP:
        return None
    geometry, sizes, wanted = Geometry.of(e, n), e.dims(x), e.dims(y)
    if geometry.rank is None or not all(isinstance(size, int) and size for size in (*sizes[1:], *wanted[1:])):
        return None
    result = x
    for position, axis in reversed(list(enumerate(geometry.axes))):
        if _repeats(e, n, geometry, position) != 1:
            if axis == 0:
                return None
            matrix = e.transpose(_matrix(e, n, geometry, position, wanted[axis]), [1, 0])
            result = contract(e, result, matrix, axis, sizes, wanted[axis])
    return result


def whole_factors(e: Emitter, n: Call) -> list[int] | None:
    """How often each element is repeated along every axis, if that is all."""
    geometry = Geometry.of(e, n)
    if geometry.rank is None:
        return None
    times = [1] * geometry.rank
    for position, axis in enumerate(geometry.axes):
        found = _repeats(e, n, geometry, position)
        if found is None:
            return None
        times[axis] = found
    return times


def _repeats(e: Emitter, n: Call, geometry: Geometry, position: int) -> int | None:
    """How often each element is simply repeated along an axis (1: the axis is kept), or `None` for a general matrix."""
    axis = geometry.axes[position]
    policy = n.string("keep_aspect_ratio_policy", "stretch")
    if _fixed(n, geometry, axis, policy):
        return 1
    if geometry.scales is not None:
        scales = e.constant_of(geometry.scales)
        ratio = None if scales is None else float(scales[position])
    else:
        if policy != "stretch":
            return None
        ratio = _ratio(e, n, geometry, position)
    if ratio == 1:
        return 1
    if ratio is None or ratio != int(ratio) or n.string("mode", "nearest") != "nearest":
        return None
    coordinates = n.string("coordinate_transformation_mode", "half_pixel")
    rounding = n.string("nearest_mode", "round_prefer_floor")
    # p / k, (p + 1/2) / k and (p + 1/2) / k - 1/2 for p = k m + r stay far from the next rounding boundary
    block = {"asymmetric": ("floor",), "tf_half_pixel_for_nn": ("floor",)}
    centred = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
    allowed = ("round_prefer_floor", "round_prefer_ceil") if coordinates in centred else block.get(coordinates, ())
    return int(ratio) if rounding in allowed else None


_LONG = 128
"""Elements of an axis from which on a product with its matrix takes longer than a sum over few taps."""


def _smooth_factor(e: Emitter, n: Call, geometry: Geometry, position: int, out: Dim) -> int | None:
    """By which power of two a long axis is enlarged linearly, the weights being the same all along it.

    For other factors the runtime's coordinates are rounded, and the weights with them.
    """
    x, axis = n["X"], geometry.axes[position]
    size = None if x.shape is None else known(x.shape[axis])
    centred = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
    if n.string("mode", "nearest") != "linear" or x.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return None
    if n.string("coordinate_transformation_mode", "half_pixel") not in centred or size is None or size < _LONG:
        return None
    if n.int("antialias", 0) or (
        geometry.sizes is not None and n.string("keep_aspect_ratio_policy", "stretch") != "stretch"
    ):
        return None
    scales = e.constant_of(geometry.scales)
    ratio = float(scales[position]) if scales is not None else _ratio(e, n, geometry, position)
    return int(ratio) if ratio in (2, 4, 8, 16) and out == size * int(ratio) else None


def _fixed(n: Call, geometry: Geometry, axis: int, policy: str) -> bool:
    """Whether the runtime refuses anything but scale 1: linear and cubic modes resize spatial axes only."""
    rank = geometry.rank or 0
    if n.string("mode", "nearest") == "nearest" or rank < 4:
        return False
    common = policy != "stretch" and geometry.sizes is not None and 0 in geometry.axes  # one scale for all axes
    return common or axis == 0 or (axis == 1 and rank == 5)


def _ratio(e: Emitter, n: Call, geometry: Geometry, position: int) -> float | None:
    """Output size over input size where it is known while building; 1 for axes that are certainly of equal size."""
    x, y, axis = n["X"], n.y, geometry.axes[position]
    sizes = e.constant_of(geometry.sizes)
    wanted = None if sizes is None else int(sizes[position])
    have = None if x.shape is None else known(x.shape[axis])
    if wanted is not None and have:
        return wanted / have
    if _copied(e, geometry.sizes, x, axis, position):
        return 1.0
    return 1.0 if x.shape is not None and y.shape is not None and dims_equal(x.shape[axis], y.shape[axis]) else None


def _copied(e: Emitter, sizes: ir.Value | None, x: ir.Value, axis: int, position: int) -> bool:
    """Whether `sizes` is a Concat whose leading part is cut from the shape of x, as exporters write it."""
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
    """One operand of a Slice of a vector: start, end, axis (0), step (1)."""
    if value is None:
        return (None, None, 0, 1)[position]
    number = e.number_of(value)
    return None if number is None else int(number)


# -- the interpolation matrix ------------------------------------------------------------------------------------------


def _matrix(e: Emitter, n: Call, geometry: Geometry, position: int, out: Dim) -> ir.Value:
    """A transposed, [input size, output size], of X's dtype: Resize of the unit vectors of one axis."""
    x, axis = n["X"], geometry.axes[position]
    size = e.dim(x, axis)
    attributes: dict[str, Any] = {k: v for k, v in n.attributes().items() if k in _FILTER}
    if n.string("keep_aspect_ratio_policy", "stretch") != "stretch" and geometry.sizes is not None:
        units = _resize_all(e, n, geometry, position, attributes)
    else:
        # an axis of one element is doubled beside it, so that some size changes: the runtime would copy otherwise
        basis = e.reshape(_identity(e, size), [1, size, 1, size])
        roi = _roi(e, n, geometry, [position], lead=3)
        if geometry.scales is not None:
            lead = e.const(np.array([1, 1, 2], np.float32))
            scales = _place(e, geometry.scales, position, lead, computed=_rounded(e, geometry.scales, position, size))
            units = e.op("Resize", basis, roi, scales, **attributes)
        else:
            assert geometry.sizes is not None
            sizes = _place(e, geometry.sizes, position, e.vector([1, size, 2]))
            units = e.op("Resize", basis, roi, None, sizes, **attributes)
        units = e.op("Slice", units, e.ints([0]), e.ints([1]), e.ints([2]))
    matrix = e.op("Reshape", units, e.vector([size, out]), allowzero=1)
    return e.cast(matrix, x.dtype or ir.DataType.FLOAT)


def _resize_all(e: Emitter, n: Call, geometry: Geometry, position: int, attributes: dict[str, Any]) -> ir.Value:
    """The same where the aspect ratio is kept: the scale of one axis then depends on the sizes of all.

    The unit vectors of the axis are repeated along the other resized axes, which interpolation leaves constant.
    """
    assert geometry.sizes is not None
    count = len(geometry.axes)
    sizes = [e.dim(n["X"], axis) for axis in geometry.axes]
    own = sizes[position]
    pad = [1] if count == 1 else []
    rows: list[Dim] = [1, own, *pad, *(own if i == position else 1 for i in range(count))]
    basis = e.op("Expand", e.reshape(_identity(e, own), rows), e.vector([1, own, *pad, *sizes]))
    axes = tuple(range(2 + len(pad), 2 + len(pad) + count))
    policy = n.string("keep_aspect_ratio_policy", "stretch")
    roi = _roi(e, n, geometry, list(range(count)), lead=0)
    units = e.op("Resize", basis, roi, None, geometry.sizes, **attributes, axes=axes, keep_aspect_ratio_policy=policy)
    others = [a for i, a in enumerate(axes) if i != position]
    return e.slice(units, [0] * len(others), [1] * len(others), others) if others else units


def _identity(e: Emitter, size: Dim) -> ir.Value:
    """A float32 identity matrix: the only type that every provider resizes."""
    if isinstance(size, int):
        return e.const(np.eye(size, dtype=np.float32))
    count = e.op("Squeeze", size, e.ints([0]))
    index = e.op("Range", e.const(np.int64(0)), count, e.const(np.int64(1)))
    return e.cast(e.compare("Equal", e.unsqueeze(index, [1]), index), ir.DataType.FLOAT)


def _rounded(e: Emitter, scales: ir.Value, position: int, size: Dim) -> bool:
    """Whether scales that the graph computes must stay computed.

    From constants ONNX infers sizes in double precision, and the runtime rounds its products to float32.
    """
    constant = e.constant_of(scales)
    if constant is None or is_constant(scales) or not isinstance(size, int):
        return False
    return int(np.float32(constant[position]) * np.float32(size)) != int(float(constant[position]) * size)


def _place(e: Emitter, vector: ir.Value, position: int, lead: ir.Value, *, computed: bool = False) -> ir.Value:
    """`lead` followed by one entry of a vector, which may be known and yet be wanted `computed`."""
    constant, front = None if computed else e.constant_of(vector), e.constant_of(lead)
    if constant is not None and front is not None:
        return e.const(np.append(front, constant[position : position + 1]).astype(constant.dtype))
    return e.op("Concat", lead, e.op("Slice", vector, e.ints([position]), e.ints([position + 1]), e.ints([0])), axis=0)


def _roi(e: Emitter, n: Call, geometry: Geometry, positions: list[int], lead: int) -> ir.Value | None:
    """The region of interest of some axes, after `lead` axes that are kept whole; only one coordinate mode reads it."""
    roi = n.get("roi")
    if roi is None or n.string("coordinate_transformation_mode", "half_pixel") != _CROP:
        return None
    dtype = roi.dtype or ir.DataType.FLOAT
    count = len(geometry.axes)
    starts = e.op("Gather", roi, e.ints(positions), axis=0)
    ends = e.op("Gather", roi, e.ints(count + p for p in positions), axis=0)
    if not lead:
        return e.op("Concat", starts, ends, axis=0)
    return e.op("Concat", e.const(np.zeros(lead), dtype), starts, e.const(np.ones(lead), dtype), ends, axis=0)
