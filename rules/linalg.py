"""Matrix products and determinants.

If one operand is a matrix and the other has a batch, the cotangent of the matrix is one product over all leading axes, which
needs no sum over the batch. If ranks are unknown, the graph reshapes the operands to at least two axes and multiplies them
with an Einsum with an ellipsis.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.batching import Batched, require_rule
from onnx_convgrad.autodiff.factors import SUM, Ahead, Factors, mix, notation, rank_of
from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.registry import Cotangents, batched, multilinear, per_sample, vjp
from onnx_convgrad.errors import require
from onnx_convgrad.ir.broadcasting import unbroadcast
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.cofactors import cofactors, leading_count
from onnx_convgrad.ir.emit import Dim, Emitter

# -- MatMul ------------------------------------------------------------------------------------------------------------


def _products(n: Call) -> Factors:
    """y[.., m, n] = sum over k of a[.., m, k] b[.., k, n]; a vector has k alone, and leading axes broadcast."""
    left, right = rank_of(n["A"]), rank_of(n["B"])
    most = max(left, right) - 2
    leading = [f"i{axis}" for axis in range(most)]
    ahead = [leading[most - max(rank - 2, 0) :] if rank > 2 else [] for rank in (left, right)]
    a = (*ahead[0], "m", "k") if left > 1 else ("k",)
    b = (*ahead[1], "k", "n") if right > 1 else ("k",)
    y = (*leading, *(["m"] if left > 1 else []), *(["n"] if right > 1 else []))
    return Factors((a, b), (y,), {"k": SUM}, broadcasts=True, ahead=Ahead((0, 1)) if min(left, right) > 1 else None)


@multilinear("MatMul", wrt=("A", "B"), parameters=("A", "B"), factors=_products)
def matmul_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """[m,k][k,n]->[m,n]: dA = [m,n][k,n]->[m,k], dB = [m,k][m,n]->[k,n], for each member of the batch."""
    a, b, gy = n["A"], n["B"], g["Y"]
    return {"A": lambda: _matmul_left(e, a, b, gy), "B": lambda: _matmul_right(e, a, b, gy)}


@batched("MatMul")
def matmul_batched(b: Batched, n: Call) -> list[ir.Value]:
    """The vectors of all examples are the rows of a matrix."""
    require_rule(b.rank(n["A"]) == 1 and b.rank(n["B"]) == 2 and n["B"] not in b)
    return [b.e.matmul(b[n["A"]], n["B"])]


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _matmul_left(e: Emitter, a: ir.Value, b: ir.Value, gy: ir.Value) -> ir.Value:
    ra, rb = _rank(a), _rank(b)
    if rb == 1:  # y[.., m] = a[.., m, k] b[k]; if a is a vector, y is a scalar and the form is the same
        return e.mul(e.unsqueeze(gy, [-1]), b)
    if ra == 1 and rb is not None:  # y[.., n] = a[k] b[.., k, n]; with a column, because ONNX Runtime 1.32 errs in w' g
        return e.squeeze(e.matmul(b, e.unsqueeze(gy, [-1])), [-1])
    if ra == 2 and rb == 2:
        return e.op("Gemm", gy, b, transB=1)
    if rb == 2 or (ra is not None and rb is not None):
        return e.matmul(gy, e.transpose(b, [1, 0]) if rb == 2 else e.swap_last(b))
    _, matrices, cotangent, _ = _matrices(e, a, b, gy)
    return e.op("Einsum", cotangent, matrices, equation="...mn,...kn->...mk")


def _matmul_right(e: Emitter, a: ir.Value, b: ir.Value, gy: ir.Value) -> ir.Value:
    ra, rb = _rank(a), _rank(b)
    if ra == 1 and rb == 1:
        return e.mul(a, gy)
    if rb == 1:
        return e.matmul(e.reshape(gy, [-1]), _rows(e, a, e.dim(b, 0)))
    if ra == 1 and rb is not None:
        return e.mul(e.unsqueeze(a, [1]), e.unsqueeze(gy, [-2]))
    if rb == 2:  # every leading axis of a and y is summed over: one product
        return e.op("Gemm", _rows(e, a, e.dim(b, 0)), _rows(e, gy, e.dim(b, 1)), transA=1)
    if ra is not None and rb is not None:
        return e.matmul(e.swap_last(a), gy)
    matrices, _, cotangent, batch = _matrices(e, a, b, gy)
    result = e.op("Einsum", matrices, cotangent, equation="...mk,...mn->...kn")
    own = e.op("Slice", e.op("Shape", b), e.ints([-2]), e.ints([2**31 - 1]), e.ints([0]))
    return e.op("Reshape", result, e.concat([batch, own], 0), allowzero=1)


def _rows(e: Emitter, value: ir.Value, width: Dim) -> ir.Value:
    """A matrix with all axes but the last merged."""
    rank = _rank(value)
    if rank == 2:
        return value
    return e.reshape(value, [leading_count(e, value, 1), width])


def _matrices(e: Emitter, a: ir.Value, b: ir.Value, gy: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Operands and cotangent of unknown rank as matrices with equally many batch axes, and the shape of the batch.

    ONNX Runtime requires an ellipsis to stand for the same number of axes in every operand.
    """
    one, two = e.ints([1]), e.ints([2])
    shape_a, shape_b = e.op("Shape", a), e.op("Shape", b)
    rank_a, rank_b = e.op("Shape", shape_a), e.op("Shape", shape_b)
    rank = e.op("Max", rank_a, rank_b, two)

    def ones(count: ir.Value) -> ir.Value:
        return e.op("Expand", one, count)

    column = e.op("Sub", e.op("Max", rank_b, two), rank_b)  # 1 if b is a vector, which becomes a column
    begin_b = ones(e.op("Sub", e.op("Sub", rank, rank_b), column))
    left = e.op("Reshape", a, e.concat([ones(e.op("Sub", rank, rank_a)), shape_a], 0), allowzero=1)
    right = e.op("Reshape", b, e.concat([begin_b, shape_b, ones(column)], 0), allowzero=1)
    batch = e.op("Slice", e.op("Shape", gy), e.ints([0]), e.op("Sub", rank, two))
    m, n = e.op("Shape", left, start=-2, end=-1), e.op("Shape", right, start=-1)
    return left, right, e.op("Reshape", gy, e.concat([batch, m, n], 0), allowzero=1), batch


# -- Gemm --------------------------------------------------------------------------------------------------------------


def _gemm(n: Call) -> Factors:
    """y[m, n] = alpha sum over k of A'[m, k] B'[k, n] + beta C, where C broadcasts."""
    a = ("k", "m") if n.int("transA", 0) else ("m", "k")
    b = ("n", "k") if n.int("transB", 0) else ("k", "n")
    c = [None if v is None else ("m", "n")[2 - rank_of(v) :] for v in n.inputs[2:]]
    return Factors((a, b, *c), (("m", "n"),), {"k": SUM}, broadcasts=True)


@batched("Gemm")
def gemm_batched(b: Batched, n: Call) -> list[ir.Value]:
    """A product of batches of matrices, scaled and shifted as Gemm does."""
    e = b.e

    def factor(name: str, turned: str) -> ir.Value:
        value = b[n[name]]
        return e.transpose(value, [0, 2, 1] if n[name] in b else [1, 0]) if n.int(turned, 0) else value

    product = e.mul(e.matmul(factor("A", "transA"), factor("B", "transB")), n.float("alpha", 1.0))
    bias, beta = n.get("C"), n.float("beta", 1.0)
    return [product if bias is None or beta == 0 else e.add(product, e.mul(b.aligned(bias, 2), beta))]


@vjp("Gemm", wrt=("A", "B", "C"), parameters=("A", "B", "C"), factors=_gemm, affine=("A C", "B C"))
def gemm_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y = alpha A' B' + beta C: dA' = alpha g B'^T, dB' = alpha A'^T g, dC = beta g, summed where C is broadcast."""
    a, b, gy = n["A"], n["B"], g["Y"]
    ta, tb = n.int("transA", 0), n.int("transB", 0)
    alpha, beta = n.float("alpha", 1.0), n.float("beta", 1.0)

    def product(left: ir.Value, right: ir.Value, trans_left: int, trans_right: int) -> ir.Value:
        scaled = alpha if alpha != 1 else None
        return e.op("Gemm", left, right, alpha=scaled, transA=trans_left or None, transB=trans_right or None)

    return {
        "A": lambda: product(b, gy, tb, 1) if ta else product(gy, b, 0, 1 - tb),
        "B": lambda: product(gy, a, 1, ta) if tb else product(a, gy, 1 - ta, 0),
        "C": lambda: e.mul(unbroadcast(e, gy, n["C"], n.y), beta) if beta else e.zeros_like(n["C"]),
    }


def _rows_of_samples(e: Emitter, value: ir.Value, count: Dim, width: Dim) -> ir.Value:
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
            rows = _rows_of_samples(e, x, batch.count, height)
            return e.matmul(e.swap_last(rows), _rows_of_samples(e, dy, batch.count, width))
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
    a, b, gy = n["A"], n["B"], g["Y"]
    at, alpha, beta = batch.of(n.y), n.float("alpha", 1.0), n.float("beta", 1.0)

    def weight() -> ir.Value:
        own = batch.of(a)
        require(own.plain or not n.int("transA", 0), "its operand A is transposed and has several columns per sample.")
        x, dy = batch.first(a, own), batch.first(gy, at)
        x = _rows_of_samples(e, x, batch.count, e.dim(b, 1 if n.int("transB", 0) else 0))
        dy = e.mul(_rows_of_samples(e, dy, batch.count, e.dim(gy, 1)), alpha)
        return e.matmul(e.swap_last(dy), x) if n.int("transB", 0) else e.matmul(e.swap_last(x), dy)

    return {"B": weight, "C": lambda: e.mul(batch.fit(gy, at, n["C"]), beta)}


# -- Det ---------------------------------------------------------------------------------------------------------------


_DETERMINANT = notation("*i j k -> *i", **dict.fromkeys("jk", mix("works on matrices along")), broadcasts=False)


@vjp("Det", wrt="X", factors=_DETERMINANT)
def det_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = det X: dX[i, j] = g C[i, j] with the cofactors C[i, j] = (-1)^(i+j) det(X without row i and column j).

    Unlike det(X) inverse(X)^T, this also holds for singular matrices, and ONNX has all operators for it.
    """
    return e.mul(cofactors(e, n["X"]), e.unsqueeze(g["Y"], [-2, -1]))
