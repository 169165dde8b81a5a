"""Operators of ai.onnx.ml that are smooth functions of a table of features, as converters of scikit-learn write them.

Each is expanded to standard operators. Rows are samples and columns are features; a vector is one sample. The kernels take
any type of number and return float32. Labels, categories and trees are piecewise constant: see `zeros`. Linear models are
rewritten when a file is loaded, so that their coefficients can be trained: see `frontend.opset.converters_ml`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import Factors, mix, notation, pick, rank_of
from onnx_convgrad.autodiff.registry import expansion
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.post_transform import TRANSFORMS, transformed

_DOMAIN = "ai.onnx.ml"


def _numbers(n: Call, name: str) -> np.ndarray:
    """An attribute that lists numbers; empty if it is absent."""
    return np.asarray(n.attributes().get(name, ()), np.float32)


def _table(e: Emitter, x: ir.Value) -> ir.Value:
    """x in float32, with one row if it is a vector."""
    x = e.cast(x, ir.DataType.FLOAT)
    return e.unsqueeze(x, [0]) if x.shape is not None and len(x.shape) == 1 else x


_FEATURES = notation("n f -> n f")
_ROWS = notation("n f -> n f", f=mix("normalizes along"))
_SCORES = notation("n f -> n t", f=mix("weighs"))


def _joined(n: Call) -> Factors:
    """Tables of the same samples, side by side."""
    tables = [("n", f"f{i}") for i, v in enumerate(n.inputs) if rank_of(v) == 2]
    require(len(tables) == len(n.inputs), "an operand is not a table.")
    return Factors(tuple(tables), (("n", "f"),), {name: pick("joins") for _, name in tables})


# -- features ----------------------------------------------------------------------------------------------------------


@expansion(f"{_DOMAIN}::Scaler", wrt="X", factors=_FEATURES, affine=("X",))
def scaler(e: Emitter, n: Call) -> ir.Value:
    """y[s, f] = (x[s, f] - offset[f]) scale[f]."""
    x = e.cast(n["X"], ir.DataType.FLOAT)
    return e.typed(e.mul(e.sub(x, e.const(_numbers(n, "offset"))), e.const(_numbers(n, "scale"))), x)


@expansion(f"{_DOMAIN}::Normalizer", wrt="X", factors=_ROWS)
def normalizer(e: Emitter, n: Call) -> ir.Value:
    """y[s, f] = x[s, f] / |x[s]|: the maximum, the sum of magnitudes or the root of the sum of squares. Rows of 0 stay."""
    x, norm = e.cast(n["X"], ir.DataType.FLOAT), n.string("norm", "MAX")
    require(norm in ("MAX", "L1", "L2"), f"its norm {norm!r} is unknown.")
    reductions = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceSumSquare"}
    size = e.reduce(reductions[norm], x, [-1])
    size = e.where(e.compare("Equal", size, 0), 1, size)  # before the root, whose derivative at 0 is infinite
    return e.typed(e.div(x, e.op("Sqrt", size) if norm == "L2" else size), x)


@expansion(f"{_DOMAIN}::Imputer", wrt="X", factors=_FEATURES)
def imputer(e: Emitter, n: Call) -> ir.Value:
    """y[s, f] = imputed[f] where x[s, f] is the value to replace, which may be NaN, else x[s, f]."""
    x, replaced = n["X"], n.float("replaced_value_float", 0.0)
    missing = e.op("IsNaN", x) if np.isnan(replaced) else e.compare("Equal", x, replaced)
    return e.typed(e.where(missing, e.const(_numbers(n, "imputed_value_floats")), x), x)


@expansion(f"{_DOMAIN}::FeatureVectorizer", wrt="X", factors=_joined, affine=("X",), moves="fills", monotone="rising")
def feature_vectorizer(e: Emitter, n: Call) -> ir.Value:
    """y[s] = x_0[s], x_1[s], ... with so many features of each as `inputdimensions` says; missing ones are 0."""
    operands = [_table(e, v) for v in n.inputs if v is not None]
    counts = n.ints("inputdimensions") or ()
    require(len(counts) == len(operands), f"it has {len(operands)} inputs and {len(counts)} inputdimensions.")
    columns = []
    for x, count in zip(operands, counts, strict=True):
        rows = x if x.shape is not None and len(x.shape) == 2 else e.reshape(x, [e.dim(x, 0), -1])
        columns.append(e.pad(rows, [0], [e.size_sub(count, e.dim(rows, 1))], [1]))
    return e.concat(columns, 1)


# -- support vectors ---------------------------------------------------------------------------------------------------


def _transformed(e: Emitter, n: Call, scores: ir.Value) -> ir.Value:
    """Several scores after `post_transform`."""
    kind = n.string("post_transform", "NONE")
    require(
        kind in TRANSFORMS,
        f"its post_transform {kind} has no derivative here.",
        "Remove the transform, or convert with another.",
    )
    return transformed(e, scores, kind)


@expansion(f"{_DOMAIN}::SVMRegressor", wrt="X", factors=_SCORES)
def svm_regressor(e: Emitter, n: Call) -> ir.Value:
    """y[s] = sum over support vectors v of a[v] K(x[s], v) + rho; without any, sum over f of a[f] x[s, f] + rho."""
    x, weights, count = _table(e, n["X"]), _numbers(n, "coefficients"), n.int("n_supports", 0)
    similar = _kernel(e, n, x, _numbers(n, "support_vectors").reshape(count, -1)) if count else x
    rho = _numbers(n, "rho")
    y = e.add(e.matmul(similar, e.const(weights.reshape(-1, 1))), float(rho[0]) if rho.size else 0.0)
    return e.typed(e.op("Sign", y) if n.int("one_class", 0) else y, n.y)


@expansion(f"{_DOMAIN}::SVMClassifier", wrt="X", factors=notation("n f -> n, n t", f=mix("weighs")))
def svm_classifier(e: Emitter, n: Call) -> Sequence[ir.Value | None]:
    """d[s, i, j] = sum over v of a[i, j, v] K(x[s], v) + rho[i, j] for each pair of classes i < j.

    The scores of two classes are -d and d. Numbers `prob_a` and `prob_b` make the probabilities p and 1 - p of them, with
    p = sigmoid(-(prob_a d + prob_b)).
    """
    counts, rho = n.ints("vectors_per_class") or (), _numbers(n, "rho")
    remedy = "Take `of` before it or `wrt` after it; a linear model can be converted as a LinearClassifier."
    require(len(counts) > 1, "it has no support vectors.", remedy)
    vectors = _numbers(n, "support_vectors").reshape(sum(counts), -1)
    d = e.matmul(_kernel(e, n, _table(e, n["X"]), vectors), e.const(_of_pairs(n, counts)))
    d = e.add(d, e.const(rho))
    slope, shift = _numbers(n, "prob_a"), _numbers(n, "prob_b")
    if slope.size:
        require(
            len(counts) == 2,
            f"the probabilities of its {len(counts)} classes come from an iteration.",
            "Convert it without probabilities; the results are the decision values of pairs of classes then.",
        )
        p = e.op("Sigmoid", e.neg(e.add(e.mul(d, e.const(slope)), e.const(shift))))
        z = _transformed(e, n, e.concat([p, e.sub(1, p)], -1))
    elif len(counts) == 2:
        mixed = bool((_numbers(n, "coefficients") < 0).any())
        require(
            mixed and n.string("post_transform", "NONE") in ("NONE", "LOGISTIC"),
            "what ONNX Runtime makes of the score of two classes with this post_transform, or with weights that are all "
            "positive, has no rule.",
            "Convert it with post_transform NONE or LOGISTIC.",
        )
        z = _transformed(e, n, e.concat([e.neg(d), d], -1))
    else:
        z = _transformed(e, n, d)
    return [None, e.typed(z, n.out("Z"))]


def _of_pairs(n: Call, counts: Sequence[int]) -> np.ndarray:
    """The weight of each support vector for each pair of classes i < j: [vectors, pairs].

    Coefficients have a row for each other class: of a vector of class j, row i is that of the pair i, j, and of one of
    class i it is row j - 1.
    """
    given, of = _numbers(n, "coefficients").reshape(len(counts) - 1, -1), np.repeat(np.arange(len(counts)), counts)
    pairs = itertools.combinations(range(len(counts)), 2)
    return np.stack([np.where(of == i, given[j - 1], np.where(of == j, given[i], 0)) for i, j in pairs], 1)


def _kernel(e: Emitter, n: Call, x: ir.Value, vectors: np.ndarray) -> ir.Value:
    """K(x[s], v): [samples, vectors]."""
    if x.shape is None:
        x = e.reshape(x, [-1, vectors.shape[1]])
    parameters: Any = _numbers(n, "kernel_params").astype(float).tolist()
    gamma, shift, degree = parameters if len(parameters) == 3 else (0.0, 0.0, 0.0)
    kind = n.string("kernel_type", "LINEAR")
    require(kind in ("LINEAR", "POLY", "RBF", "SIGMOID"), f"its kernel {kind!r} is unknown.")
    if kind == "RBF":
        apart = e.sub(e.unsqueeze(x, [1]), e.const(vectors))  # [samples, vectors, features]
        return e.op("Exp", e.mul(e.reduce("ReduceSumSquare", apart, [2], keepdims=False), -gamma))
    product = e.matmul(x, e.const(vectors.T))
    if kind == "LINEAR":
        return product
    inner = e.add(e.mul(product, gamma), shift)
    return e.op("Tanh", inner) if kind == "SIGMOID" else e.op("Pow", inner, e.scalar(degree, inner))
