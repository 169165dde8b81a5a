"""Activations: every attribute, both branches, all dtypes of the runtime, and PyTorch's derivatives at kinks."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

from onnx_convgrad import api
from onnx_convgrad.pipeline.options import COMPOSITIONS
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import autograd, one_node, rule_test, text_model

X = rand(3, 5, low=-5, high=5)
HALF = {"dtype": np.float16}
PLAIN = (
    "Relu LeakyRelu Elu Celu Selu Sigmoid HardSigmoid HardSwish Tanh Softplus Softsign Gelu Mish ThresholdedRelu Shrink"
).split()

# A larger step where the forward value is available in float32 only: erf in the reference evaluator, Shrink in the runtime.
COARSE = {"Gelu": {"step": 3e-3}, "Shrink": {"step": 3e-3}}

CASES = [
    Case("Sigmoid", [rand(4, 5, low=-30.0, high=-8.0)], name="saturated"),
    Case("Sigmoid", [rand(4, 5, low=8.0, high=14.0)], name="saturated", tolerance=2e-3),
    *(Case(op, [X], **COARSE.get(op, {})) for op in PLAIN),
    # Celu has no float16 kernel
    *(Case(op, [X], **HALF, **COARSE.get(op, {})) for op in PLAIN if op != "Celu"),
    *(Case(op, [X], dtype=np.float64, **COARSE.get(op, {})) for op in ("Relu", "Sigmoid", "Tanh", "Shrink")),
    *(Case(op, [rand()], name="scalar", **COARSE.get(op, {})) for op in ("Relu", "Gelu")),
    *(Case(op, [rand(0, 3)], name="empty") for op in ("Relu", "HardSwish")),
    *(Case("LeakyRelu", [X], {"alpha": a}) for a in (0.0, 0.3, 1.0, 1.5, -0.5)),
    *(Case("Elu", [X], {"alpha": a}) for a in (0.3, 2.0, -1.0)),
    *(Case("Celu", [X], {"alpha": a}) for a in (0.3, 2.0)),
    Case("Selu", [X], {"alpha": 1.2, "gamma": 0.7}),
    *(Case("HardSigmoid", [X], {"alpha": a, "beta": b}) for a, b in ((0.3, 0.4), (-0.1, 0.6))),
    *(Case("ThresholdedRelu", [X], {"alpha": a}) for a in (0.5, -1.0)),
    *(
        Case("Shrink", [X], {"bias": b, "lambd": a}, **COARSE["Shrink"])
        for a, b in ((1.5, 0.0), (1.0, 0.7), (0.0, 0.1))
    ),
    *(Case("Gelu", [X], {"approximate": a}, **COARSE["Gelu"]) for a in ("none", "tanh")),
    Case("Gelu", [X], {"approximate": "tanh"}, **HALF),
    Case("PRelu", [X, rand(5)]),
    Case("PRelu", [X, rand(3, 1)]),
    Case("PRelu", [X, rand(1)]),
    Case("PRelu", [X, rand()], name="scalar"),
    Case("PRelu", [rand(2, 3, 4), rand(3, 1)], **HALF),
    Case("PRelu", [X, rand(5, low=0.1, high=0.5)], wrt=[0], constants=[1], name="constant slope"),
    Case("Relu", [X], opset=6),
    Case("LeakyRelu", [X], {"alpha": 0.3}, opset=6),
    Case("PRelu", [X, rand(5)], opset=7),
    Case("Swish", [X], {"alpha": 1.5}, opset=24, dynamic=False),
]

test_rule = rule_test(CASES)


def slope(op: str, points: list[float], order: int = 1, **attributes: object) -> np.ndarray:
    """The first or second derivative of an operator at given points."""
    model = one_node(onnx.helper.make_node(op, ["x"], ["y"], **attributes), {"x": [len(points)]})
    feed = {"x": np.asarray(points, np.float32)}
    for _ in range(order):
        model = api.vjp(model, wrt=["x"], cotangents="ones")
    (found,) = run(model, feed).values()
    return found


KINKS = {
    "Relu": ({}, "relu", {}, [0.0]),
    "LeakyRelu": ({"alpha": 0.3}, "leaky_relu", {"negative_slope": 0.3}, [0.0]),
    "Elu": ({"alpha": 1.0}, "elu", {}, [0.0]),
    "Selu": ({}, "selu", {}, [0.0]),
    "Celu": ({"alpha": 2.0}, "celu", {"alpha": 2.0}, [0.0]),
    "HardSigmoid": ({"alpha": 1 / 6, "beta": 0.5}, "hardsigmoid", {}, [-3.0, 3.0]),
    "HardSwish": ({}, "hardswish", {}, [-3.0, 3.0]),
    "Shrink": ({"lambd": 0.5, "bias": 0.0}, "hardshrink", {}, [-0.5, 0.5]),
    "Softsign": ({}, "softsign", {}, [0.0]),
}


@pytest.mark.parametrize("op", KINKS)
def test_pytorch_convention_at_kinks(op: str) -> None:
    attributes, function, options, points = KINKS[op]
    (want,) = autograd(lambda x: getattr(F, function)(x, **options), points)
    np.testing.assert_allclose(slope(op, points, **attributes), want, rtol=1e-5, atol=1e-6)


def test_relu6_next_to_its_bounds() -> None:
    """The derivative is 1 at the nearest numbers inside, and 0 at the bounds."""
    inside = [float(np.nextafter(np.float32(6), np.float32(0))), 1e-30, 3.0]
    x = np.asarray([0.0, 6.0, -1.0, 7.0, *inside], np.float32)
    model = text_model(
        "(float[7] x) => (float[7] y) <float low = {0.0}, float high = {6.0}> { y = Clip(x, low, high) }"
    )
    got = run(api.augment(model, wrt=["x"], cotangents="ones"), {"x": x})["x_grad"]
    np.testing.assert_array_equal(got, *autograd(F.relu6, x))


SMOOTH = {
    "Sigmoid": ({}, "sigmoid", {}),
    "Tanh": ({}, "tanh", {}),
    "Softplus": ({}, "softplus", {}),
    "Gelu": ({}, "gelu", {}),
    "Gelu tanh": ({"approximate": "tanh"}, "gelu", {"approximate": "tanh"}),
    "Mish": ({}, "mish", {}),
    "HardSwish": ({}, "hardswish", {}),
    "Elu": ({}, "elu", {}),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_far_from_zero(name: str) -> None:
    """No overflow, and agreement with float64 where exponentials saturate."""
    attributes, function, options = SMOOTH[name]
    points = [-1e4, -200.0, -90.0, -20.0, -10.0, 10.0, 20.0, 90.0, 200.0, 1e4]
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(getattr(F, function)(x, **options).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x) if first.requires_grad else (torch.zeros_like(x),)
    op = name.removesuffix(" tanh")
    np.testing.assert_allclose(slope(op, points, **attributes), first.detach().numpy(), rtol=1e-5, atol=1e-6)
    curvature = np.nan_to_num(second.numpy())  # PyTorch's second derivative of Mish is NaN at 1e4, where it is 0
    np.testing.assert_allclose(slope(op, points, order=2, **attributes), curvature, rtol=1e-5, atol=2e-6)


POLES = {
    "root": ("y = Sqrt (r)", lambda _, r: r.sqrt()),
    "power": ("half = Constant <value_float = 0.5> () t = Abs (r) y = Pow (t, half)", lambda _, r: r.abs().pow(0.5)),
    "quotient": ("y = Div (x, r)", lambda x, r: x / r),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_second_order_of_a_saturated_gate_is_finite(composition: str) -> None:
    """exp(-x) is multiplied by a large tangent before the square cancels it."""
    text = """(float[N] x, float[N] w) => (float s) {
        y = Sigmoid (x) r = Neg (y) q = Mul (r, w) s = ReduceSum <keepdims = 0> (q) }"""
    model = api.hvp(text_model(text), wrt=["x"], of="s", composition=composition)
    x = np.asarray([-700, -90, -88, -60, -30, 0.5, 100], np.float32)
    y = 1 / (1 + np.exp(-x.astype(np.float64)))
    got = run(model, {"x": x, "w": np.full_like(x, 1e4), "x_tangent": np.full_like(x, 1e4)})["x_grad_tangent"]
    np.testing.assert_allclose(got, -1e8 * y * (1 - y) * (1 - 2 * y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", POLES)
def test_relu_stops_infinite_cotangents(name: str) -> None:
    """A product with zero would be NaN. PyTorch's LPPool2d relies on this."""
    body, function = POLES[name]
    model = text_model(f"(float[3] x) => (float[3] y) {{ r = Relu (x) {body} }}")
    x = torch.tensor([-4.0, 4.0, -1.0], requires_grad=True)
    function(x, torch.relu(x)).sum().backward()
    got = run(api.vjp(model, wrt=["x"], cotangents="ones"), {"x": x.detach().numpy()})["x_grad"]
    np.testing.assert_allclose(got, x.grad.numpy(), rtol=1e-6)
    assert not np.isnan(got).any()
