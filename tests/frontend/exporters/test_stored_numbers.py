"""Stored numbers that are differentiated: rules must not simplify for the values that they hold now."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.ir.notes import INITIALIZER_KIND
from onnx_convgrad.pipeline.options import COMPOSITIONS
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

X, U, V = np.asarray([0.5, 1.5, 2.0]), np.asarray([0.7, -0.2, 0.4]), np.asarray([0.3])


def power(exponent: float, shape: str = "[1]") -> onnx.ModelProto:
    """The sum of x^p, with p stored."""
    text = f"(double[3] x) => (double y) <double{shape} p = {{{exponent}}}> {{ q = Pow(x, p) y = ReduceSum"
    return graph_of(f"{text} <keepdims = 0> (q) }}")


def slopes(exponent: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    x, p = (torch.tensor(a, requires_grad=True) for a in (X, np.asarray([exponent])))
    return [x, p], list(torch.autograd.grad((x**p).sum(), [x, p], create_graph=True))


@pytest.mark.parametrize("exponent", [3.0, 2.0, 1.0, 0.5, 2.5])
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_second_order_with_an_exponent(exponent: float, composition: str) -> None:
    leaves, (dx, dp) = slopes(exponent)
    want = torch.autograd.grad((dx * torch.tensor(U)).sum() + (dp * torch.tensor(V)).sum(), leaves)
    model = og.hvp(power(exponent), wrt=["x", "p"], of="y", composition=composition)
    got = run(model, {"x": X, "x_tangent": U, "p_tangent": V})
    for name, w in zip(("x", "p"), want, strict=True):
        np.testing.assert_allclose(got[f"{name}_grad_tangent"], w.numpy(), rtol=1e-12)


@pytest.mark.parametrize("declared", [False, True])
def test_a_later_derivative_by_an_exponent(declared: bool) -> None:
    """Forces are differentiated by parameters of the energy, which the first gradient did not know of."""
    leaves, (dx, _) = slopes(3.0)
    (want,) = torch.autograd.grad((dx * torch.tensor(U)).sum(), leaves[1:])
    model = power(3.0, "" if declared else "[1]")
    if declared:
        info = onnx.helper.make_tensor_value_info("p", onnx.TensorProto.DOUBLE, [])
        info.metadata_props.add(key=INITIALIZER_KIND, value="PARAMETER")
        model.graph.value_info.append(info)
    got = run(og.vjp(og.augment(model, wrt="x"), wrt="p", of="x_grad"), {"x": X, "x_grad_grad": U})
    np.testing.assert_allclose(got["p_grad"].reshape(1), want.numpy(), rtol=1e-12)


@pytest.mark.parametrize("wrt", [["x", "p"], ["p"]])
def test_an_exponent_that_is_fed(wrt: list[str]) -> None:
    _, want = slopes(2.0)
    got = run(og.augment(power(3.0), wrt=wrt, trainable_inputs=True), {"x": X, "p": np.asarray([2.0])})
    for name, w in zip(("x", "p"), want, strict=True):
        if name in wrt:
            np.testing.assert_allclose(got[f"{name}_grad"], w.detach().numpy(), rtol=1e-12)


def test_bounds_that_are_fed() -> None:
    """Between the stored ones, 0 and 6, it is a ReLU6."""
    text = "(float[4] x) => (float[4] y) <float a = {0.0}, float b = {6.0}> { y = Clip(x, a, b) }"
    model = og.augment(graph_of(text), wrt=["x", "a", "b"], cotangents="ones", trainable_inputs=True)
    x = np.asarray([0.5, 3, 6.5, 9], np.float32)
    got = run(model, {"x": x, "a": np.asarray(1, np.float32), "b": np.asarray(7, np.float32)})
    np.testing.assert_array_equal(got["x_grad"], [0, 1, 1, 0])
    assert (got["a_grad"], got["b_grad"]) == (1, 1)


def test_a_gradient_node_that_reads_another() -> None:
    """`Gradient` of ai.onnx.preview.training gives d2/dx dp of x^p."""
    text = """(double[1] x) => (double[1] mixed) <double[1] p = {3.0}> {
            y = Pow(x, p)
            dx, dp = ai.onnx.preview.training.Gradient <xs = ["x", "p"], y = "y"> (x, p)
            mixed = ai.onnx.preview.training.Gradient <xs = ["p"], zs = ["x"], y = "dx"> (p, x)
        }"""
    got = run(
        og.transforms.lower_gradient_ops(graph_of(text, domains=', "ai.onnx.preview.training": 1')),
        {"x": np.asarray([2.0])},
    )["mixed"]
    np.testing.assert_allclose(got, 4 + 3 * 4 * np.log(2.0), rtol=1e-12)  # x^(p-1) (1 + p log x)
