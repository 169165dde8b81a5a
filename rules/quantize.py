"""Quantizers: the scale of DequantizeLinear, and the straight-through derivative of a quantized value.

Rounding has derivative zero. The straight-through estimator (Bengio et al. 2013, arXiv:1308.3432) leaves it out, so that the
derivative is that of clip: one inside the range of the quantizer, zero outside. The abstract operator StraightThrough marks
the values Y of X after a quantizer, (clip(round(X / scale) + zero_point) - zero_point) scale, that have this derivative; it
computes nothing, and `frontend.quantized` adds and removes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import Axes, Factors, axes_of, mix, normalized, rank_of
from onnx_convgrad.autodiff.registry import Cotangents, multilinear, vjp, zero
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Emitter, known
from onnx_convgrad.ir.normalized import other_axes

# -- DequantizeLinear --------------------------------------------------------------------------------------------------


def _scaled(n: Call) -> Factors:
    """Each element by itself, with one scale for all, one for each index of an axis, or one for each block."""
    names = axes_of(n.inputs[0])
    own: list[Axes | None] = []
    work = {}
    for value in n.inputs[1:]:
        rank = 0 if value is None else rank_of(value)
        axis = normalized([n.int("axis", 1)], len(names))
        own.append(None if value is None else names if rank == len(names) > 1 else tuple(names[i] for i in axis[:rank]))
        if rank == len(names) > 1:
            work = {names[i]: mix("has a scale per block of") for i in axis}
    return Factors((names, *own), tuple(names for _ in n.node.outputs), work, broadcasts=True)


zero("QuantizeLinear", factors=_scaled)


@multilinear("DequantizeLinear", wrt="x_scale", factors=_scaled)
def dequantize_linear_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[p] = (x[p] - z[c(p)]) s[c(p)]: ds[c] = sum over p with c(p) = c of g[p] (x[p] - z[c])."""
    x, scale, gy = n["x"], n["x_scale"], g["y"]
    axis, block = n.int("axis", 1), n.int("block_size", 0)
    unit = e.op(
        "DequantizeLinear", x, e.full_like(scale, 1), n.get("x_zero_point"), axis=axis, block_size=block or None
    )
    return _sum_to_scale(e, e.mul(gy, e.typed(unit, gy)), x, scale, axis, block)


# -- StraightThrough ---------------------------------------------------------------------------------------------------


_SLACK = 1e-3
"""Part of a level, apart from rounding errors, by which a number may be outside."""


def _straight(n: Call) -> Factors:
    """Factors of the quantizer that it stands for; the last operand, the quantized value, has the axes of the first."""
    own = _scaled(n)
    return replace(own, operands=(*own.operands[:3], own.operands[0])[: len(n.inputs)])


_EPSILONS = {ir.DataType.FLOAT: 2.0**-23, ir.DataType.FLOAT16: 2.0**-10, ir.DataType.BFLOAT16: 2.0**-7}


@vjp(f"{DOMAIN}::StraightThrough", wrt=("X", "scale"), factors=_straight)
def straight_through_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """Without a scale dX = g. With the levels low .. high, u = X / s and the levels l = low - z, h = high - z:

        dX = g where l <= u <= h, else 0
        ds = sum of g (Y / s - u) where l <= u <= h, of g l where u < l, and of g h where u > h

    The latter is the gradient of Learned Step Size Quantization (Esser et al. 2020, arXiv:1902.08153, equation 3). Numbers
    that rounding errors put outside count as inside: the largest weight is at the border if it determines the scale.
    """
    gy, scale = g["Z"], n.get("scale")
    if scale is None:
        return {"X": lambda: gy}
    x, zero = n["X"], n.get("zero_point")
    axis, block = n.int("axis", 1), n.int("block_size", 0)

    def levels(number: float) -> ir.Value | float:
        """A bound of the levels minus the zero point."""
        if zero is None:
            return number
        known_zero = e.constant_of(zero)
        if known_zero is not None:
            return e.const(number - known_zero.astype(np.float64), dtype)
        return e.sub(e.const(number, dtype), e.cast(zero, dtype))

    dtype = scale.dtype or x.dtype or ir.DataType.FLOAT
    ends = n.float("low", 0.0), n.float("high", 0.0)
    slack = min(_SLACK + 4 * _EPSILONS.get(dtype, 0.0) * max(map(abs, ends)), 0.5)
    limits = ends[0] - slack, ends[1] + slack
    low, high = (_spread(e, e.mul(scale, levels(limit)), x, axis, block) for limit in limits)
    below, above = e.compare("Less", x, low), e.compare("Greater", x, high)

    def data() -> ir.Value:
        return e.where(e.op("Or", below, above), 0, gy)

    def step() -> ir.Value:
        bounds = map(levels, ends)
        spread = [b if not isinstance(b, ir.Value) else _spread(e, b, x, axis, block) for b in bounds]
        inside = e.div(e.sub(n["Y"], x), _spread(e, scale, x, axis, block))
        local = e.where(below, spread[0], e.where(above, spread[1], inside))
        return e.mul(_sum_to_scale(e, e.mul(gy, local), x, scale, axis, block), n.float("step_factor", 1.0))

    return {"X": data, "scale": step}


# -- scales ------------------------------------------------------------------------------------------------------------


def _spread(e: Emitter, value: ir.Value, x: ir.Value, axis: int, block: int) -> ir.Value:
    """A value per tensor, axis or block, of the shape of the scale, as an operand that broadcasts against x."""
    if value.shape is not None and all(known(d) == 1 for d in value.shape) and not block:
        return value if not value.shape else e.reshape(value, [])
    rank = e.rank(x, "the range of its scale per axis")
    here = axis % rank
    if not block:
        return e.unsqueeze(value, list(range(1, rank - here))) if here < rank - 1 else value
    count, size = e.dim(value, here), e.dim(x, here)
    wide = e.unsqueeze(value, [here + 1])
    dims = [e.dim(value, i) for i in range(rank)]
    copies = e.op("Expand", wide, e.vector([*dims[: here + 1], block, *dims[here + 1 :]]))
    whole = e.reshape(copies, [*dims[:here], e.size_mul(count, block), *dims[here + 1 :]])
    return e.slice(whole, [0], [size], [here])


def _sum_to_scale(e: Emitter, local: ir.Value, x: ir.Value, scale: ir.Value, axis: int, block: int) -> ir.Value:
    """Sum numbers of the shape of x over all that share an entry of the scale."""
    if block:
        return _sum_blocks(e, local, scale if scale.shape is not None else x, scale, axis, block)
    if scale.shape is not None and all(known(d) == 1 for d in scale.shape):
        return e.reshape_like(e.op("ReduceSum", local, keepdims=0), scale)
    if x.shape is not None and not x.shape:
        return local
    return e.op("ReduceSum", local, other_axes(e, x, axis), keepdims=0, noop_with_empty_axes=1)


def _sum_blocks(e: Emitter, local: ir.Value, ranked: ir.Value, scale: ir.Value, axis: int, block: int) -> ir.Value:
    """Sums over blocks of `block` entries along `axis`; the last one may be shorter."""
    rank = e.rank(ranked, "the gradient of its scale per block")
    here = axis % rank
    count = e.dim(scale, here)
    lacking = e.size_sub(e.size_mul(count, block), e.dim(local, here))
    whole = e.pad(local, [0], [lacking], [here])
    dims = [e.dim(scale if i == here else local, i) for i in range(rank)]
    split = e.reshape(whole, [*dims[: here + 1], block, *dims[here + 1 :]])
    return e.reduce_sum(split, [here + 1], keepdims=False)
