"""Dropout: modes and ratios that are constant, fed or computed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import one_node, rule_test, text_model

CASES = [
    Case("Dropout", [rand(3, 4)]),
    Case("Dropout", [rand(3, 4), np.array(0.3, np.float32)], constants=[1], wrt=[0]),
    Case("Dropout", [rand(3, 4), np.array(0.3, np.float32), np.array(False)], wrt=[0]),
    Case("Dropout", [rand(3, 4), np.array(0.3, np.float32), np.array(False)], wrt=[0], feed_integers=True),
    Case("Dropout", [rand(3, 4), np.array(0, np.float32), np.array(True)], wrt=[0], constants=[1]),
    # order 1, because a finite difference would move the fed ratio below 0
    Case("Dropout", [rand(3, 4), np.array(0, np.float32), np.array(True)], wrt=[0], name="ratio fed", order=1),
    Case("Dropout", [rand(3, 4), None, np.array(False)], outputs=2, dtype=np.float16),
    Case("Dropout", [rand(3, 4)], {"ratio": 0.3}, opset=10),
]

test_rule = rule_test(CASES)


@pytest.mark.parametrize("mode", ["constant", "fed"])
@pytest.mark.parametrize("mask", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("ratio", [None, 0.2])
def test_dropout_in_training(mode: str, mask: bool, ratio: float | None) -> None:
    """The local derivative is 0 for dropped entries and y / x for the others."""
    inputs = ["x", "" if ratio is None else "ratio", "training"]
    stored = {} if ratio is None else {"ratio": np.array(ratio, np.float32)}
    if mode == "constant":
        stored["training"] = np.array(True)
    model = one_node(helper.make_node("Dropout", inputs, ["y", "mask"] if mask else ["y"]), {"x": (40, 50)}, stored)
    if mode == "fed":
        model.graph.input.append(helper.make_tensor_value_info("training", onnx.TensorProto.BOOL, []))
    augmented = og.augment(model, wrt=["x"], of=["y"])
    x = np.random.default_rng(0).uniform(1, 2, (40, 50)).astype(np.float32)
    g = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    for training in [True, False] if mode == "fed" else [True]:
        feeds = {"x": x, "y_grad": g, "training": np.array(training)}
        got = run(augmented, {i.name: feeds[i.name] for i in augmented.graph.input})
        np.testing.assert_allclose(got["x_grad"], g * got["y"] / x, rtol=1e-5)
        dropped = float(np.mean(got["y"] == 0))
        assert abs(dropped - (0.5 if ratio is None else ratio)) < 0.05 if training else dropped == 0


def test_dropout_ratio_computed_at_run_time() -> None:
    model = one_node(helper.make_node("Dropout", ["x", "ratio", "training"], ["y"]), {"x": (40, 50), "ratio": ()},
                   {"training": np.array(True)})  # fmt: skip
    augmented = og.augment(model, wrt=["x"], of=["y"])
    x, g = np.full((40, 50), 2, np.float32), np.full((40, 50), 3, np.float32)
    got = run(augmented, {"x": x, "ratio": np.array(0.25, np.float32), "y_grad": g})
    np.testing.assert_allclose(got["x_grad"], 1.5 * got["y"], rtol=1e-5)


@pytest.mark.parametrize("opset", [7, 10])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_extreme_ratios_of_older_opsets(ratio: float, opset: int) -> None:
    """ONNX Runtime does not read the ratio of these nodes, and refuses a ratio of 1 in newer ones."""
    model = text_model(f"(float[2,4] x) => (float[2,4] y) {{ y = Dropout <ratio = {ratio}> (x) }}", opset)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for training in (False, True):
        got = run(og.augment(model, wrt="x", training=training), {"x": x, "y_grad": x + 1})
        kept = 0 if training and ratio else 1
        np.testing.assert_array_equal(got["y"], kept * x)
        np.testing.assert_array_equal(got["x_grad"], kept * (x + 1))
    tangent = run(og.jvp(model, wrt="x"), {"x": x, "x_tangent": x + 1})["y_tangent"]
    np.testing.assert_array_equal(tangent, x + 1)


@pytest.mark.parametrize("opset", [10, 21])
def test_all_is_dropped_in_training_where_the_ratio_is_1(opset: int) -> None:
    node = "Dropout <ratio = 1.0> (x)" if opset < 12 else "Dropout (x, r)"
    stored = "" if opset < 12 else "<float r = {1}>"
    text = f"(float[2,4] x) => (float[2,4] y, bool[2,4] mask) {stored} {{ y, mask = {node} }}"
    x = np.ones((2, 4), np.float32)
    got = run(og.augment(text_model(text, opset), wrt="x", of="y", training=True), {"x": x, "y_grad": x})
    assert not any(got[name].any() for name in ("y", "mask", "x_grad"))


@pytest.mark.parametrize("ratio", [-0.5, 1.5])
def test_ratios_that_are_no_share_are_refused_in_training(ratio: float) -> None:
    model = text_model(f"(float[2] x) => (float[2] y) {{ [drop] y = Dropout <ratio = {ratio}> (x) }}", 10)
    ones = np.ones(2, np.float32)
    np.testing.assert_array_equal(run(og.vjp(model, wrt="x"), {"x": ones, "y_grad": ones})["x_grad"], ones)
    with pytest.raises(
        og.errors.ModelError, match=f"Dropout 'drop' has the ratio {ratio}; in training it is a number from 0 to 1"
    ):
        og.augment(model, wrt="x", training=True)
