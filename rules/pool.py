"""Pools over windows and over whole images, the abstract gradient of MaxPool, and MaxUnpool.

The adjoint of a sum over windows is the data gradient of a convolution with a kernel of ones. `lowering.pool` computes
MaxPoolGrad, by the indices or without them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import MEAN, having, mix, notation, pick, reduced
from onnx_convgrad.autodiff.registry import linear, vjp
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import input_grad
from onnx_convgrad.ir.emit import DOMAIN, Dim, Emitter
from onnx_convgrad.ir.geometry import Window
from onnx_convgrad.ir.maxima import windows_of, winners_of
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.pooling import Pool, valid_taps
from onnx_convgrad.ir.repeat import repeat_elements
from onnx_convgrad.ir.scatter import scatter, scatter_to_maxima
from onnx_convgrad.ir.sliding_means import counted_padding, sliding_means_are_fast
from onnx_convgrad.rules.movement import survive

_MOST_TAPS = 1024
"""Most taps of a window that one convolution sums."""

_LISTED = 2**22
"""Most windows for which one constant holds the number of taps of each."""

# -- geometry ----------------------------------------------------------------------------------------------------------


def _padding(e: Emitter, pool: Pool, size: Dim, axis: int) -> tuple[Dim, Dim]:
    """The padding in front of and behind an axis; for `auto_pad=SAME_*` see `ir.pooling.same_pool_padding`."""
    if pool.pads is not None:
        return pool.pads[axis]
    s = pool.strides[axis]
    windows = e.size_div(e.size_add(size, s - 1), s)
    total = e.size_sub(e.size_add(e.size_mul(e.size_sub(windows, 1), s), pool.kernel[axis]), size)
    low = e.size_div(total if pool.auto_pad == "SAME_UPPER" else e.size_add(total, 1), 2)
    return low, e.size_sub(total, low)


# -- the adjoint of a sum over windows ---------------------------------------------------------------------------------


def window_sum_grad(e: Emitter, pool: Pool, gy: ir.Value, x: ir.Value, weight: float = 1.0) -> ir.Value:
    """gx[n, c, q] = weight * sum over the windows p that contain q of gy[n, c, p], of the shape of x.

    The channels are merged with the batch, so that one kernel of ones serves all and their number may be unknown.
    """
    if pool.tiles:
        return _tile(e, pool, e.mul(gy, weight), x)
    if _slides(e, pool, x):
        return e.typed(e.mul(_means(e, pool, gy), weight * math.prod(pool.kernel)), x)
    rank = pool.rank
    if math.prod(pool.kernel) > _MOST_TAPS and sum(k > 1 for k in pool.kernel) > 1:
        return _axis_by_axis(e, pool, e.mul(gy, weight), x)
    flat = [e.size_mul(e.dim(x, 0), e.dim(x, 1)), 1]
    outer = [e.dim(gy, 2 + axis) for axis in range(rank)]
    e.check_bytes(8 * math.prod(pool.kernel), f"A window of {math.prod(pool.kernel):,} taps")
    ones = e.const(np.full((1, 1, *pool.kernel), weight), x.dtype or ir.DataType.FLOAT)
    rows = e.reshape(gy, [*flat, *outer])
    counts = [pool.windows(axis) for axis in range(rank)]
    if pool.pads is not None and (not pool.ceil or None not in counts):
        end = tuple(_end(pool, axis) for axis in range(rank))
        win = Window(pool.strides, pool.dilations, tuple(low for low, _ in pool.pads), end, 1)
        like = e.reshape(x, [*flat, *(e.dim(x, 2 + axis) for axis in range(rank))])
        return e.reshape_like(input_grad(e, rows, ones, like, win), x)
    # the padding or the number of windows is known only at run time: compute the rows that the windows cover, then pad
    covered = [
        e.size_add(e.size_mul(e.size_sub(o, 1), pool.strides[axis]), pool.span(axis)) for axis, o in enumerate(outer)
    ]
    like = e.op("Expand", e.scalar(0, x), e.vector([*flat, *covered]))
    win = Window(pool.strides, pool.dilations, (0,) * rank, (0,) * rank, 1)
    full = input_grad(e, rows, ones, like, win)
    before, after = [], []
    for axis in range(rank):
        size = e.dim(x, 2 + axis)
        low = _padding(e, pool, size, axis)[0]
        before.append(e.size_sub(0, low))
        after.append(e.size_sub(e.size_add(size, low), covered[axis]))
    return e.reshape_like(e.pad(full, before, after, list(range(2, 2 + rank))), x)


def _axis_by_axis(e: Emitter, pool: Pool, gy: ir.Value, x: ir.Value) -> ir.Value:
    """The adjoint for large windows, over one axis after the other, which takes far fewer products."""
    dims = [*e.dims(gy)]
    sizes = [pool.windows(axis) for axis in range(pool.rank)]
    for axis in range(pool.rank):

        def one(values: tuple[int, ...], axis: int = axis) -> tuple[int, ...]:
            return tuple(value if i == axis else 1 for i, value in enumerate(values))

        sizes[axis] = pool.sizes[axis]
        pads = None if pool.pads is None else tuple(p if i == axis else (0, 0) for i, p in enumerate(pool.pads))
        along = Pool(
            one(pool.kernel), one(pool.strides), one(pool.dilations), tuple(sizes), pads, pool.auto_pad, pool.ceil
        )
        dims[2 + axis] = e.dim(x, 2 + axis)
        like = e.typed(e.op("Expand", e.scalar(0, x), e.vector(dims)), gy)
        like.shape = ir.Shape([d if isinstance(d, int) else None for d in dims])
        gy = window_sum_grad(e, along, gy, like)
    return e.typed(gy, x)


def _slides(e: Emitter, pool: Pool, x: ir.Value) -> bool:
    """Whether windows start at every row and none lies in the padding alone, so that a sliding mean is its own adjoint."""
    if set(pool.strides) | set(pool.dilations) != {1} or pool.ceil or pool.pads is None or x.shape is None:
        return False
    inside = all(0 <= pad < k for pads, k in zip(pool.pads, pool.kernel, strict=True) for pad in pads)
    return inside and sliding_means_are_fast(e, pool, x)


def _means(e: Emitter, pool: Pool, gy: ir.Value) -> ir.Value:
    """The mean of gy over the windows that contain each element, counting zeros outside: again an AveragePool."""
    begin, end = ([k - 1 - pads[i] for pads, k in zip(pool.pads or (), pool.kernel, strict=True)] for i in range(2))
    gy, pads = counted_padding(e, gy, begin, end)
    return e.op("AveragePool", gy, kernel_shape=pool.kernel, pads=pads, count_include_pad=1)


def _end(pool: Pool, axis: int) -> int:
    """End padding with which a convolution has as many windows as the pool, which may round their number up."""
    assert pool.pads is not None
    high, excess = pool.pads[axis][1], pool.excess(axis)
    return high if excess is None or -pool.strides[axis] < excess <= 0 else high + excess


def _tile(e: Emitter, pool: Pool, gy: ir.Value, x: ir.Value) -> ir.Value:
    """For windows that tile the input: repeat every row of gy, and pad with zeros where there is no window."""
    rank = pool.rank
    outer = [e.dim(gy, 2 + axis) for axis in range(rank)]
    merged = [e.size_mul(o, k) for o, k in zip(outer, pool.kernel, strict=True)]
    grown = repeat_elements(e, gy, [1, 1, *pool.kernel])
    if set(pool.strides) != {1}:
        missing = [e.size_sub(e.dim(x, 2 + axis), m) for axis, m in enumerate(merged)]
        grown = e.pad(grown, [0] * rank, missing, list(range(2, 2 + rank)))
    return e.typed(grown, x)


# -- AveragePool, LpPool -----------------------------------------------------------------------------------------------


_MOST_HALF = 2**14
"""Largest window whose reciprocal float16 holds with all its digits; means over larger ones are taken in float32."""

_POOLS = mix("pools along")
_POOLED = notation("n c *s -> n c *p", s=_POOLS, p=_POOLS)


def _counted(n: Call) -> str:
    """Padding counts as zeros, or not at all."""
    return "zero" if n.int("count_include_pad", 0) else "operands"


@linear("AveragePool", wrt="X", factors=_POOLED, within=_counted, nonnegative=True)
def average_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[p] = sum over t of x[s p + d t - pad] / count[p]: dx[q] = sum over windows p that contain q of g[p] / count[p]."""
    x, gy = n["X"], g["Y"]
    pool = Pool.of(n, x)
    counts = [_counts(e, pool, n, x, axis) for axis in range(pool.rank)]
    weight = 1 / math.prod(c for c in counts if isinstance(c, int))
    if math.prod(pool.kernel) > _MOST_HALF:
        x, gy = e.wide(x), e.wide(gy)
    return e.cast_like(window_sum_grad(e, pool, _divide(e, gy, counts), x, weight), n["X"])


def _counts(e: Emitter, pool: Pool, n: Call, x: ir.Value, axis: int) -> int | np.ndarray | ir.Value:
    """The divisor along one axis: a number for all windows, or a vector. Taps beyond the padding do not count."""
    padded = bool(n.int("count_include_pad", 0))
    count = pool.windows(axis)
    if count is not None and not pool.ceil and pool.pads is not None and pool.pads[axis] == (0, 0) and count > _LISTED:
        return pool.kernel[axis]
    if count is not None:
        taps = np.maximum(valid_taps(e, pool, axis, end_counts=padded), 1)
        return int(taps[0]) if taps.size and (taps == taps[0]).all() else taps
    if not pool.ceil and pool.pads is not None and (padded or pool.pads[axis] == (0, 0)):
        if pool.strides[axis] == 1:
            return pool.kernel[axis]
        rows = e.size_add(e.dim(x, 2 + axis), sum(pool.pads[axis]))  # fewer than a window spans may still have a window
        taps = e.size_div(e.size_add(rows, pool.dilations[axis] - 1), pool.dilations[axis])
        return e.op("Max", e.op("Min", e.vector([taps]), e.ints([pool.kernel[axis]])), e.ints([1]))
    size = e.dim(x, 2 + axis)
    low, high = _padding(e, pool, size, axis)
    zero, one = e.const(np.int64(0)), e.const(np.int64(1))
    last = e.op("Squeeze", e.vector([e.dim(n.y, 2 + axis)]), e.ints([0]))
    start = e.op("Mul", e.op("Range", zero, last, one), e.ints([pool.strides[axis]]))
    start = e.op("Unsqueeze", e.op("Sub", start, e.vector([low])), e.ints([1]))
    at = e.op("Add", start, e.arange(pool.kernel[axis], pool.dilations[axis]))
    inside = e.compare("Less", at, e.vector([e.size_add(size, high) if padded else size]))
    if not padded:
        inside = e.op("And", inside, e.compare("GreaterOrEqual", at, e.ints([0])))
    return e.op("Max", e.op("ReduceSum", e.cast(inside, ir.DataType.INT64), e.ints([1]), keepdims=0), e.ints([1]))


def _divide(e: Emitter, gy: ir.Value, counts: list[int | np.ndarray | ir.Value]) -> ir.Value:
    """gy divided by the counts that vary along their axis: one multiplication if all are constants."""
    rank = len(counts)
    static = np.ones((1,) * rank)
    listed = math.prod(count.size for count in counts if isinstance(count, np.ndarray)) <= _LISTED
    for axis, count in enumerate(counts):
        after = [1 + i for i in range(rank - 1 - axis)]
        if isinstance(count, np.ndarray) and not listed:
            gy = e.mul(gy, e.const(1 / count.reshape([-1, *(1 for _ in after)]), gy.dtype))
        elif isinstance(count, np.ndarray):
            static = static / count.reshape([-1, *(1 for _ in after)])
        elif isinstance(count, ir.Value):
            wide = e.wide(gy)
            share = e.div(wide, e.cast_like(e.unsqueeze(count, after), wide))
            gy = e.typed(e.cast_like(share, gy), gy)
    return e.typed(e.mul(gy, e.const(static, gy.dtype)), gy) if static.size > 1 else gy


@vjp("LpPool", wrt="X", factors=_POOLED)
def lp_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = (sum of |x|^q)^(1/q): dx = sign(x) |x|^(q-1) times the sum over windows of g y^(1-q), and 0 where y = 0."""
    x = n["X"]
    q = n.int("p", 2)
    spread = window_sum_grad(e, Pool.of(n, x), _norm_quotient(e, g["Y"], n.out("Y"), q), x)
    return e.mul(spread, _signed_power(e, x, q - 1))


def _norm_quotient(e: Emitter, gy: ir.Value, y: ir.Value, q: int) -> ir.Value:
    """g y^(1-q), and 0 where y = 0, as in PyTorch."""
    if q == 1:
        return gy
    positive = e.compare("Greater", y, 0)
    safe = e.where(positive, y, 1)
    return e.where(positive, e.div(gy, safe if q == 2 else e.op("Pow", safe, e.scalar(q - 1, y))), 0)


def _signed_power(e: Emitter, x: ir.Value, q: int) -> ir.Value:
    """sign(x) |x|^q."""
    if q == 1:
        return x
    return e.op("Sign", x) if q == 0 else e.mul(e.op("Sign", x), e.op("Pow", e.op("Abs", x), e.scalar(q, x)))


# -- over whole images -------------------------------------------------------------------------------------------------


def _pixels(n: Call, rank: int) -> range:
    """All axes of an image but those of samples and channels."""
    return range(2, rank)


def _area(e: Emitter, x: ir.Value) -> Dim:
    """The number of elements of one channel of one image, for any rank of x."""
    if x.shape is not None:
        return e.size_mul(*e.dims(x)[2:])
    return e.op("ReduceProd", e.op("Shape", x, start=2), e.ints([0]), keepdims=1)


@linear("GlobalAveragePool", wrt="X", factors=reduced(_pixels, MEAN), within="operands", nonnegative=True)
def global_average_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[n, c] = sum over p of x[n, c, p] / P: dx[n, c, p] = g[n, c] / P."""
    return e.expand(e.averaged(g["Y"], _area(e, n["X"])), n["X"])


_GREATEST = reduced(_pixels, mix("takes the maximum along"))


@vjp("GlobalMaxPool", wrt="X", factors=_GREATEST, moves="selects", monotone="rising")
def global_max_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[n, c] = max over p of x[n, c, p]: dx[n, c, p] = g[n, c] at the first maximum, else 0, as in PyTorch."""
    x = n["X"]
    head = e.op("Shape", x, start=0, end=2)
    flat = e.op("Reshape", x, e.op("Concat", head, e.vector([_area(e, x)]), axis=0), allowzero=1)
    winner = e.op("ArgMax", flat, axis=2, keepdims=1)
    column = e.op("Reshape", g["Y"], e.op("Concat", head, e.ints([1]), axis=0), allowzero=1)
    return e.reshape_like(scatter(e, e.zeros_like(flat), winner, column, 2), x)


@vjp("GlobalLpPool", wrt="X", factors=reduced(_pixels, mix("takes the norm along")))
def global_lp_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = (sum of |x|^q)^(1/q): dx = sign(x) |x|^(q-1) g y^(1-q), and 0 where y = 0."""
    x = n["X"]
    q = n.int("p", 2)
    return e.typed(e.mul(_signed_power(e, x, q - 1), _norm_quotient(e, g["Y"], n.out("Y"), q)), x)


# -- maxima ------------------------------------------------------------------------------------------------------------


_UNPOOLS = pick("moves maxima along")
_MAXIMA = notation("n c *s -> n c *p, n c *p", s=_POOLS, p=_POOLS)
_INDEXED = having(_MAXIMA, counts_all=lambda n: len(n.node.outputs) > 1)


@vjp("MaxPool", wrt="X", factors=_INDEXED, moves="selects", monotone="rising")
def max_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[p] = x.flat[i[p]] with the indices i of the maxima: dx.flat[j] = sum over the p with i[p] = j of g[p].

    This sum is MaxPoolGrad(g, x). Of equal elements the one at i[p] gets g.
    """
    x = n["X"]
    if n.node.outputs[1:]:  # the node computes the indices anyway
        return scatter_to_maxima(e, Pool.of(n, x), g["Y"], winners_of(e, n), x)
    return e.op("MaxPoolGrad", g["Y"], x, domain=DOMAIN, **windows_of(n))


_SPREAD = notation("n c *p, n c *s -> n c *s", s=_POOLS, p=_POOLS)


@linear(f"{DOMAIN}::MaxPoolGrad", wrt="dY", factors=_SPREAD, of=("MaxPool",))
def max_pool_grad_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """<g, MaxPoolGrad(dy, x)> = sum over p of g.flat[i[p]] dy[p]."""
    winners = winners_of(e, n)
    picked = e.op("Gather", e.op("Reshape", g["dX"], e.ints([-1])), winners.indices, axis=0)
    return e.typed(picked if winners.exist is None else e.where(winners.exist, picked, 0), n["dY"])


_UNPOOLED = having(notation("n c *s, n c *s -> n c *p", s=_UNPOOLS, p=_UNPOOLS), counts_all=True)


@linear("MaxUnpool", wrt="X", factors=_UNPOOLED, moves="fills")
def max_unpool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y.flat[i[p]] = x[p]: dx[p] = g.flat[i[p]]. Of equal indices only the last gets g: its value overwrote the others."""
    x, indices = n["X"], n["I"]
    flat = e.ints([-1])

    def read(v: ir.Value) -> ir.Value:
        return e.op("Gather", v, indices, axis=0)

    gx = e.typed(read(e.op("Reshape", g["output"], flat)), x)
    if _are_distinct(n):
        return gx
    where = e.op("Reshape", indices, flat)
    size = e.op("Reshape", e.op("Size", g["output"]), e.ints([1]))

    def write(data: ir.Value, order: ir.Value) -> ir.Value:
        return e.op("ScatterElements", data, where, e.op("Reshape", order, flat), axis=0)

    return e.where(survive(e, e.op("Expand", e.const(np.int64(0)), size), x, write, read), gx, 0)


def _are_distinct(n: Call) -> bool:
    """Whether the indices of a MaxUnpool are those of a MaxPool whose windows share no element."""
    pool = n["I"].producer()
    if not is_op(pool, "MaxPool"):
        return False
    windows = Pool.of(Call(pool), Call(pool)["X"])
    return all(windows.span(axis) <= windows.strides[axis] for axis in range(windows.rank))
