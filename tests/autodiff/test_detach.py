"""Derivatives stop at an Identity whose note says that it is PyTorch's `detach`."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.checking.check import check
from onnx_convgrad.ir.notes import OPERATION
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

X, G = np.array([[0.5, -1, 2]], np.float32), np.array([[1, 3, -2]], np.float32)
GATE = 1 / (1 + np.exp(-X))


def gated(operation: str = "detach.default", reader: str = "mul.Tensor") -> onnx.ModelProto:
    """x * sigmoid(x), of which the second factor is detached."""
    model = graph_of("(float[1, 3] x) => (float[1, 3] y) { s = Sigmoid (x) d = Identity (s) y = Mul (x, d) }")
    for node, name in zip(model.graph.node[1:], (operation, reader), strict=True):
        node.metadata_props.add(key=OPERATION, value=f"%{node.output[0]} : call_function[target=torch.ops.aten.{name}]")
    return model


def gradient(model: onnx.ModelProto, **settings: bool) -> np.ndarray:
    return run(og.vjp(model, wrt="x", **settings), {"x": X, "y_grad": G})["x_grad"]


def through(g: np.ndarray) -> np.ndarray:
    """The derivative of x * sigmoid(x) along or against `g`."""
    return g * (GATE + X * GATE * (1 - GATE))


def test_both_modes_stop() -> None:
    np.testing.assert_allclose(gradient(gated()), G * GATE, rtol=1e-6)
    tangent = run(og.jvp(gated(), wrt="x"), {"x": X, "x_tangent": G})["y_tangent"]
    np.testing.assert_allclose(tangent, G * GATE, rtol=1e-6)


def test_gradients_per_sample_stop() -> None:
    """The gradient of the gate does not reach the weight."""
    model = graph_of("""(float[2, 3] x) => (float[2, 3] y) <float[3] w = {1, 2, 3}>
        { z = Mul (x, w) s = Sigmoid (z) d = Identity (s) y = Mul (z, d) }""")
    model.graph.node[2].metadata_props.add(key=OPERATION, value="torch.ops.aten.detach.default")
    x, g = np.arange(6, dtype=np.float32).reshape(2, 3) / 4, np.ones((2, 3), np.float32)
    got = run(og.vjp(model, wrt="w", per_sample=True), {"x": x, "y_grad": g})["w_grad"]
    np.testing.assert_allclose(got, x / (1 + np.exp(-x * [1, 2, 3])), rtol=1e-6)


@pytest.mark.parametrize("model", [gated("clone.default"), gated(reader="embedding_renorm.default")])
def test_derivatives_pass_other_copies(model: onnx.ModelProto) -> None:
    """The weight of `Embedding(max_norm=...)` is detached only to be scaled in place."""
    np.testing.assert_allclose(gradient(model), through(G), rtol=1e-5)


def test_without_straight_through_the_numbers_are_differentiated() -> None:
    np.testing.assert_allclose(gradient(gated(), straight_through=False), through(G), rtol=1e-5)
    assert check(gated(), wrt="x").passed


def test_a_gradient_that_is_zero_for_it_says_so() -> None:
    with pytest.warns(UserWarning, match=r"of `of` depends on 's' but through values that PyTorch detaches: '.*'\."):
        og.vjp(gated(), wrt="s")


def test_a_detach_that_an_optimizer_removed_is_told_where_it_matters() -> None:
    """The note of the reader calls its operand by the name of a node that is gone."""
    model = graph_of("(float[1, 3] x, float[1, 3] z) => (float[1, 3] y) { s = Sigmoid (x) y = Mul (z, s) }")
    note = "%mul : call_function[target=torch.ops.aten.mul.Tensor](args = (%z, %detach_1), kwargs = {})"
    model.graph.node[1].metadata_props.add(key=OPERATION, value=note)
    with pytest.warns(UserWarning, match=r"PyTorch detaches what .* reads.*Export with optimize=False"):
        og.vjp(model, wrt="x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        og.vjp(model, wrt="z")
    model.graph.input[0].name = model.graph.node[0].input[0] = "detach_1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        og.vjp(model, wrt="detach_1")
