"""Random masks for Dropout as a function of a graph input, so that a run can be repeated and resumed.

ONNX's own random operators keep their state inside the session, where it can be neither stored nor restored. Here every
entry is a hash of (state, node, position), computed with int32 products, sums and quotients, which all execution providers
compute alike: the "squares" generator of Widynski (2020), reduced to 32 bits. One round is

    v <- v^2 + y or z (in turn);    v <- v with its 16-bit halves exchanged

with y = position times an odd constant plus one key, z = y plus another. Three rounds pass the statistical tests that masks
need (moments, lags, pairs, agreement of masks from different states and nodes): `tests/programs/test_masks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.pipeline.modes import dropped_share

_STRIDE = 0x9E3779B1
"""2^32 divided by the golden ratio, odd, so that neighbors start far apart."""

_HALF = 1 << 16
_ROUNDS = 3
_INT = ir.DataType.INT32


def dropouts(graph: ir.Graph) -> list[ir.Node]:
    """The Dropout nodes with a ratio that is known and not 0."""
    return [node for node in graph if is_op(node, "Dropout") and dropped_share(node)]


def initial_state(seed: int | Sequence[int]) -> int:
    """The initial state of a seed or several; neighboring seeds give distant states, since each step adds one."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1


def _wrapped(number: int) -> int:
    """A number modulo 2^32, in the range of int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def hashed(e: Emitter, y: ir.Value, z: ir.Value) -> ir.Value:
    """Emit the rounds of the hash, int32 to int32, all products modulo 2^32."""
    v = y
    for turn in range(_ROUNDS):
        v = e.add(e.mul(v, v), z if turn % 2 else y)
        if turn < _ROUNDS - 1:
            v = e.add(e.mul(v, _HALF), e.div(v, _HALF))
    return v


class Masks:
    """Masks for `count` nodes from one state, an int32 scalar."""

    def __init__(self, e: Emitter, state: ir.Value, count: int) -> None:
        self.e = e
        offsets = [_wrapped(i * 0x85EBCA6B + 0x1234567) for i in range(2 * count)]
        y = e.add(e.mul(state, _wrapped(_STRIDE)), e.const(np.asarray(offsets, np.int32)))
        self.keys = hashed(e, y, e.add(y, _wrapped(0xC2B2AE35)))

    def keep(self, x: ir.Value, node: int, share: float) -> ir.Value:
        """Emit a bool tensor of x's shape that is false with probability `share`."""
        e = self.e
        limit = min(round(share * 2**32), 2**32 - 1) - 2**31
        keep = e.op("Reshape", e.compare("GreaterOrEqual", self.bits(x, node), limit), e.shape(x), allowzero=1)
        keep.dtype, keep.shape = ir.DataType.BOOL, x.shape
        return keep

    def bits(self, x: ir.Value, node: int) -> ir.Value:
        """Emit random bits, one int32 number for each entry of x, as a matrix of the first axis and all others."""
        e = self.e
        first, second = (e.op("Gather", self.keys, e.const(2 * node + i), axis=0) for i in (0, 1))
        rows, columns = self._sizes(x)
        down = self._range(rows)
        if isinstance(columns, int):
            down = e.mul(down, e.const(np.int32(_wrapped(columns * _STRIDE))))
        else:
            down = e.mul(down, e.mul(e.cast(columns, _INT), _wrapped(_STRIDE)))
        y = e.add(e.unsqueeze(down, [1]), first)
        y = e.add(y, e.mul(e.unsqueeze(self._range(columns), [0]), _wrapped(_STRIDE)))
        y.dtype = _INT
        return hashed(e, y, e.add(y, second))

    def _sizes(self, x: ir.Value) -> tuple[Dim, Dim]:
        """Sizes of x as a matrix: the first axis, and the product of all others."""
        e = self.e
        if x.shape is None:
            return 1, e.op("Reshape", e.op("Size", x), e.ints([1]))
        dims = e.dims(x)
        return (dims[0], e.size_mul(*dims[1:])) if len(dims) > 1 else (1, e.size_mul(*dims))

    def _range(self, size: Dim) -> ir.Value:
        """0, 1, 2, ... as int32."""
        e = self.e
        count = e.const(size) if isinstance(size, int) else e.squeeze(size, [0])
        numbers = e.op("Range", e.const(np.int32(0)), e.cast(count, _INT), e.const(np.int32(1)))
        numbers.dtype = _INT
        return numbers
