"""Gradients per sample for the weights of matrix products, tables and normalizations.

The sums are those of the ordinary rules, but not over the samples n. With these on the first axis,

    MatMul, Gemm   dB[n, k, j] = sum over the rows p of sample n of A[n, p, k] g[n, p, j]
    Gather         dT[n, v] = sum over the positions p of sample n whose index is v of g[n, p]
    normalization  dscale[n, c] = sum over the positions p of g[n, c, p] xhat[n, c, p], dB[n, c] = sum over p of g[n, c, p]

A `Batch` moves the samples of a value to the first axis (`first`) and sums over other axes (`sum`, `fit`).
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.registry import Cotangents, per_sample
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.normalized import Channels, Normalized, axes_from, inverse_deviation, size_from
from onnx_convgrad.ir.scatter import scatter

# -- products ----------------------------------------------------------------------------------------------------------


def _rows(e: Emitter, value: ir.Value, count: Dim, width: Dim) -> ir.Value:
    """The value, with samples on the first axis, as one matrix per sample: [N, P, width]."""
    return e.reshape(value, [count, e.size_mul(1, *e.dims(value)[1:-1]), width])


@per_sample("MatMul")
def matmul_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y[.., m, n] = sum over k of a[.., m, k] b[.., k, n]: one product per sample.

    Its cotangent for a matrix on the right sums over all rows of the sample, for other weights over leading axes.
    """
    a, b, gy = n["A"], n["B"], g["Y"]
    at, rank = batch.of(n.y), len(e.dims(n.y))

    def right() -> ir.Value:
        x, dims = batch.first(a, batch.of(a)), e.dims(b)
        if all(d == 1 for d in dims[:-2]):
            height, width = (*dims, 1) if len(dims) == 1 else dims[-2:]
            dy = batch.first(e.unsqueeze(gy, [-1]) if len(dims) == 1 else gy, at)
            rows = _rows(e, x, batch.count, height)
            return e.matmul(e.swap_last(rows), _rows(e, dy, batch.count, width))
        leading(a, b)
        return batch.fit(e.matmul(e.swap_last(x), batch.first(gy, at)), batch.leading, b)

    def left() -> ir.Value:
        x, dy = batch.first(b, batch.of(b)), batch.first(gy, at)
        if len(e.dims(a)) == len(e.dims(b)) == 2 and batch.of(b).plain:  # one column per sample
            return e.matmul(e.unsqueeze(dy, [-1]), e.unsqueeze(x, [1]))
        leading(b, a)
        return batch.fit(e.matmul(dy, e.swap_last(x)), batch.leading, a)

    def leading(data: ir.Value, weight: ir.Value) -> None:
        dims = e.dims(weight)
        alike = at.axis < rank - len(dims) or (at.axis == 0 and len(dims) == rank and dims[0] == 1)
        require(
            len(e.dims(data)) == rank and alike and len(dims) > 1,
            f"the gradient per sample of a weight of shape {weight.shape} is not known with the samples on axis {at.axis}.",
        )

    return {"A": left, "B": right}


@per_sample("Gemm")
def gemm_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y[n] = alpha A[n] B' + beta C, with one or more rows per sample: dB' = alpha A[n]' g[n], dC = beta g[n]."""
    a, b, c, gy = n["A"], n["B"], n.get("C"), g["Y"]
    at, alpha, beta = batch.of(n.y), n.float("alpha", 1.0), n.float("beta", 1.0)

    def weight() -> ir.Value:
        own = batch.of(a)
        require(own.plain or not n.int("transA", 0), "its operand A is transposed and has several columns per sample.")
        x, dy = batch.first(a, own), batch.first(gy, at)
        x = _rows(e, x, batch.count, e.dim(b, 1 if n.int("transB", 0) else 0))
        dy = e.mul(_rows(e, dy, batch.count, e.dim(gy, 1)), alpha)
        return e.matmul(e.swap_last(dy), x) if n.int("transB", 0) else e.matmul(e.swap_last(x), dy)

    def bias() -> ir.Value:
        assert c is not None
        return e.mul(batch.fit(gy, at, c), beta)

    return {"B": weight, "C": bias}


@per_sample("Gather")
def gather_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y[n, p] = T[i[n, p]]: dT[n, v] = sum over the p with i[n, p] = v of g[n, p]."""
    table, indices, gy = n["data"], n["indices"], g["output"]

    def cotangent() -> ir.Value:
        require(n.int("axis", 0) % len(e.dims(table)) == 0, "it gathers along an axis other than the first.")
        count, size, width = batch.count, e.dim(table, 0), e.size_mul(1, *e.dims(table)[1:])
        picked = batch.first(e.cast(indices, ir.DataType.INT64), batch.of(indices))
        where = e.reshape(picked, [count, e.size_mul(1, *e.dims(picked)[1:]), 1])
        dy = e.reshape(batch.first(gy, batch.of(n.y)), [count, e.dim(where, 1), width])
        rows = e.op("Expand", e.scalar(0, gy), e.vector([count, size, width]))
        return scatter(e, rows, e.op("Expand", where, e.shape(dy)), dy, 1, "add")

    return {"data": cotangent}


@per_sample("Tile")
def tile_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y holds one copy of x per sample: dx[n] = g[n]."""
    return {"input": lambda: batch.first(g["output"], batch.of(n.y))}


# -- normalizations ----------------------------------------------------------------------------------------------------


@per_sample("BatchNormalization")
def batch_normalization_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y[n, c, p] = scale[c] (x[n, c, p] - mean[c]) r[c] + B[c] with given statistics, which are differentiated too."""
    x, at, gy = n["X"], batch.of(n.y), e.wide(g["Y"])
    channels = Channels(e, x)
    inverse = e.cast_like(inverse_deviation(e, e.wide(n["input_var"]), n.float("epsilon", 1e-5)), gy)

    def total() -> ir.Value:
        return batch.sum(gy, at, [1])

    def moment() -> ir.Value:
        centered = e.sub(e.wide(x), channels.spread(e.cast_like(e.wide(n["input_mean"]), gy)))
        return batch.sum(e.mul(gy, centered), at, [1])

    def factor() -> ir.Value:
        return e.mul(e.cast_like(e.wide(n["scale"]), gy), inverse)

    return {
        "scale": lambda: e.cast_like(e.mul(moment(), inverse), n["scale"]),
        "B": lambda: e.cast_like(total(), n["B"]),
        "input_mean": lambda: e.cast_like(e.mul(total(), e.neg(factor())), n["input_mean"]),
        "input_var": lambda: e.cast_like(
            e.mul(moment(), e.mul(factor(), e.mul(e.square(inverse), -0.5))), n["input_var"]
        ),
    }


@per_sample("InstanceNormalization", "GroupNormalization")
def channel_normalization_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y[n, c, p] = scale[c] xhat[n, c, p] + B[c]: dscale[n, c] = sum over p of g xhat, dB[n, c] = sum over p of g."""
    x = e.wide(n.node.inputs[0])  # type: ignore[arg-type] # never absent
    gy, at, epsilon = e.wide(g[n.names[1][0]]), batch.of(n.y), n.float("epsilon", 1e-5)
    bias = n.names[0][2]

    def scale() -> ir.Value:
        if n.node.op_type == "InstanceNormalization":
            value = Normalized.of(e, x, axes_from(e, x, 2), epsilon).value
        else:
            groups = n.int("num_groups", 1)
            grouped = e.reshape(x, [e.dim(x, 0), groups, e.size_div(size_from(e, x, 1), groups)])
            value = e.reshape_like(Normalized.of(e, grouped, e.ints([2]), epsilon).value, x)
        return e.cast_like(batch.sum(e.mul(gy, value), at, [1]), n["scale"])

    return {"scale": scale, bias: lambda: e.cast_like(batch.sum(gy, at, [1]), n[bias])}


@per_sample("LayerNormalization")
def layer_normalization_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y = Scale xhat + B: dScale[n] = g xhat and dB[n] = g, summed over the axes along which Scale and B broadcast."""
    x, at = e.wide(n["X"]), batch.of(n.y)
    if g["Y"] is None:
        return {}
    gy = e.wide(g["Y"])

    def scale() -> ir.Value:
        normalized = Normalized.of(e, x, axes_from(e, x, n.int("axis", -1)), n.float("epsilon", 1e-5))
        return e.cast_like(batch.fit(e.mul(gy, normalized.value), at, n["Scale"]), n["Scale"])

    return {"Scale": scale, "B": lambda: e.cast_like(batch.fit(gy, at, n["B"]), n["B"])}
