"""Means over sliding windows: for which tensors a target computes them fast, and how to pad them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.pooling import Pool

_BLOCK = 16
"""Channels that ONNX Runtime's CPU provider processes together with AVX-512; fewer without."""

_RANKS = 3
"""Most spatial axes over which means are fast on the CPU: `backends.cpu.fast_pools` writes them as means over two."""


def in_blocks(batch: Dim, channels: Dim) -> bool:
    """Whether the channels of a batch, or the samples and channels together, come in whole blocks.

    A pool treats samples and channels alike.
    """
    if not isinstance(channels, int):
        return False
    return channels % _BLOCK == 0 or (isinstance(batch, int) and batch * channels % _BLOCK == 0)


def sliding_means_are_fast(e: Emitter, pool: Pool, x: ir.Value) -> bool:
    """Whether the target computes means over these windows, which start at every row of `x`, faster than a convolution."""
    if not e.target.fast_means:
        return False
    if e.target.channel_block == 1:
        return e.target.asymmetric_pads or all(low == high for low, high in pool.pads or ())
    known_rows = None not in pool.sizes and x.dtype == ir.DataType.FLOAT and pool.rank <= _RANKS
    return known_rows and in_blocks(e.dim(x, 0), e.dim(x, 1))


def counted_padding(e: Emitter, x: ir.Value, begin: Sequence[int], end: Sequence[int]) -> tuple[ir.Value, list[int]]:
    """The operand and the `pads` of a mean that counts padding; pads beforehand what ONNX Runtime would miscount.

    Versions 1.21 to 1.24 confuse the end padding of axes: over two axes they take the beginning of the second for the end of
    the first, over three axes that as well, and the end of the first for that of the second.
    """
    rank = len(begin)
    if rank > 1 and (begin[1] < end[0] or (rank > 2 and end[0] < end[1])):
        return e.pad(x, begin, end, range(2, 2 + rank)), [0] * (2 * rank)
    return x, [*begin, *end]
