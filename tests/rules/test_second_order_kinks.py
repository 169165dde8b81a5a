"""Second derivatives of elementwise operators at points where a slope jumps or ends: those of PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.operators import text_model

POINTS = np.array([0, -0.0, 1, -1, 3, -3, 6, 0.5, -0.5, 2, -2, 2.5, -2.5, 0.7], np.float32)
"""Ends of the pieces of all functions below, at both zeros, and points inside."""

OTHERS = np.array([0, 0, 1, 1, 2, -3, 7, 0.5, 1, 2, -1, 3, -2.5, -0.7], np.float32)
"""Values of a second operand, of which some are equal to the first."""

CONSTANTS = {"zero": 0.0, "half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "six": 6.0}

OF_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "y = Relu (x)": F.relu,
    "y = LeakyRelu (x)": F.leaky_relu,
    "y = PRelu (x, half)": lambda x: F.prelu(x, torch.tensor([0.5])),
    "y = ThresholdedRelu (x)": lambda x: torch.where(x > 1, x, 0),
    "y = Shrink (x)": lambda x: torch.where(x.abs() > 0.5, x, 0),
    "y = Elu (x)": F.elu,
    "y = Elu <alpha = 2.0> (x)": lambda x: F.elu(x, 2.0),
    "y = Celu (x)": F.celu,
    "y = Celu <alpha = 0.5> (x)": lambda x: F.celu(x, 0.5),
    "y = Selu (x)": F.selu,
    "y = HardSigmoid (x)": lambda x: F.hardtanh(0.2 * x + 0.5, 0, 1),
    "y = HardSwish (x)": F.hardswish,
    "y = Sigmoid (x)": torch.sigmoid,
    "y = Softplus (x)": F.softplus,
    "y = Softsign (x)": F.softsign,
    "y = Mish (x)": F.mish,
    "y = Gelu (x)": F.gelu,
    "y = Abs (x)": torch.abs,
    "y = Sqrt (x)": torch.sqrt,
    "y = Log (x)": torch.log,
    "y = Reciprocal (x)": torch.reciprocal,
    "y = Asin (x)": torch.asin,
    "y = Acos (x)": torch.acos,
    "y = Acosh (x)": torch.acosh,
    "y = Atanh (x)": torch.atanh,
    "y = Clip (x, zero, six)": F.relu6,
    "y = Clip (x, zero)": lambda x: x.clamp(min=0),
    "y = Max (x, zero)": lambda x: x.clamp(min=0),
    "y = Min (x, six)": lambda x: x.clamp(max=6),
    "y = Mod <fmod = 1> (x, two)": lambda x: torch.fmod(x, torch.tensor(2.0)),
    **{
        f"y = Pow (x, {name})": lambda x, number=number: torch.pow(x, number)
        for name, number in CONSTANTS.items()
        if name != "six"
    },
    "a = Relu (x)  y = Mul (a, a)": lambda x: F.relu(x) ** 2,
    "a = Relu (x)  y = Pow (a, three)": lambda x: F.relu(x) ** 3,
    "a = Abs (x)  y = Mul (a, x)": lambda x: x.abs() * x,
    "a = Abs (x)  y = Sqrt (a)": lambda x: x.abs().sqrt(),
    "a = Mul (x, x)  y = Sqrt (a)": lambda x: (x * x).sqrt(),
    "a = HardSigmoid (x)  y = Mul (a, x)": lambda x: F.hardtanh(0.2 * x + 0.5, 0, 1) * x,
    "y = Div (two, x)": lambda x: 2 / x,
}

OF_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a = Max (x, z)  y = Mul (a, a)": lambda x, z: torch.maximum(x, z) ** 2,
    "a = Min (x, z)  y = Mul (a, x)": lambda x, z: torch.minimum(x, z) * x,
    "a = PRelu (x, z)  y = Mul (a, x)": lambda x, z: torch.where(x > 0, x, x * z) * x,
    "c = Less (x, z)  a = Mul (x, z)  b = Div (x, six)  y = Where (c, a, b)": lambda x, z: torch.where(
        x < z, x * z, x / 6
    ),
    "y = Div (z, x)": lambda x, z: z / x,
    "a = Relu (x)  y = Mul (a, z)": lambda x, z: F.relu(x) * z,
    "a = Abs (x)  y = Mul (a, z)": lambda x, z: x.abs() * z,
}


def _products(line: str, names: Sequence[str], points: Sequence[np.ndarray], order: str) -> list[np.ndarray]:
    """The product of the Hessian with ones, for each variable."""
    inputs = ", ".join(f"float[{len(POINTS)}] {name}" for name in names)
    constants = ", ".join(f"float {name} = {{{number}}}" for name, number in CONSTANTS.items())
    model = text_model(f"({inputs}) => (float s) <{constants}> {{ {line}  s = ReduceSum <keepdims = 0> (y) }}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The derivative is zero")  # of a slope that is constant between the jumps
        curved = og.hvp(model, wrt=list(names), of="s", composition=order)
    given = dict(zip(names, points, strict=True))
    results = run(curved, {i.name: given.get(i.name, np.ones_like(POINTS)) for i in curved.graph.input})
    return [results[f"{name}_grad_tangent"] for name in names]


def _expected(function: Callable[..., torch.Tensor], points: Sequence[np.ndarray]) -> list[np.ndarray]:
    leaves = [torch.tensor(point, requires_grad=True) for point in points]
    slopes = torch.autograd.grad(function(*leaves).sum(), leaves, create_graph=True, materialize_grads=True)
    total = torch.stack([slope.sum() for slope in slopes]).sum()
    if not total.requires_grad:  # the slopes are constants
        return [np.zeros_like(point) for point in points]
    return [g.numpy(force=True) for g in torch.autograd.grad(total, leaves, materialize_grads=True)]


ORDERS = ["forward_over_reverse", pytest.param("reverse_over_reverse", marks=pytest.mark.slow)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("line", OF_ONE)
def test_operators_of_one_variable(line: str, order: str) -> None:
    (got,) = _products(line, ["x"], [POINTS], order)
    np.testing.assert_allclose(got, *_expected(OF_ONE[line], [POINTS]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("line", OF_TWO)
def test_operators_of_two_variables(line: str, order: str) -> None:
    points = [POINTS, OTHERS]
    for got, want in zip(_products(line, ["x", "z"], points, order), _expected(OF_TWO[line], points), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
