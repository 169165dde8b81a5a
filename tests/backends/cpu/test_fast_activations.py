"""Activations in training: forms that the CPU provider runs faster, with equal results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import Function, by_torch, numbers, op_types, parsed

# -- Softplus and Mish -------------------------------------------------------------------------------------------------

MISH = "p = Softplus(x) t = Tanh(p) y = Mul(x, t)"


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("y = Softplus(x)", torch.nn.functional.softplus),
        (MISH, torch.nn.functional.mish),
        ("y = Mish(x)", torch.nn.functional.mish),
        (
            "p = Softplus(x) t = Tanh(p) y = Mul(p, t)",
            lambda x: torch.nn.functional.softplus(x) * torch.nn.functional.softplus(x).tanh(),
        ),
    ],
    ids=["Softplus", "its parts", "Mish", "both"],
)
def test_softplus_in_training(body: str, function: Function) -> None:
    x = np.concatenate([np.array([-120, -30, -1e-3, 0, 1e-3, 30, 120], np.float32), 4 * numbers(500)]).astype(
        np.float32
    )
    model = parsed(body, "507")
    trained = og.augment(model, wrt=["x"], cotangents="ones", training=True)
    assert not {"Softplus", "Mish"} & set(op_types(trained))
    assert {"Softplus", "Mish"} & set(op_types(og.augment(model, wrt=["x"], cotangents="ones")))
    got = run(trained, {"x": x})
    np.testing.assert_allclose(got["y"], run(model, {"x": x})["y"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["x_grad"], by_torch(function, x), rtol=1e-5, atol=1e-6)


# -- exponential units, bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("y = Elu(x)", torch.nn.functional.elu),
        ("y = Elu <alpha = 0.5> (x)", lambda x: torch.nn.functional.elu(x, 0.5)),
        ("y = Elu <alpha = -0.5> (x)", lambda x: torch.nn.functional.elu(x, -0.5)),
        ("y = Selu(x)", torch.selu),
        ("y = Celu(x)", torch.celu),
        ("y = Celu <alpha = 2.0> (x)", lambda x: torch.celu(x, 2.0)),
    ],
)
def test_exponential_units_in_training(body: str, function: Function) -> None:
    x = 3 * numbers(8, 2048)
    x[0, :7] = [-200, -30, -1e-3, 1e-3, 30, 200, -1e-30]
    model = parsed(body, "8, 2048")
    trained = og.augment(model, wrt=["x"], cotangents="ones", training=True)
    assert not {"Elu", "Selu", "Celu", "Min"} & set(op_types(trained))
    assert {"Elu", "Selu", "Celu"} & set(op_types(og.augment(model, wrt=["x"], cotangents="ones")))
    got = run(trained, {"x": x})
    np.testing.assert_allclose(got["y"], run(model, {"x": x})["y"], rtol=1e-6, atol=3e-7)
    np.testing.assert_allclose(got["x_grad"], by_torch(function, x), rtol=1e-5, atol=1e-6)
    x[0, :3] = [np.nan, np.inf, -np.inf]
    np.testing.assert_array_equal(run(trained, {"x": x})["y"][0, :3], run(model, {"x": x})["y"][0, :3])


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("op", "function"), [("Min", torch.minimum), ("Max", torch.maximum)])
def test_bounds_in_training(
    op: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], small: bool
) -> None:
    """Min and Max with one number on either side are a Clip, if the result has the size of the tensor and is large."""
    x, bound = numbers(8, 8 if small else 2048), np.full((1, 1), 0.25, np.float32)
    x[0, 0] = np.nan
    model = parsed(f"h = {op}(a, x) y = Mul(h, x)", f"8, {x.shape[1]}", bound)
    trained = og.augment(model, wrt=["x"], cotangents="ones", training=True)
    assert (op in op_types(trained)) == small
    assert ("Clip" in op_types(trained)) != small
    got = run(trained, {"x": x})
    np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])
    want = by_torch(lambda v: function(torch.full((1, 1), 0.25, dtype=torch.float64), v) * v, x)
    np.testing.assert_allclose(got["x_grad"].flat[1:], want.flat[1:], rtol=1e-6, atol=1e-6)


def test_bounds_that_lengthen_stay() -> None:
    model = parsed("s = Min(x, a) y = Mul(s, s)", "8, 2048", np.zeros((1, 1, 1), np.float32))
    assert "Min" in op_types(og.augment(model, wrt=["x"], cotangents="ones", training=True))


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(
    ("shape", "axis", "own"), [("3, 5, 4, 2", 1, False), ("3, n, 1", -2, True), ("3, n", 0, False)]
)
def test_softmax_in_training(op: str, shape: str, axis: int, own: bool) -> None:
    """Over rows the runtime's kernel is faster."""
    model = parsed(f"s = {op} <axis = {axis}> (x) y = Mul(s, s)", shape)
    trained = og.augment(model, wrt=["x"], cotangents="ones", training=True)
    assert (op in op_types(trained)) == own
    x = 40 * numbers(*(int(size) if size.isdigit() else 7 for size in shape.split(", ")))
    function = torch.softmax if op == "Softmax" else torch.log_softmax
    got = run(trained, {"x": x})
    np.testing.assert_allclose(got["y"], run(model, {"x": x})["y"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["x_grad"], by_torch(lambda v: function(v, axis).square(), x), rtol=1e-4, atol=1e-5)


# -- the normal distribution function ----------------------------------------------------------------------------------


def test_half_of_one_and_erf_is_one_pass() -> None:
    """As in the slope of GELU, in either order of the operands."""
    x = np.linspace(-6, 6, 96, dtype=np.float32).reshape(4, 24)
    model = og.augment(parsed("y = Gelu(x)", "4, 24"), wrt=["x"])
    assert "HardSigmoid" in op_types(model)
    assert op_types(model).count("Mul") == 4
    got = run(model, {"x": x, "y_grad": np.ones_like(x)})["x_grad"]
    np.testing.assert_allclose(got, by_torch(torch.nn.functional.gelu, x), rtol=1e-6, atol=1e-6)


def test_signs_are_steps() -> None:
    x = numbers(4, 64, 80)
    x[0, 0, :3] = [0.0, -0.0, np.inf]
    model = og.augment(parsed("y = Abs(x)", "4, 64, 80"), wrt=["x"])
    assert "Sign" not in op_types(model)
    got = run(model, {"x": x, "y_grad": np.full_like(x, 2)})["x_grad"]
    np.testing.assert_array_equal(got, 2 * np.sign(x))
