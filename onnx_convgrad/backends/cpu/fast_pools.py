"""AveragePool as a pool over two axes of many channels, for which ONNX Runtime's CPU provider has a fast kernel.

If the channels come in blocks of 16, the runtime moves images into a blocked layout and averages there; otherwise, and over
one axis or three, it works element by element, 5 to 40 times slower. A pool treats channels and samples alike, so both may
form the blocks; and the mean over three axes is the mean over one axis of the means over two, with or without padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.backends.cpu import Forms
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter, static_dims
from onnx_convgrad.ir.geometry import HINT_BATCH
from onnx_convgrad.ir.pooling import Pool
from onnx_convgrad.ir.sliding_means import counted_padding, in_blocks

_LARGE = 1 << 17
"""Smallest number of elements of all windows together for which several nodes are faster than the pool's kernel."""


_Along = tuple[int, int, tuple[int, int]]
"""Kernel, stride and padding along one axis."""

_IDENTITY: _Along = (1, 1, (0, 0))


def _average(e: Emitter, node: ir.Node) -> ir.Value | None:
    x, n = node.inputs[0], Call(node)
    if x is None or x.shape is None or None in (static_dims(x) or [])[1:]:
        return None
    pool = Pool.of(n, x)
    batch, channels, *rows = e.dims(x)
    counts = [pool.windows(axis) for axis in range(pool.rank)]
    if pool.pads is None or None in counts or set(pool.dilations) != {1} or not in_blocks(batch, channels):
        return None
    if (pool.rank == 2 and in_blocks(1, channels)) or pool.rank > 3 or _elements(e, x, pool.kernel, counts) < _LARGE:
        return None
    if n.int("count_include_pad", 0) and any((pool.excess(axis) or 0) > 0 for axis in range(pool.rank)):
        return None  # see quirks.POOL_BEYOND_PADDING
    along = list(zip(pool.kernel, pool.strides, pool.pads, strict=True))
    y: list[Dim] = [count or 0 for count in counts]
    if pool.rank == 1:
        means = _means(e, n, x, [batch, channels], [1, *rows], [_IDENTITY, *along])
    elif pool.rank == 2:
        means = _means(e, n, x, [batch, channels], rows, along)
    else:
        inner = _means(e, n, x, [batch, e.size_mul(channels, rows[0])], rows[1:], along[1:])
        size = [rows[0], e.size_mul(*y[1:])]
        means = _means(e, n, inner, [batch, channels], size, [along[0], _IDENTITY])
    return e.reshape(means, [batch, channels, *y])


def _elements(e: Emitter, x: ir.Value, kernel: Sequence[int], counts: Sequence[int | None]) -> int:
    """Elements of all windows."""
    batch, channels = (size if isinstance(size, int) else HINT_BATCH for size in e.dims(x)[:2])
    return batch * channels * math.prod(kernel) * math.prod(count or 0 for count in counts)


def _means(e: Emitter, n: Call, v: ir.Value, lead: list[Dim], size: list[Dim], along: Sequence[_Along]) -> ir.Value:
    """AveragePool of `v`, viewed as [*lead, *size], over the last two axes, with the node's attributes.

    If padding counts, no window exceeds it, so that `ceil_mode` makes no difference.
    """
    if not in_blocks(1, lead[1]):
        lead = [1, e.size_mul(*lead)]
    kernel, strides, pads = zip(*along, strict=True)
    begin, end = zip(*pads, strict=True)
    v, counted = e.reshape(v, [*lead, *size]), n.int("count_include_pad", 0)
    v, around = counted_padding(e, v, begin, end) if counted else (v, [*begin, *end])
    return e.op(
        "AveragePool",
        v,
        kernel_shape=kernel,
        strides=strides,
        pads=around,
        ceil_mode=None if counted else n.int("ceil_mode", 0) or None,
        count_include_pad=counted or None,
    )


POOLS: Forms = {"AveragePool": _average}
