"""Pooling over regions of images: RoiAlign and MaxRoiPool.

RoiAlign samples its images between their elements, so that its results also depend on where the regions are. MaxRoiPool
rounds its regions: its results are piecewise constant functions of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import mix, notation
from onnx_convgrad.autodiff.registry import Cotangents, vjp
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.scatter import scatter
from onnx_convgrad.rules.movement import flatten

_LOWEST = -np.inf


# -- RoiAlign ----------------------------------------------------------------------------------------------------------


_REGIONS = mix("reads regions along")
_FACTORS = notation("n c *s, r k, r -> r c *p", n=_REGIONS, s=_REGIONS, k=_REGIONS, p=_REGIONS)


@vjp("RoiAlign", wrt=("X", "rois"), note="in PyTorch, rois get no gradient", factors=_FACTORS, monotone={"X": "rising"})
def roi_align_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """The average or the maximum over samples that are interpolated linearly along both axes.

    avg: y[r, c, p, q] = sum over h, w of A[r, p, h] x[b_r, c, h, w] B[r, q, w], where A and B average the samples. With
    z[r, p, c, w] = sum over q of g[r, c, p, q] B[r, q, w]:

    dx[b, c, h, w] = sum over r with b_r = b and p of A[r, p, h] z[r, p, c, w]
    dA[r, p, h] = sum over c and w of z[r, p, c, w] x[b_r, c, h, w]        dB alike

    and drois follows from dA and dB, since A and B are differentiable functions of the samples' coordinates.

    max: as in ONNX Runtime, y is the largest product of an element and its weight over all neighbors of all samples.
    """
    gy = g["Y"]
    mode = n.string("mode", "avg")
    require(mode in ("avg", "max"), f"its mode {mode!r} is unknown.")
    if mode == "max":
        return {v: lambda v=v: backward(e, {_largest(e, n): gy}, [n[v]], partial=True).get(n[v]) for v in ("X", "rois")}
    rows, columns = (_Samples(e, n, axis).shares(e) for axis in (2, 3))
    return {"X": lambda: _images_grad(e, n, gy, rows, columns), "rois": lambda: _regions_grad(e, n, gy, rows, columns)}


class _Samples:
    """The samples of all bins along one axis of the images, of regions r, bins p and samples s; in float32.

    Attributes:
        at: The coordinate of each, inside of the image: `[R, P, S]`.
        inside: Whether it was inside, or less than one element outside: else the sample is 0. `[R, P, S]`.
        counted: A mask of the samples in the bins of each region, if that differs: `[R, 1, S]`.
        share: 1 over their number, a number or `[R, 1, 1]`.
        size: The size of the axis.
    """

    def __init__(self, e: Emitter, n: Call, axis: int) -> None:
        """The samples along axis 2, the rows, or 3, the columns."""
        rois, coordinate = e.cast(n["rois"], ir.DataType.FLOAT), 3 - axis
        self.size: Dim = e.dim(n["X"], axis)
        bins = n.int("output_height" if axis == 2 else "output_width", 1)
        half = n.string("coordinate_transformation_mode", "half_pixel") == "half_pixel"
        corners = e.sub(e.mul(rois, n.float("spatial_scale", 1.0)), 0.5 if half else 0)
        start = e.slice(corners, [coordinate], [coordinate + 1], [1])  # [R, 1]
        extent = e.sub(e.slice(corners, [coordinate + 2], [coordinate + 3], [1]), start)
        extent = extent if half else e.op("Max", extent, 1)
        bin_size = e.div(extent, bins)
        ratio = n.int("sampling_ratio", 0)
        e.check_bytes(4 * max(bins, ratio), f"The table of {bins:,} bins or of {ratio:,} samples in each")
        length = e.size_as(self.size, rois)
        self.counted: ir.Value | None = None
        self.share: ir.Value | float = 1 / max(ratio, 1)
        grid: ir.Value | int = ratio
        if ratio > 0:
            steps = e.const(np.arange(ratio, dtype=np.float32) + 0.5)
        else:
            samples = e.op("Ceil", bin_size)  # [R, 1], 0 for a region of negative size
            grid = e.op("Max", samples, 1)
            every = e.op("Concat", e.op("Reshape", grid, e.ints([-1])), e.const(np.ones(1, np.float32)), axis=0)
            most = e.op("ReduceMax", every, keepdims=0)
            steps = e.add(e.op("Range", e.const(np.float32(0)), most, e.const(np.float32(1))), 0.5)
            self.counted = e.unsqueeze(e.compare("Less", steps, samples), [1])
            self.share = e.unsqueeze(e.op("Reciprocal", grid), [2])
        inside_bin = e.unsqueeze(e.mul(e.div(steps, grid), bin_size), [1])  # [R, 1, S]
        first = e.add(start, e.mul(bin_size, e.const(np.arange(bins, dtype=np.float32))))  # [R, P]
        at = e.add(e.unsqueeze(first, [2]), inside_bin)
        self.inside = e.op("And", e.compare("GreaterOrEqual", at, -1), e.compare("LessOrEqual", at, length))
        self.at = e.op("Min", e.op("Max", at, 0), e.sub(length, 1))

    def shares(self, e: Emitter) -> ir.Value:
        """A[r, p, h]: the weight of element h in bin p of region r."""
        valid = self.inside if self.counted is None else e.op("And", self.inside, self.counted)
        element = e.cast(e.arange(self.size), ir.DataType.FLOAT)
        distance = e.op("Abs", e.sub(e.unsqueeze(self.at, [3]), element))  # [R, P, S, H]
        weight = e.where(e.unsqueeze(valid, [3]), e.op("Relu", e.sub(1, distance)), 0)
        return e.mul(e.reduce_sum(weight, [2], keepdims=False), self.share)

    def neighbors(self, e: Emitter) -> tuple[ir.Value, ir.Value]:
        """The elements before and behind each sample, and their weights: `[R, P, S, 2]`."""
        low = e.op("Floor", self.at)
        high = e.op("Min", e.add(low, 1), e.sub(e.size_as(self.size, low), 1))
        behind = e.sub(self.at, low)
        weights = [e.unsqueeze(e.where(self.inside, v, 0), [3]) for v in (e.sub(1, behind), behind)]
        elements = [e.unsqueeze(e.cast(v, ir.DataType.INT64), [3]) for v in (low, high)]
        return e.concat(elements, 3), e.concat(weights, 3)


def _images_grad(e: Emitter, n: Call, gy: ir.Value, rows: ir.Value, columns: ir.Value) -> ir.Value:
    """The cotangent of the images of RoiAlign, as one product."""
    x = n["X"]
    batch, channels, height, width = (e.dim(x, axis) for axis in range(4))
    owner = e.mask(e.compare("Equal", e.unsqueeze(e.arange(batch), [1]), n["batch_indices"]), x)  # [N, R]
    spread = e.mul(e.unsqueeze(owner, [1, 3]), e.transpose(_as(e, rows, x), [2, 0, 1]))  # [N, H, R, P]
    inner = e.size_mul(e.dim(rows, 0), e.dim(rows, 1))
    left = e.reshape(spread, [e.size_mul(batch, height), inner])
    right = e.reshape(_along(e, gy, columns), [inner, e.size_mul(channels, width)])
    total = e.reshape(e.matmul(left, right), [batch, height, channels, width])
    return e.typed(e.transpose(total, [0, 2, 1, 3]), x)


def _along(e: Emitter, gy: ir.Value, columns: ir.Value) -> ir.Value:
    """z[r, p, c, w] = sum over q of g[r, c, p, q] B[r, q, w]."""
    return e.transpose(e.matmul(gy, e.unsqueeze(_as(e, columns, gy), [1])), [0, 2, 1, 3])


def _as(e: Emitter, value: ir.Value, like: ir.Value) -> ir.Value:
    return e.cast(value, like.dtype or ir.DataType.FLOAT)


def _regions_grad(e: Emitter, n: Call, gy: ir.Value, rows: ir.Value, columns: ir.Value) -> ir.Value | None:
    """The cotangent of the regions of RoiAlign, through those of the weights along both axes."""
    x, rois = n["X"], n["rois"]
    turned = e.transpose(gy, [0, 1, 3, 2])
    cotangents = {
        rows: _weights_grad(e, n, _along(e, gy, columns), e.transpose(x, [0, 1, 3, 2])),
        columns: _weights_grad(e, n, _along(e, turned, rows), x),
    }
    return backward(e, {v: e.typed(g, v) for v, g in cotangents.items()}, [rois], partial=True).get(rois)


def _weights_grad(e: Emitter, n: Call, z: ir.Value, x: ir.Value) -> ir.Value:
    """dA[r, p, h] = sum over c, w of z[r, p, c, w] x[b_r, c, w, h]: for all images, of which each region takes its own."""
    batch, channels, width, height = (e.dim(x, axis) for axis in range(4))
    regions, bins = e.dim(z, 0), e.dim(z, 1)
    inner = e.size_mul(channels, width)
    products = e.matmul(
        e.reshape(z, [e.size_mul(regions, bins), inner]), e.reshape(x, [batch, inner, height])
    )  # [N, R P, H]
    own = e.compare("Equal", e.unsqueeze(e.arange(batch), [1]), n["batch_indices"])  # [N, R]
    of_regions = e.reshape(products, [batch, regions, bins, height])
    total = e.reduce_sum(e.where(e.unsqueeze(own, [2, 3]), of_regions, 0), [0], keepdims=False)
    return e.cast(total, ir.DataType.FLOAT)


def _largest(e: Emitter, n: Call) -> ir.Value:
    """The result of RoiAlign with mode='max', from differentiable operators."""
    x, samples = n["X"], [_Samples(e, n, axis) for axis in (2, 3)]
    (row, row_weight), (column, column_weight) = (s.neighbors(e) for s in samples)
    count, bins = e.dim(row, 0), [e.dim(row, 1), e.dim(column, 1)]
    each = [e.size_mul(e.dim(v, 2), 2) for v in (row, column)]
    sizes = [count, 1, bins[0], each[0], bins[1], each[1]]
    tall, flat = ([*sizes[:4], 1, 1], [count, 1, 1, 1, *sizes[4:]])
    width = e.vector([samples[1].size])
    where = e.op("Add", e.op("Mul", e.reshape(row, tall), width), e.reshape(column, flat))
    weight = e.mul(e.reshape(row_weight, tall), e.reshape(column_weight, flat))
    batch, channels, height, breadth = (e.dim(x, axis) for axis in range(4))
    own = e.gather(e.reshape(x, [batch, channels, e.size_mul(height, breadth)]), n["batch_indices"], axis=0)
    picked_shape = [count, channels, e.size_mul(*sizes[2:])]
    places = e.op("Expand", e.reshape(where, [count, 1, picked_shape[2]]), e.vector(picked_shape))
    picked = e.reshape(e.op("GatherElements", own, places, axis=2), [count, channels, *sizes[2:]])
    values = e.mul(picked, _as(e, weight, x))
    for axis, s in zip((3, 5), samples, strict=True):
        if s.counted is not None:  # the others are -inf; a bin without samples is 0
            counted = e.op("Concat", *[e.unsqueeze(s.counted, [3])] * 2, axis=3)  # [R, 1, S, 2]
            shape = [count, 1, 1, 1, 1, 1]
            shape[axis] = each[axis // 2 - 1]
            values = e.where(e.reshape(counted, shape), values, _LOWEST)
    largest = e.reduce("ReduceMax", e.transpose(values, [0, 1, 2, 4, 3, 5]), [4, 5], keepdims=False)
    return e.typed(e.where(e.compare("Equal", largest, _LOWEST), 0, largest), n.y)


# -- MaxRoiPool --------------------------------------------------------------------------------------------------------


@vjp("MaxRoiPool", wrt="X", note="rois are rounded", factors=_FACTORS, moves="fills", monotone="rising")
def max_roi_pool_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[r, c, p, q] = x.flat[i], the first of the largest elements in the rows of p and the columns of q: dx.flat[i] += g.

    A bin without elements is 0 and gives none.
    """
    x, rois = n["X"], e.cast(n["rois"], ir.DataType.FLOAT)
    places, some = _winners(e, n, rois)
    updates = e.where(some, g["Y"], 0)
    size = e.op("Reshape", e.op("Size", x), e.ints([1]))
    zeros = e.typed(e.op("Expand", e.scalar(0, x), size), g["Y"])
    zeros.shape = ir.Shape([None])
    return e.reshape_like(scatter(e, zeros, flatten(e, places), flatten(e, updates), 0, "add"), x)


def _winners(e: Emitter, n: Call, rois: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The position in x of the maximum of each bin `[R, C, P, Q]`, and whether the bin has elements `[R, 1, P, Q]`.

    The maximum over the columns first, then over the rows: the first in row-major order.
    """
    x = n["X"]
    shape = n.ints("pooled_shape") or ()
    require(len(shape) == 2, f"pooled_shape must be two numbers, not {list(shape)}.")
    e.check_bytes(8 * sum(shape), f"The table of {list(shape)} bins")
    batch = e.cast(e.slice(rois, [0], [1], [1]), ir.DataType.INT64)  # [R, 1]
    images = e.gather(x, e.squeeze(batch, [1]), axis=0)  # [R, C, H, W]
    lowest = np.finfo((x.dtype or ir.DataType.FLOAT).numpy()).min
    images = e.op("Max", images, e.scalar(lowest, images))  # above what stands for elements outside
    channels, height, width = (e.vector([e.dim(x, axis)]) for axis in (1, 2, 3))
    in_rows, in_columns = (_inside(e, n, rois, axis, shape[axis - 2]) for axis in (2, 3))  # [R, P, H], [R, Q, W]
    best, column = [], []
    for q in range(shape[1]):
        inside = e.unsqueeze(e.slice(in_columns, [q], [q + 1], [1]), [2])  # [R, 1, 1, W]
        row = e.where(inside, images, _LOWEST)
        best.append(e.reduce("ReduceMax", row, [3]))
        column.append(e.op("ArgMax", row, axis=3, keepdims=1))
    best_of_rows, columns = e.concat(best, 3), e.concat(column, 3)  # [R, C, H, Q]
    plane = e.op("Add", e.op("Mul", e.unsqueeze(batch, [2]), channels), e.unsqueeze(e.arange(e.dim(x, 1)), [1]))
    places = []
    for p in range(shape[0]):
        inside = e.unsqueeze(e.transpose(e.slice(in_rows, [p], [p + 1], [1]), [0, 2, 1]), [1])  # [R, 1, H, 1]
        row = e.op("ArgMax", e.where(inside, best_of_rows, _LOWEST), axis=2, keepdims=1)  # [R, C, 1, Q]
        line = e.op("Add", e.op("Mul", e.unsqueeze(plane, [3]), height), row)
        places.append(e.op("Add", e.op("Mul", line, width), e.op("GatherElements", columns, row, axis=2)))
    some = [e.op("ReduceMax", e.cast(v, ir.DataType.INT32), e.ints([2]), keepdims=0) for v in (in_rows, in_columns)]
    tall, flat = e.unsqueeze(some[0], [1, 3]), e.unsqueeze(some[1], [1, 2])
    return e.concat(places, 2), e.compare("Greater", e.op("Mul", tall, flat), 0)


def _inside(e: Emitter, n: Call, rois: ir.Value, axis: int, bins: int) -> ir.Value:
    """A mask of the elements along an axis in each bin of each region: `[R, bins, size]`; rounded as in ONNX Runtime."""
    begin, end = (
        _rounded(e, e.mul(e.slice(rois, [at], [at + 1], [1]), n.float("spatial_scale", 1.0)))
        for at in (4 - axis, 6 - axis)
    )
    share = e.div(e.op("Max", e.add(e.sub(end, begin), 1), 1), bins)  # [R, 1]
    first = e.add(e.op("Floor", e.mul(share, e.const(np.arange(bins, dtype=np.float32)))), begin)  # [R, bins]
    last = e.add(e.op("Ceil", e.mul(share, e.const(np.arange(1, bins + 1, dtype=np.float32)))), begin)
    at = e.cast(e.arange(e.dim(n["X"], axis)), ir.DataType.FLOAT)
    first, last = e.unsqueeze(first, [2]), e.unsqueeze(last, [2])
    return e.op("And", e.compare("GreaterOrEqual", at, first), e.compare("Less", at, last))


def _rounded(e: Emitter, value: ir.Value) -> ir.Value:
    """Rounded to the nearest integer, halves away from zero."""
    return e.mul(e.op("Sign", value), e.op("Floor", e.add(e.op("Abs", value), 0.5)))
