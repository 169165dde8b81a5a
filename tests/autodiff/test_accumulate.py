"""Merged cotangents: adjacent slices, squares, products of a shared matrix."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import Function, by_torch, numbers, op_types, parsed


def added_operators(model: onnx.ModelProto, function: Function, x: np.ndarray) -> Counter[str]:
    """Count the nodes of each operator that the gradient adds, and compare it with PyTorch's."""
    gradient = og.augment(model, wrt=["x"], cotangents="ones")
    np.testing.assert_allclose(run(gradient, {"x": x})["x_grad"], by_torch(function, x), rtol=1e-5, atol=1e-6)
    return Counter(op_types(gradient)) - Counter(op_types(model))


# -- pieces ------------------------------------------------------------------------------------------------------------

SLICED = """
    zero = Constant<value_ints = [0]>() two = Constant<value_ints = [2]>() four = Constant<value_ints = [4]>()
    six = Constant<value_ints = [6]>() one = Constant<value_ints = [1]>()
"""
PIECES: dict[str, tuple[str, Function, list[str]]] = {
    "halves": (
        SLICED + "p = Slice(x, zero, two, one) q = Slice(x, two, six, one) s = Mul(p, p) t = Tanh(q)"
        " y = Concat<axis = 1>(t, s)",
        lambda x: torch.cat([x[:, 2:].tanh(), x[:, :2].square()], 1),
        ["Concat"],
    ),
    "a gap": (
        SLICED + "p = Slice(x, zero, two, one) q = Slice(x, four, six, one) s = Mul(p, p) t = Mul(q, q) y = Mul(s, t)",
        lambda x: x[:, :2].square() * x[:, 4:].square(),
        ["Pad", "Pad"],
    ),
    "an overlap": (
        SLICED + "p = Slice(x, zero, four, one) q = Slice(x, two, six, one) s = Mul(p, p) y = Mul(s, q)",
        lambda x: x[:, :4].square() * x[:, 2:],
        ["Pad", "Pad"],
    ),
    "adjacent, with a rest and another use": (
        SLICED + "p = Slice(x, zero, two, one) q = Slice(x, two, four, one) s = Mul(p, q) u = Tanh(x)"
        " y = Concat<axis = 1>(s, u)",
        lambda x: torch.cat([x[:, :2] * x[:, 2:4], x.tanh()], 1),
        ["Concat", "Pad"],
    ),
    "unbound": (
        (
            "i = Constant<value_int = 0>() j = Constant<value_int = 1>() k = Constant<value_int = 2>() "
            "q = Gather<axis = 0>(x, i) r = Gather<axis = 0>(x, j) v = Gather<axis = 0>(x, k) m = Mul(q, r) y = Mul(m, v)"
        ),
        lambda x: x[0] * x[1] * x[2],
        ["Concat"],
    ),
    "rolled on two axes": (
        SLICED + "p = Slice(x, two, six, one) q = Slice(x, zero, two, one) s = Concat<axis = 1>(p, q)"
        " axis = Constant<value_ints = [2]>() eight = Constant<value_ints = [8]>()"
        " u = Slice(s, six, eight, axis) v = Slice(s, zero, six, axis) w = Concat<axis = 2>(u, v)"
        " wx = Mul(w, x) y = Tanh(wx)",
        lambda x: (x.roll((-2, 2), (1, 2)) * x).tanh(),
        ["Concat", "Concat"],
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces(name: str) -> None:
    """Cotangents of adjacent slices are concatenated, others are padded."""
    body, function, expected = PIECES[name]
    added = added_operators(parsed(body, "3, 6, 8"), function, numbers(3, 6, 8))
    assert [op for op in ("Concat", "Pad") for _ in range(added[op])] == expected


SQUARES: dict[str, tuple[str, Function, int]] = {
    "of rows, summed": (
        "m = ReduceMean(x, a) z = Sub(x, m) s = Mul(z, z) v = ReduceSum(s, a) w = Sqrt(v) y = Mul(x, w)",
        lambda x: x * (x - x.mean(1, keepdim=True)).square().sum(1, keepdim=True).sqrt(),
        2,
    ),
    "a sum with itself": ("s = Add(x, x) y = Tanh(s)", lambda x: (x + x).tanh(), 0),
    "a square of its own, and a third use": ("s = Mul(x, x) y = Mul(s, x)", lambda x: x**3, 1),
    "a sum of three": ("s = Add(x, x) y = Add(s, x)", lambda x: 3 * x, 0),
    "a sum of five": ("s = Sum(x, x, x, x, x) y = Tanh(s)", lambda x: (5 * x).tanh(), 0),
    "a product of three": ('y = Einsum<equation = "ij,ij,ij->ij">(x, x, x)', lambda x: x**3, 0),
    "two squares": ("s = Mul(x, x) t = Mul(x, x) u = Tanh(t) y = Add(s, u)", lambda x: x**2 + (x**2).tanh(), 1),
}


@pytest.mark.parametrize("name", SQUARES)
def test_squares(name: str) -> None:
    """Equal products become one, whose smaller factor is multiplied."""
    body, function, most = SQUARES[name]
    assert added_operators(parsed(body, "4, 6", np.array([1])), function, numbers(4, 6))["Add"] <= most


# -- a matrix that many products share ---------------------------------------------------------------------------------

SHARED = "h = MatMul(x, a) s = Tanh(h) k = MatMul(s, a) t = Tanh(k) y = MatMul(t, a)"


@pytest.mark.parametrize(
    ("x", "weight", "shape", "products"),
    [
        ((3, 16), (16, 16), "3, 16", 1),
        ((3, 64), (64, 64), "n, 64", 1),
        ((5, 3, 16), (16, 16), "5, 3, 16", 3),
        ((2, 3, 16), (2, 16, 16), "2, 3, 16", 1),
        ((2, 30, 16), (2, 16, 16), "2, 30, 16", 3),
        ((1, 3, 16), (2, 16, 16), "1, 3, 16", 2),
        ((2, 3, 16), (2, 16, 16), "b, 3, 16", 2),
    ],
    ids=str,
)
def test_a_shared_matrix_gets_one_product(
    x: tuple[int, ...], weight: tuple[int, ...], shape: str, products: int
) -> None:
    """If the factors are smaller than their product."""
    data, a = numbers(*x), 0.2 * numbers(*weight)
    gradient = og.augment(parsed(SHARED, shape, a), wrt=["a"], cotangents="ones")
    assert op_types(gradient).count("Add") == products - 1
    want = by_torch(lambda v: ((torch.tensor(data).double() @ v).tanh() @ v).tanh() @ v, a)
    np.testing.assert_allclose(run(gradient, {"x": data})["a_grad"], want, rtol=1e-5, atol=1e-5)
