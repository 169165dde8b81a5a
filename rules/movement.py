"""Adjoints of data movement, for the rules of slicing and indexing.

    y[j] = x[p(j)]    dx[i] = sum of g[j] over all j with p(j) = i

Whatever moves data moves the numbers 0, 1, 2, ... as well, and these then say where each element came from: an operator
applied to `positions(x)` gives p itself, at run time and for any rank.

Sums over repeated positions use ScatterElements. ScatterND with `reduction=add` would need no expanded indices, but
ONNX Runtime's CPU provider runs it on several threads that overwrite each other's sums where an index repeats.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter, static_dims

_NARROW = frozenset((ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
_FLAT = (-1,)


def arange(e: Emitter, count: Dim, step: int = 1) -> ir.Value:
    """`0, step, 2 step, ...`: `count` int64 numbers."""
    if isinstance(count, int) and count <= 4096:
        return e.const(np.arange(count, dtype=np.int64) * step)
    last = e.size_mul(count, step)
    limit = e.const(np.int64(last)) if isinstance(last, int) else e.op("Squeeze", last, e.ints([0]))
    return e.op("Range", e.const(np.int64(0)), limit, e.const(np.int64(step)))


def extent(e: Emitter, value: ir.Value, start: int, stop: int | None = None) -> Dim:
    """Product of the dimensions `start:stop`; the rank need not be known."""
    dims = static_dims(value)
    part = None if dims is None else dims[start:stop]
    if part is not None and None not in part:
        return math.prod(d for d in part if d is not None)
    return e.op("ReduceProd", e.op("Shape", value, start=start or None, end=stop), keepdims=1)


def positions(e: Emitter, x: ir.Value) -> ir.Value:
    """The position of each element of `x` in row-major order, as an int64 tensor of the shape of `x`."""
    numbers = e.op("Range", e.const(np.int64(0)), e.op("Size", x), e.const(np.int64(1)))
    result = e.op("Reshape", numbers, e.shape(x), allowzero=1)
    result.dtype = ir.DataType.INT64
    result.shape = x.shape
    return result


def flatten(e: Emitter, value: ir.Value) -> ir.Value:
    """All elements in a row."""
    dims = static_dims(value)
    return value if dims is not None and len(dims) == 1 else e.op("Reshape", value, e.ints(_FLAT))


def zeros(e: Emitter, shape: ir.Value, like: ir.Value) -> ir.Value:
    """Zeros of a run-time shape and of the dtype of `like`."""
    return e.op("Expand", e.scalar(0, like), shape)


def scatter(
    e: Emitter, data: ir.Value, indices: ir.Value, updates: ir.Value, axis: int, reduction: str = "none"
) -> ir.Value:
    """ScatterElements; half precision is reduced in single, for want of a kernel and for the sake of long sums."""
    narrow = updates.dtype if reduction != "none" and updates.dtype in _NARROW else None
    a, b = (e.cast(v, ir.DataType.FLOAT) if narrow else v for v in (data, updates))
    result = e.op("ScatterElements", a, indices, b, axis=axis, reduction=None if reduction == "none" else reduction)
    return e.typed(e.cast(result, narrow) if narrow else result, data)


def scatter_add(e: Emitter, like: ir.Value, indices: ir.Value, g: ir.Value, axis: int) -> ir.Value:
    """Sums of `g` at `indices` along `axis` (both of one shape) in zeros of the shape of `like`."""
    return scatter(e, e.zeros_like(like), indices, g, axis, "add")


def adds_windows(e: Emitter, g: ir.Value) -> bool:
    """Whether the target has the kernel that `add_windows` is made of, for numbers such as `g`."""
    return g.dtype == ir.DataType.FLOAT and "Col2Im" not in e.target.missing


def add_windows(
    e: Emitter, g: ir.Value, before: Dim, after: int, *, taps: Dim, tap: int, starts: Dim, step: int = 1
) -> ir.Value:
    """The sums of `g[b, i, j, a]` at `[b, tap i + step j, a]`, as many rows as they reach: Col2Im adds many at a time."""
    far = [e.size_mul(e.size_sub(count, 1), by) for count, by in ((taps, tap), (starts, step))]
    span = e.size_add(e.size_add(far[0], far[1]), 1)
    last = after == 1  # the windows lie along the image's rows
    image = e.op(
        "Col2Im",
        e.op("Reshape", g, e.vector([before, taps, e.size_mul(starts, after)]), allowzero=1),
        e.vector([1, span] if last else [span, after]),
        e.vector([1, taps] if last else [taps, 1]),
        strides=[1, step] if last else [step, 1],
        dilations=[1, tap] if last else [tap, 1],
    )
    return e.op("Reshape", image, e.vector([before, span, after]), allowzero=1)


def scatter_positions(e: Emitter, x: ir.Value, where: ir.Value, g: ir.Value, *, unique: bool = False) -> ir.Value:
    """Sums of `g` at the row-major positions `where` of a tensor of the shape of `x`. `unique`: none repeats."""
    flat = zeros(e, e.op("Reshape", e.op("Size", x), e.ints([1])), g)
    if g.dtype is not None:
        flat.dtype = g.dtype
    result = scatter(e, flat, flatten(e, where), flatten(e, g), 0, "none" if unique else "add")
    return e.reshape_like(result, x)


def adjoint_by_positions(
    e: Emitter, move: Callable[[ir.Value], ir.Value], x: ir.Value, g: ir.Value, *, unique: bool = False
) -> ir.Value:
    """The cotangent of `x` under `y = move(x)`, for any operator that only copies elements."""
    return scatter_positions(e, x, move(positions(e, x)), g, unique=unique)
