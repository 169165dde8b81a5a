"""ONNX files as JAX functions: values and gradients of first and second order, with and without jit."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from onnx_convgrad.errors import ArgumentError, ExecutionError
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
W, C, V = (RNG.standard_normal(s).astype("f") for s in ((4, 6), (6,), (6, 3)))
X = RNG.standard_normal((2, 4)).astype("f")
MLP = graph_of(
    "(float[N,4] x) => (float[N,3] y) { a = MatMul (x, w) b = Add (a, c) h = Tanh (b) y = MatMul (h, v) }",
    w=W,
    c=C,
    v=V,
)
TOL = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="jax is not installed")


def plain(jax: Any, x: Any, w: Any = W, c: Any = C, v: Any = V) -> Any:
    return jax.numpy.tanh(x @ w + c) @ v


@pytest.mark.peers
@pytest.mark.parametrize("jit", [False, True])
def test_values_and_gradients(jax: Any, jit: bool) -> None:
    from onnx_convgrad.jax import call

    f = call(MLP)
    wrapped = jax.jit(f) if jit else f
    np.testing.assert_allclose(wrapped(X), plain(jax, X), **TOL)

    def loss(function: Any) -> Any:
        return lambda x: (function(x) ** 2).sum()

    np.testing.assert_allclose(jax.grad(loss(wrapped))(X), jax.grad(loss(lambda x: plain(jax, x)))(X), **TOL)


@pytest.mark.peers
def test_second_order(jax: Any) -> None:
    from onnx_convgrad.jax import call

    def penalty(function: Any) -> Any:
        return lambda x: (jax.grad(lambda z: (function(z) ** 2).sum())(x) ** 2).sum()

    expected = jax.grad(penalty(lambda x: plain(jax, x)))(X)
    np.testing.assert_allclose(jax.grad(penalty(call(MLP)))(X), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.peers
def test_parameters_are_operands(jax: Any) -> None:
    from onnx_convgrad.jax import call

    f = call(MLP, wrt="parameters")
    assert list(f.parameters) == ["w", "c", "v"]
    found = jax.grad(lambda p: (f(X, p) ** 2).sum())(f.parameters)
    expected = jax.grad(lambda p: (plain(jax, X, *p) ** 2).sum())((W, C, V))
    for name, value in zip(("w", "c", "v"), expected, strict=True):
        np.testing.assert_allclose(found[name], value, **TOL)


@pytest.mark.peers
def test_integers_have_no_gradient(jax: Any) -> None:
    from onnx_convgrad.jax import call

    f = call(graph_of("(float[V,2] t, int64[N] i) => (float[N,2] y) { y = Gather (t, i) }"))
    table, i = np.ones((4, 2), "f"), np.array([1, 1, 3])
    with jax.enable_x64(True):
        assert jax.grad(lambda t: f(t, i).sum())(table)[:, 0].tolist() == [0, 2, 0, 1]


@pytest.mark.peers
def test_errors(jax: Any) -> None:
    from onnx_convgrad.jax import call

    with pytest.raises(ArgumentError, match="The function takes x, not 2 operands"):
        call(MLP)(X, X)
    with pytest.raises(ArgumentError, match="The last operand must be a dict with w, c, v"):
        call(MLP, wrt="parameters")(X)


def test_without_jax_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "onnx_convgrad.jax", raising=False)
    with pytest.raises(ExecutionError, match=r"JAX is not installed\. Install it with `python -m pip install jax`"):
        __import__("onnx_convgrad.jax")
