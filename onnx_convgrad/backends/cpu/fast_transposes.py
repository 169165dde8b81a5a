"""Transpose, DepthToSpace and SpaceToDepth that would move single elements, written so that rows are moved.

ONNX Runtime's CPU provider moves elements one at a time, at 3 ns, unless the last axis stays in place or two neighboring
groups of axes are exchanged. If a short axis leaves or takes the last place, as between depth and space, a Split and a
Concat can move it, and the remaining Transpose moves rows: 4 to 10 times faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.backends.cpu import Forms
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import HINT_BATCH
from onnx_convgrad.lowering.cost.products import folds

_SHORT = 16
"""Longest axis that is split."""

_FEW = 8
"""Most rows or columns for which Split and Concat run at full speed."""

_LINES = (2, 3)
"""Numbers of rows that the runtime interleaves slowly at any length."""

_LARGE = 1 << 18
"""Smallest number of elements for which several nodes are faster than the Transpose."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Move the last axis to the place `at` among the others, then permute the axes with the last one in place."""

    at: int
    perm: tuple[int, ...]

    @property
    def alone(self) -> bool:
        """Whether the permutation after the move is the identity."""
        return list(self.perm) == sorted(self.perm)

    @classmethod
    def of(cls, perm: Sequence[int]) -> _Plan | None:
        """The plan for a permutation that moves the last axis away and leaves the one before it at the end."""
        last = len(perm) - 1
        if last < 2 or perm[-1] != last - 1:
            return None
        at = last - 1
        while at and perm[at - last - 1] == at - 1:  # axes that stay at the end, in order
            at -= 1
        order = [*range(at), last, *range(at, last)]
        return cls(at, tuple([order.index(axis) for axis in perm]))


def _permuted(e: Emitter, v: ir.Value, dims: Sequence[Dim], perm: Sequence[int]) -> ir.Value | None:
    """Transpose of `v`, viewed with the sizes `dims`, or `None` where the runtime's kernel is as fast."""
    unknown = sum(not isinstance(size, int) for size in dims)
    if unknown > 1 or math.prod(size if isinstance(size, int) else HINT_BATCH for size in dims) < _LARGE:
        return None
    back = [int(axis) for axis in np.argsort(perm)]
    leaving, coming = _Plan.of(perm), _Plan.of(back)
    if leaving is not None and _short(dims[-1]) and not _exchanged(leaving, dims, dims[-1]):
        return e.transpose(_moved(e, e.reshape(v, dims), dims, len(dims) - 1, leaving.at), leaving.perm)
    count = dims[perm[-1]]
    if coming is not None and _short(count) and (count in _LINES or not _exchanged(coming, dims, count)):
        order = [int(axis) for axis in np.argsort(coming.perm)]
        moved = e.transpose(e.reshape(v, dims), order)
        return _moved(e, moved, [dims[axis] for axis in order], coming.at, len(dims) - 1)
    return None


def _exchanged(plan: _Plan, dims: Sequence[Dim], count: Dim) -> bool:
    """Whether only matrices with a side of `count` are transposed, each large enough for the runtime's loop to be faster.

    That loop passes over memory once instead of twice.
    """
    size = math.prod(size for size in dims[plan.at :] if isinstance(size, int))
    return plan.alone and isinstance(count, int) and size >= (2048 if count <= _FEW else 512)


def _short(size: Dim) -> bool:
    return isinstance(size, int) and 1 < size <= _SHORT


def _moved(e: Emitter, v: ir.Value, dims: Sequence[Dim], source: int, to: int) -> ir.Value:
    """Move an axis from the place `source` to the place `to`, one of which is the end.

    Axes are merged in between, so that the runtime cannot move a Transpose through Split and Concat and merge two into a
    slow one.
    """
    rest, count, at = [*dims[:source], *dims[source + 1 :]], dims[source], min(source, to)
    assert isinstance(count, int), "the axis is short"
    before, behind = e.size_mul(*rest[:at]), e.size_mul(*rest[at:])
    inner, last = [before, count, behind], [before, behind, count]
    whole = e.reshape(v, inner if source < to else last)
    parts = e.ops("Split", whole, outputs=count, axis=1 if source < to else 2, num_outputs=count)
    shape, axis = ([before, behind, 1], 2) if source < to else ([before, 1, behind], 1)
    return e.reshape(e.concat([e.reshape(part, shape) for part in parts], axis), [*rest[:to], count, *rest[to:]])


# -- the operators -----------------------------------------------------------------------------------------------------


def _transpose(e: Emitter, node: ir.Node) -> ir.Value | None:
    x, perm = node.inputs[0], Call(node).ints("perm")
    if x is None or x.shape is None or perm is None or folds(node.outputs[0]):
        return None
    return _permuted(e, x, e.dims(x), perm)


def _depth_to_space(e: Emitter, node: ir.Node) -> ir.Value | None:
    """[N, i, j, C, h, w] or [N, C, i, j, h, w] to [N, C, h, i, w, j]."""
    sizes, b = _sizes(e, node), Call(node).int("blocksize", 1)
    if sizes is None:
        return None
    v, (n, depth, h, w) = sizes
    c = e.size_div(depth, b * b)
    if Call(node).string("mode", "DCR") == "DCR":
        v = e.transpose(e.reshape(v, [n, b * b, c, e.size_mul(h, w)]), [0, 2, 1, 3])
    spread = _permuted(e, v, [n, c, b, b, h, w], [0, 1, 4, 2, 5, 3])
    return None if spread is None else e.reshape(spread, [n, c, e.size_mul(h, b), e.size_mul(w, b)])


def _space_to_depth(e: Emitter, node: ir.Node) -> ir.Value | None:
    """[N, C, h, i, w, j] to [N, i, j, C, h, w]."""
    sizes, b = _sizes(e, node), Call(node).int("blocksize", 1)
    if sizes is None:
        return None
    v, (n, c, height, width) = sizes
    h, w = e.size_div(height, b), e.size_div(width, b)
    gathered = _permuted(e, v, [n, c, h, b, w, b], [0, 1, 3, 5, 2, 4])
    if gathered is None:
        return None
    moved = e.transpose(e.reshape(gathered, [n, c, b * b, e.size_mul(h, w)]), [0, 2, 1, 3])
    return e.reshape(moved, [n, e.size_mul(c, b * b), h, w])


def _sizes(e: Emitter, node: ir.Node) -> tuple[ir.Value, list[Dim]] | None:
    """The operand of the node and its sizes, if all but the batch are known."""
    x = node.inputs[0]
    if x is None or x.shape is None:
        return None
    dims = e.dims(x)
    return (x, dims) if all(isinstance(size, int) for size in dims[1:]) else None


TRANSPOSES: Forms = {
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Transpose": _transpose,
}
