"""Sums, copies, gates, PRelu: forms that the CPU provider runs faster, with equal results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import Function, by_torch, check_by_torch, numbers, op_types, parsed
from tests.support.optimizer import optimized

# -- sums of rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "bias", "product"),
    [
        ("3, 16, 12", (12,), True),
        ("20, 3, 8", (3, 8), True),
        ("20, 3, 8", (1, 3, 8), True),
        ("3, 16, 12", (16, 1), False),
        ("n, 16, 12", (12,), None),
    ],
    ids=str,
)
def test_bias_gradients(sizes: str, bias: tuple[int, ...], product: bool | None) -> None:
    """Sums over the first axes are products with ones; others stay reductions."""
    x, b = numbers(*(int(size) for size in sizes.replace("n", "3").split(","))), numbers(*bias)
    model = parsed("h = Add(x, a) y = Mul(h, h)", sizes, b)
    gradient = og.augment(model, wrt=["a"], cotangents="ones")
    if product is not None:
        assert ("MatMul" in op_types(gradient)) == product
        assert ("ReduceSum" in op_types(gradient)) != product
    want = by_torch(lambda leaf: (torch.tensor(x) + leaf).square(), b)
    np.testing.assert_allclose(run(gradient, {"x": x})["a_grad"], want, rtol=1e-5, atol=1e-5)


def test_sums_of_the_model_are_its_own() -> None:
    model = parsed("axes = Constant<value_ints = [0]>() s = ReduceSum(x, axes) y = Mul(s, s)", "40, 8")
    assert op_types(og.augment(model, wrt=["x"], cotangents="ones")).count("ReduceSum") == 1


@pytest.mark.parametrize(
    ("shape", "scale", "product"),
    [
        ((3, 4, 32, 64), (4, 1, 1), True),
        ((3, 4, 32, 64), (1, 4, 1, 1), True),
        ((3, 4, 32, 64), (3, 4, 1, 1), True),
        ((3, 4, 32, 64), (3, 1, 1, 1), False),  # too few rows
        ((3, 4, 8, 8), (4, 1, 1), False),  # too short ones
        ((3, 4, 32, 64), (32, 1), False),
    ],
    ids=str,
)
def test_sums_of_products(shape: tuple[int, ...], scale: tuple[int, ...], product: bool, tmp_path: Path) -> None:
    """Gradients of factors of whole rows are scalar products; the elementwise products are never stored.

    The runtime fuses the Transpose: its kernel for one row and one column reads single elements otherwise.
    """
    x, s = numbers(*shape), numbers(*scale)
    model = parsed("h = Tanh(x) y = Mul(h, a)", ", ".join(map(str, shape)), s)
    gradient = og.augment(model, wrt=["a"])
    assert (op_types(gradient).count("Mul") == 1) == product
    assert ("MatMul" in op_types(gradient)) == product
    assert ("FusedMatMul" in op_types(optimized(gradient, tmp_path))) == product
    seed = numbers(*shape)[::-1].copy()
    want = by_torch(lambda leaf: torch.tensor(x, dtype=torch.float64).tanh() * leaf * torch.tensor(seed), s)
    np.testing.assert_allclose(run(gradient, {"x": x, "y_grad": seed})["a_grad"], want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("rows", "copied"), [(2048, True), (8, False)], ids=str)
def test_copies_to_outputs(rows: int, copied: bool) -> None:
    """A large gradient that is only reshaped at the end is copied by all threads, exactly."""
    model = parsed("shape = Constant<value_ints = [-1, 8]>() h = Reshape(x, shape) y = Mul(h, a)", f"{rows}, 4, 8")
    model.graph.input.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, [4 * rows, 8]))
    gradient = og.vjp(model, wrt=["x"])
    assert ("LeakyRelu" in op_types(gradient)) == copied
    seed, a = numbers(4 * rows, 8), numbers(4 * rows, 8)
    seed.flat[:4] = -0.0, np.nan, np.inf, -np.inf
    got = run(gradient, {"x": numbers(rows, 4, 8), "a": a, "y_grad": seed})["x_grad"]
    assert got.tobytes() == (seed * a).tobytes()


def test_means_of_products() -> None:
    """The variance and the moment of a normalization; no factor is next to a product, or the runtime would fuse it."""
    x, seed = numbers(4, 2, 64, 64), numbers(4, 2, 64, 64)[::-1].copy()
    model = parsed(
        "y = InstanceNormalization(x, a, b)", "4, 2, 64, 64", np.ones(2, np.float32), np.zeros(2, np.float32)
    )
    gradient = og.vjp(model, wrt=["x"])
    products = [node.output[0] for node in gradient.graph.node if node.op_type == "MatMul"]
    assert len(products) == 2
    assert {n.op_type for n in gradient.graph.node if set(n.input) & set(products)} == {"Reshape"}
    want = by_torch(lambda leaf: torch.nn.functional.instance_norm(leaf) * torch.tensor(seed), x)
    np.testing.assert_allclose(run(gradient, {"x": x, "y_grad": seed})["x_grad"], want, rtol=1e-4, atol=1e-5)


# -- gates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "function", "added"),
    [
        ("s = Sigmoid(x) y = Mul(x, s)", torch.nn.functional.silu, ["Sub", "Mul", "Add", "Mul"]),
        ("s = Sigmoid(x) y = Mul(s, x)", torch.nn.functional.silu, ["Sub", "Mul", "Add", "Mul"]),
        ("s = Tanh(x) y = Mul(x, s)", lambda x: x * x.tanh(), ["Mul", "Sub", "Mul", "Add", "Mul"]),
    ],
    ids=["logistic", "the other way round", "another"],
)
def test_gates(body: str, function: Function, added: list[str]) -> None:
    x, seed = numbers(4, 6), numbers(6, 4).reshape(4, 6)
    x.flat[:4] = 0, 30, -30, -4
    model = parsed(body, "4, 6")
    gradient = og.augment(model, wrt=["x"], training=True)
    assert op_types(gradient)[2:] == added
    want = by_torch(lambda leaf: function(leaf) * torch.tensor(seed), x)
    np.testing.assert_allclose(run(gradient, {"x": x, "y_grad": seed})["x_grad"], want, rtol=1e-5, atol=1e-6)


def test_a_gate_whose_parts_are_read_elsewhere() -> None:
    """The cotangent of s is an output, so it stays."""
    model = parsed("s = Sigmoid(x) y = Mul(x, s)", "4, 6")
    x = numbers(4, 6)
    got = run(og.augment(model, wrt=["x", "s"], cotangents="ones", training=True), {"x": x})
    np.testing.assert_array_equal(got["s_grad"], x)
    np.testing.assert_allclose(got["x_grad"], by_torch(torch.nn.functional.silu, x), rtol=1e-5, atol=1e-6)


# -- PRelu -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [(5, 1, 1), (1,), (4, 4)], ids=str)
def test_prelu_in_training(slope: tuple[int, ...]) -> None:
    x, a = numbers(2, 5, 4, 4), numbers(*slope)
    x[0, 0, 0, 0], a.flat[0] = 0.0, 1.5
    model = parsed("h = PRelu(x, a) y = Mul(h, h)", "2, 5, 4, 4", a)
    trained = og.augment(model, wrt=["x", "a"], cotangents="ones", training=True)
    assert "PRelu" not in op_types(trained)
    assert op_types(trained).count("Clip") == 1
    assert "Min" not in op_types(trained)
    assert "PRelu" in op_types(og.augment(model, wrt=["x", "a"], cotangents="ones"))
    got = run(trained, {"x": x})
    np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])

    def function(leaf: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return torch.where(leaf > 0, leaf, leaf * factor).square()

    check_by_torch(got, function, x=x, a=a, atol=1e-6)


def test_outputs_of_equal_nodes_keep_their_names() -> None:
    """Each form is emitted once; both names stay."""
    x = numbers(4, 8)
    model = parsed(
        "first = Softplus(x) second = Softplus(x) s = Add(first, second) y = Mul(s, a)", "4, 8", np.float32(2)
    )
    for name in ("first", "second"):
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    made = og.augment(model, wrt=["a"], of=["y"], training=True)
    assert "Softplus" not in op_types(made)
    got = run(made, {"x": x, "y_grad": np.ones_like(x)})
    for name in ("first", "second"):
        np.testing.assert_allclose(got[name], np.logaddexp(0, x), rtol=1e-6, atol=1e-6)
