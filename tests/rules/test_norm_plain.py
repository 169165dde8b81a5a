"""LpNormalization, MeanVarianceNormalization and LRN."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import onnx_convgrad as og
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import one_node, rule_test

CASES = [
    *(Case("LpNormalization", [rand(2, 4, 3)], {"p": p, "axis": axis}) for p in (1, 2) for axis in (-1, 0, 1)),
    Case("LpNormalization", [rand(4)]),
    Case("LpNormalization", [rand(3, 4)], dtype=np.float64),
    Case("LpNormalization", [rand(3, 4)], dtype=np.float16),
    Case("MeanVarianceNormalization", [rand(2, 3, 2, 4)], {"axes": [0, 2, 3]}),
    Case("MeanVarianceNormalization", [rand(2, 3, 4)], {"axes": [0, 2]}),
    Case("MeanVarianceNormalization", [rand(2, 3, 4)], {"axes": [-1]}),
    Case("MeanVarianceNormalization", [rand(2, 3, 2, 4)], {"axes": [0, 2, 3]}, dtype=np.float16),
    # as many samples as channels, which ONNX's reference evaluator confuses
    *(Case("LRN", [rand(4, 4, 2, 3)], {"size": size, "alpha": 0.5}) for size in (1, 3, 5, 9)),
    Case("LRN", [rand(4, 4, 2, 3)], {"size": 3}),
    Case("LRN", [rand(4, 4, 2, 3)], {"size": 3, "alpha": 1.0, "beta": 0.5, "bias": 2.0}),
    Case("LRN", [rand(4, 4, 2, 3)], {"size": 3, "alpha": 1.0}, dtype=np.float16),
]

test_rule = rule_test(CASES)


def test_mean_variance_normalization_by_default() -> None:
    """The default axes are 0, 2 and 3; the gradient of a constant channel is finite."""
    shapes = {"x": (2, 3, 2, 4)}
    plain, explicit = (
        og.vjp(one_node(helper.make_node("MeanVarianceNormalization", ["x"], ["y"], **attributes), shapes), wrt=["x"])
        for attributes in ({}, {"axes": [0, 2, 3]})
    )
    generator = np.random.default_rng(0)
    feeds = {"x": generator.normal(size=(2, 3, 2, 4)).astype(np.float32)}
    feeds["x"][:, 1] = 0.5
    feeds["y_grad"] = generator.normal(size=(2, 3, 2, 4)).astype(np.float32)
    got = run(plain, feeds)["x_grad"]
    np.testing.assert_array_equal(got, run(explicit, feeds)["x_grad"])
    assert np.isfinite(got).all()


@pytest.mark.parametrize("p", [1, 2])
def test_lp_normalization_of_zeros(p: int) -> None:
    """The norm of zeros has no derivative; the gradient is taken to be zero."""
    model = og.vjp(one_node(helper.make_node("LpNormalization", ["x"], ["y"], p=p), {"x": (2, 3)}), wrt=["x"])
    x = np.array([[0, 0, 0], [1, 2, -2]], np.float32)
    got = run(model, {"x": x, "y_grad": np.ones_like(x)})["x_grad"]
    assert np.isfinite(got).all()
    assert not got[0].any()
    assert got[1].any()


@pytest.mark.parametrize("size", [2, 4])
def test_lrn_of_an_even_size(size: int) -> None:
    """ONNX Runtime refuses even sizes; the window then extends one more channel up than down."""
    node = helper.make_node("LRN", ["x"], ["y"], size=size, alpha=0.7)
    model = one_node(node, {"x": (4, 4, 1, 2)})
    gradient = og.vjp(model, wrt=["x"])
    generator = np.random.default_rng(0)
    x, g, v = (generator.uniform(-2, 2, (4, 4, 1, 2)) for _ in range(3))
    forward = ReferenceEvaluator(model)
    numeric = np.vdot(g, forward.run(None, {"x": x + 1e-5 * v})[0] - forward.run(None, {"x": x - 1e-5 * v})[0]) / 2e-5
    feeds = {"x": x.astype(np.float32), "y_grad": g.astype(np.float32)}
    got = ReferenceEvaluator(gradient).run(None, feeds)[0]
    assert abs(np.vdot(got, v) - numeric) <= 1e-4 * np.linalg.norm(got) * np.linalg.norm(v)


def test_refused() -> None:
    model = one_node(helper.make_node("LpNormalization", ["x"], ["y"], p=3), {"x": (2, 3)})
    with pytest.raises(DifferentiationError, match="p is 3; the operator is defined for 1 and 2"):
        og.vjp(model, wrt=["x"])
