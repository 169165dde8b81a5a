"""Reductions: axes as constant, fed, empty and absent operands; dropped and kept axes; ties and zeros."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onnx_convgrad import api
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, check, rand
from tests.support.operators import autograd, rule_test, text_model

NAMES = "Sum Mean Max Min Prod L1 L2 LogSum LogSumExp SumSquare".split()
X = rand(2, 3, 4, low=0.5, high=2.0)  # positive, for the logarithm
SIGNED = rand(2, 3, 4)
NONE = np.zeros(0, np.int64)

CASES = [
    case
    for op in (f"Reduce{name}" for name in NAMES)
    for case in (
        Case(op, [X]),
        Case(op, [X], {"keepdims": 0}),
        Case(op, [X, np.asarray([1])]),
        Case(op, [X, np.asarray([0, -1])], {"keepdims": 0}),
        Case(op, [X, np.asarray([-2])], {"keepdims": 0}, feed_integers=True, name="fed"),
        Case(op, [X, NONE], {"noop_with_empty_axes": 1}, name="no axes"),
        Case(op, [rand(2, 1, 3, low=0.5), NONE], {"keepdims": 0, "noop_with_empty_axes": 1}, name="no axes"),
        Case(op, [X, NONE], {"keepdims": 0}, feed_integers=True, name="all axes"),
        Case(op, [X, NONE], {"keepdims": 0, "noop_with_empty_axes": 1}, feed_integers=True, name="no axes"),
        Case(op, [X], {"noop_with_empty_axes": 1, "keepdims": 0}, name="absent axes, noop"),
        Case(op, [X, np.asarray([1])], dtype=np.float16),
        Case(op, [X, np.asarray([1])], dtype=np.float64),
        Case(op, [rand(0, 3, low=0.5), np.asarray([1])], name="empty"),
        Case(op, [X], {"axes": [1], "keepdims": 0}, opset=11),
    )
] + [
    Case(f"Reduce{name}", [SIGNED, np.asarray([1])], name="signed")
    for name in ("Prod", "L1", "L2", "SumSquare", "LogSumExp")
]

test_rule = rule_test(CASES)


def zeros(*places: int) -> np.ndarray:
    x = np.asarray([[1.5, -2.0, 0.7, 3.0]], np.float32)
    x[0, list(places)] = 0
    return x


@pytest.mark.parametrize("places", [(1,), (1, 2), (0, 1, 3)], ids=str)
def test_product_with_zeros_to_second_order(places: tuple[int, ...]) -> None:
    check(Case("ReduceProd", [zeros(*places), np.asarray([1])], name=f"zeros at {places}"))


def gradient(op: str, points: np.ndarray) -> np.ndarray:
    """The gradient of a reduction over the last axis, seeded with ones."""
    model = text_model(
        f"(float[N, M] x) => (float[N] y) <int64[1] last = {{-1}}> {{ y = {op} <keepdims = 0> (x, last) }}"
    )
    return run(api.augment(model, wrt=["x"], cotangents="ones"), {"x": points.astype(np.float32)})["x_grad"]


CONVENTIONS = {
    "ReduceMax": lambda t, x: t.amax(x, -1),
    "ReduceMin": lambda t, x: t.amin(x, -1),
    "ReduceL1": lambda t, x: t.linalg.vector_norm(x, 1, -1),
    "ReduceL2": lambda t, x: t.linalg.vector_norm(x, 2, -1),
    "ReduceProd": lambda t, x: t.prod(x, -1),
    "ReduceLogSumExp": lambda t, x: t.logsumexp(x, -1),
}


@pytest.mark.parametrize("op", CONVENTIONS)
def test_pytorch_convention_at_ties_and_zeros(op: str) -> None:
    points = np.asarray([[1, 3, 3], [0, 0, 0], [2, 0, -1], [2, 0, 0], [-100, 90, 90.0]])
    (want,) = autograd(lambda x: CONVENTIONS[op](torch, x), points)
    np.testing.assert_allclose(gradient(op, points), want, rtol=1e-5, atol=1e-6)


def test_mean_over_more_elements_than_float16_can_count() -> None:
    model = text_model(
        "(float16[2, N] x) => (float16[2] y) <int64[1] last={-1}> { y = ReduceMean <keepdims = 0> (x, last) }"
    )
    feed = {"x": np.ones((2, 70_000), np.float16), "y_grad": np.full(2, 1024, np.float16)}
    got = run(api.augment(model, wrt=["x"]), feed)["x_grad"]
    np.testing.assert_allclose(got, np.full_like(got, 1024 / 70_000), rtol=1e-2)


def test_mean_over_an_unknown_number_is_as_exact_as_its_type() -> None:
    model = text_model("(double[N] x) => (double y) { y = ReduceMean <keepdims = 0> (x) }")
    got = run(api.augment(model, wrt=["x"]), {"x": np.ones(6)})["x_grad"]
    np.testing.assert_array_equal(got, np.full(6, 1 / 6))


@pytest.mark.parametrize("shape", [(0, 3, 1), (2, 0, 1), (0, 1, 1)], ids=str)
def test_gradients_without_elements_have_their_shape(shape: tuple[int, ...]) -> None:
    """ONNX Runtime removes an Expand to a size of 0 as if it changed nothing."""
    size = ",".join(map(str, shape))
    text = f"""(float[{size}] x) => (float z)
        <int64[2] axes = {{0, 2}}> {{ q = Neg (x) s = ReduceSum (q, axes) z = ReduceSum <keepdims = 0> (s) }}"""
    built = api.augment(text_model(text, opset=18), wrt=["x"])
    assert run(built, {"x": np.zeros(shape, np.float32)})["x_grad"].shape == shape
