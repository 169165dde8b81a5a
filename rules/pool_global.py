"""Pooling over a whole image or over regions of it: the Global pools, RoiAlign and MaxRoiPool."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Cotangents, linear, not_differentiable, vjp
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.rules.pool import norm_quotient, signed_power

not_differentiable("MaxRoiPool", reason="it does not return the indices of its maxima.")


def _area(e: Emitter, x: ir.Value) -> Dim:
    """The number of elements of one channel of one image, for any rank of x."""
    if x.shape is not None:
        return e.size_mul(*e.dims(x)[2:])
    return e.op("ReduceProd", e.op("Shape", x, start=2), e.ints([0]), keepdims=1)


@linear("GlobalAveragePool", wrt=("X",))
def global_average_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[n, c] = sum over p of x[n, c, p] / P: dx[n, c, p] = g[n, c] / P."""

    def x_grad() -> ir.Value:
        x, gy = n["X"], g["Y"]
        area = _area(e, x)
        mean = e.mul(gy, 1 / max(area, 1)) if isinstance(area, int) else e.div(gy, e.size_as(area, x))
        return e.expand(mean, x)

    return {"X": x_grad}


@vjp("GlobalMaxPool", wrt=("X",))
def global_max_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[n, c] = max over p of x[n, c, p]: dx[n, c, p] = g[n, c] at the first maximum, else 0, as in PyTorch."""

    def x_grad() -> ir.Value:
        x = n["X"]
        head = e.op("Shape", x, start=0, end=2)
        count = _area(e, x)
        area = e.vector([count])
        flat = e.op("Reshape", x, e.op("Concat", head, area, axis=0), allowzero=1)
        winner = e.op("ArgMax", flat, axis=2, keepdims=1)
        positions = _range(e, count)
        column = e.op("Reshape", g["Y"], e.op("Concat", head, e.ints([1]), axis=0), allowzero=1)
        return e.reshape_like(e.where(e.compare("Equal", positions, winner), column, 0), x)

    return {"X": x_grad}


@vjp("GlobalLpPool", wrt=("X",))
def global_lp_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y = (sum of |x|^q)^(1/q): dx = sign(x) |x|^(q-1) g y^(1-q), and 0 where y = 0."""
    x = n["X"]
    q = n.int("p", 2)
    return {"X": lambda: e.typed(e.mul(signed_power(e, x, q - 1), norm_quotient(e, g["Y"], n.out("Y"), q)), x)}


# -- RoiAlign ----------------------------------------------------------------------------------------------------------


@vjp("RoiAlign", wrt=("X",), note="rois get no gradient, as in PyTorch")
def roi_align_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[r, c, p, q] = sum over h, w of A[r, p, h] x[b_r, c, h, w] B[r, q, w], where A and B average bilinear samples:

    dx[b, c, h, w] = sum over r with b_r = b and p of A[r, p, h] (sum over q of g[r, c, p, q] B[r, q, w]).
    """

    def x_grad() -> ir.Value:
        require(n.string("mode", "avg") == "avg", "its gradient is implemented for mode='avg' only.")
        x, gy, rois = n["X"], g["Y"], n["rois"]
        dtype = x.dtype or ir.DataType.FLOAT
        batch, channels, height, width = (e.dim(x, axis) for axis in range(4))
        count = e.dim(rois, 0)
        rows, columns = n.int("output_height", 1), n.int("output_width", 1)
        a = e.cast(_samples(e, n, 1, rows, height), dtype)
        b = e.cast(_samples(e, n, 0, columns, width), dtype)
        along = e.op("Transpose", e.matmul(gy, e.unsqueeze(b, [1])), perm=[0, 2, 1, 3])
        owner = e.mask(e.compare("Equal", e.unsqueeze(_range(e, batch), [1]), n["batch_indices"]), x)  # [N, R]
        spread = e.mul(e.unsqueeze(owner, [1, 3]), e.op("Transpose", a, perm=[2, 0, 1]))  # [N, H, R, P]
        inner = e.size_mul(count, rows)
        left = e.reshape(spread, [e.size_mul(batch, height), inner])
        right = e.reshape(along, [inner, e.size_mul(channels, width)])
        total = e.reshape(e.matmul(left, right), [batch, height, channels, width])
        return e.typed(e.op("Transpose", total, perm=[0, 2, 1, 3]), x)

    return {"X": x_grad}


def _range(e: Emitter, size: Dim) -> ir.Value:
    """0, 1, .., size - 1, computed by the graph."""
    return e.op("Range", e.const(np.int64(0)), e.op("Squeeze", e.vector([size]), e.ints([0])), e.const(np.int64(1)))


def _samples(e: Emitter, n: Call, coordinate: int, bins: int, size: Dim) -> ir.Value:
    """A[r, p, h]: the weight of row h in bin p of region r, an average over its samples; in float32, as in the runtime."""
    rois = e.cast(n["rois"], ir.DataType.FLOAT)
    half = n.string("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    corners = e.sub(e.mul(rois, n.float("spatial_scale", 1.0)), 0.5 if half else 0)
    start = e.slice(corners, [coordinate], [coordinate + 1], [1])  # [R, 1]
    extent = e.sub(e.slice(corners, [coordinate + 2], [coordinate + 3], [1]), start)
    extent = extent if half else e.op("Max", extent, 1)
    bin_size = e.div(extent, bins)
    ratio = n.int("sampling_ratio", 0)
    e.check_bytes(4 * max(bins, ratio), f"The table of {bins:,} bins or of {ratio:,} samples in each")
    length = e.size_as(size, rois)
    samples: ir.Value | None = None
    grid: ir.Value | int = ratio
    if ratio > 0:
        steps = e.const(np.arange(ratio, dtype=np.float32) + 0.5)
    else:
        samples = e.op("Ceil", bin_size)  # [R, 1], 0 for a region of negative size
        grid = e.op("Max", samples, 1)
        every = e.op("Concat", e.op("Reshape", grid, e.ints([-1])), e.const(np.ones(1, np.float32)), axis=0)
        most = e.op("ReduceMax", every, keepdims=0)
        steps = e.add(e.op("Range", e.const(np.float32(0)), most, e.const(np.float32(1))), 0.5)
    inside_bin = e.unsqueeze(e.mul(e.div(steps, grid), bin_size), [1])  # [R, 1, S]
    first = e.add(start, e.mul(bin_size, e.const(np.arange(bins, dtype=np.float32))))  # [R, P]
    at = e.add(e.unsqueeze(first, [2]), inside_bin)  # [R, P, S]
    valid = e.op("And", e.compare("GreaterOrEqual", at, -1), e.compare("LessOrEqual", at, length))
    share: ir.Value | float = 1 / ratio if ratio > 0 else 0.0
    if samples is not None:  # regions with fewer samples than the largest ignore the rest
        valid = e.op("And", valid, e.unsqueeze(e.compare("Less", steps, samples), [1]))
        share = e.unsqueeze(e.op("Reciprocal", grid), [2])
    clamped = e.op("Min", e.op("Max", at, 0), e.sub(length, 1))
    row = e.cast(_range(e, size), ir.DataType.FLOAT)
    distance = e.op("Abs", e.sub(e.unsqueeze(clamped, [3]), row))  # [R, P, S, H]
    weight = e.where(e.unsqueeze(valid, [3]), e.op("Relu", e.sub(1, distance)), 0)
    return e.mul(e.reduce_sum(weight, [2], keepdims=False), share)
