"""Softmax, LogSoftmax, Hardmax, and the cross-entropy losses, which are differentiated by their function bodies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from onnx_convgrad import api
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import autograd, rule_test, text_model

X = rand(4, 5)
LABELS = np.asarray([1, 0, 4, 2])
IMAGE_LABELS = np.asarray([[[0, 1], [2, 1]], [[1, 1], [0, 2]]])
REDUCTIONS = ("mean", "sum", "none")

CASES = [
    *(Case(op, [rand(2, 3, 4)], {"axis": axis}) for op in ("Softmax", "LogSoftmax") for axis in (0, 1, -1)),
    *(Case(op, [X], dtype=dtype) for op in ("Softmax", "LogSoftmax") for dtype in (np.float16, np.float64)),
    *(Case(op, [rand(0, 3)], name="empty") for op in ("Softmax", "LogSoftmax")),
    *(Case(op, [rand(2, 3, 4)], {"axis": 1}, opset=11) for op in ("Softmax", "LogSoftmax")),
    Case("Hardmax", [X], step=1e-7),
]

LOSSES = [
    *(
        Case(op, [X, LABELS, weights], {"reduction": reduction, **ignore}, outputs=1, wrt=[0])
        for op, reduction, weights, ignore in itertools.product(
            ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"),
            REDUCTIONS,
            (None, np.asarray([0.5, 1, 2, 0.7, 1.5], np.float32)),
            ({}, {"ignore_index": 0}),
        )
    ),
    *(
        Case("SoftmaxCrossEntropyLoss", [X, LABELS], {"reduction": reduction}, outputs=2, name="and log_prob")
        for reduction in REDUCTIONS
    ),
    *(Case(op, [rand(2, 3, 2, 2), IMAGE_LABELS]) for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")),
    Case("SoftmaxCrossEntropyLoss", [X, LABELS.astype(np.int32)], feed_integers=True),
    Case("SoftmaxCrossEntropyLoss", [X, np.asarray([1, -100, 4, -100])], {"ignore_index": -100}),
    Case("SoftmaxCrossEntropyLoss", [X, LABELS, rand(5, low=0.5, high=2)], name="weights varied"),
]

test_rule, test_loss = rule_test(CASES), rule_test(LOSSES)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_large_and_masked_scores(op: str) -> None:
    """No overflow, and no NaN for positions with -inf, as in masked attention."""
    points = np.asarray([[1e4, -1e4, 0], [100, 99, -np.inf]])
    seed = np.asarray([[1, 2, 3], [1, -1, 0.5]])
    (want,) = autograd(lambda x: x.softmax(-1) if op == "Softmax" else x.log_softmax(-1), points, seed=seed)
    model = text_model(f"(float[2,3] x) => (float[2,3] y) {{ y = {op} (x) }}")
    feed = {"x": points.astype(np.float32), "y_grad": seed.astype(np.float32)}
    got = run(api.augment(model, wrt=["x"]), feed)["x_grad"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "asked"),
    [
        ("bad = IsNaN (p) y = Where (bad, zero, p)", 1),
        ("bad = IsNaN (p) c = Identity (p) y = Where (bad, zero, c)", 2),
        ("m = ReduceMax (mask, last) bad = Equal (m, low) y = Where (bad, zero, p)", 1),
    ],
    ids=["NaN is dropped", "NaN of a copy is dropped", "rows are dropped"],
)
def test_fully_masked_rows_have_no_gradient(nodes: str, asked: int) -> None:
    """Their probabilities are NaN, which models replace by zero; other rows are not affected."""
    mask = np.asarray([[0, -np.inf, 0], [-np.inf] * 3], np.float32)
    model = text_model(f"""(float[2,3] x, float[2,3] mask) => (float[2,3] y) <float zero = {{0}}, int64[1] last = {{-1}}> {{
        low = Constant <value = float {{-inf}}> () s = Add (x, mask) p = Softmax (s) {nodes} }}""")
    made = api.augment(model, wrt="x")
    assert [node.op_type for node in made.graph.node].count("IsNaN") == asked
    x, g = np.asarray([[1, 5, 2], [1, 2, 3]], np.float32), np.asarray([[3, 1, 1], [1, 2, 4]], np.float32)
    p = np.exp(1) / (np.exp(1) + np.exp(2))
    got = run(made, {"x": x, "mask": mask, "y_grad": g})
    np.testing.assert_allclose(got["y"], [[p, 0, 1 - p], [0, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(got["x_grad"], [[2 * p * (1 - p), 0, -2 * p * (1 - p)], [0, 0, 0]], rtol=1e-5)
