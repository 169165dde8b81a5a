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
from onnx_convgrad.autodiff.registry import vjp
from onnx_convgrad.ir.axis_products import contract, contract_blocks, contract_unranked, sum_blocks, weigh_windows
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.resize import repeats_of, smooth_factor
from onnx_convgrad.ir.resize_matrix import ResizedAxes, blocks_of, is_sparse, matrix_of, scattered


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


def _interpolated(n: Call) -> str:
    """Cubic weights may be negative, and what is beyond the image may have any number."""
    beyond = n.string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    return "" if beyond or n.string("mode", "nearest") == "cubic" else "operands"


def _rising(n: Call) -> str:
    return "" if n.string("mode", "nearest") == "cubic" else "rising"


# Not linear: the extrapolation value is added.
@vjp(
    "Resize",
    wrt="X",
    note="roi and scales get no gradient",
    factors=_FACTORS,
    within=_interpolated,
    affine=("X",),
    monotone=_rising,
)
def resize_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[p] = sum over q of A[p, q] x[q] along each axis: dx[q] = sum over p of A[p, q] g[p]."""
    x, gx = n["X"], g["Y"]
    if x.shape is not None and 0 in list(x.shape):
        return e.zeros_like(x)
    resized = ResizedAxes.of(e, n)
    repeats: dict[int, int] = {}
    general: list[int] = []
    for position, axis in enumerate(resized.axes):
        times = repeats_of(e, n, resized, position)
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


def _along(e: Emitter, n: Call, resized: ResizedAxes, position: int, gx: ir.Value, sizes: list[Dim]) -> ir.Value:
    """The cotangent before the resizing of one axis; updates `sizes`, the dimensions of gx."""
    axis = resized.axes[position]
    factor = smooth_factor(e, n, resized, position, sizes[axis])
    if factor is not None:
        return weigh_windows(e, gx, factor, axis, sizes)
    if is_sparse(e, n, resized, position, sizes[axis]):
        return scattered(e, n, resized, position, gx, sizes)
    size, blocks = e.dim(n["X"], axis), blocks_of(e, n, resized, position, sizes[axis])
    if blocks is not None:
        return contract_blocks(e, gx, *blocks, axis, sizes, size)
    return contract(e, gx, matrix_of(e, n, resized, position, sizes[axis]), axis, sizes, size)
