"""Jacobians and Hessians equal those of torch.func, in float64, in both modes, for fixed and unknown sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose
from torch import nn
from torch.func import functional_call, jacrev, vmap

import onnx_convgrad as og
from onnx_convgrad.errors import ArgumentError, DifferentiationError
from onnx_convgrad.pipeline.dense import Pattern
from onnx_convgrad.runtime import run
from tests.support.classifiers import Classifier
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
W, B, V = RNG.standard_normal((4, 6)), RNG.standard_normal(6), RNG.standard_normal((6, 3))
X = RNG.standard_normal((2, 4))
TOL = {"rtol": 1e-9, "atol": 1e-12}


def mlp(batch: str = "2") -> onnx.ModelProto:
    text = f"""(double[{batch},4] x) => (double[{batch},3] y) {{
        a = MatMul (x, w) b = Add (a, c) h = Tanh (b) y = MatMul (h, v)
    }}"""
    return graph_of(text, w=W, c=B, v=V)


def hessian(f: Callable[..., torch.Tensor], argnums: Any = 0) -> Any:
    return jacrev(jacrev(f, argnums), argnums)  # `torch.func.hessian` warns of TorchScript


def function(x: torch.Tensor, w: Any = W, c: Any = B) -> torch.Tensor:
    return torch.tanh(x @ torch.as_tensor(w) + torch.as_tensor(c)) @ torch.as_tensor(V)


@pytest.mark.parametrize("batch", ["2", "N"])
@pytest.mark.parametrize("mode", ["auto", "reverse", "forward"])
def test_jacobian_of_an_input(batch: str, mode: str) -> None:
    found = run(og.jacobian(mlp(batch), of="y", wrt="x", mode=mode), {"x": X})
    assert list(found) == ["y_x_jacobian"]
    assert_allclose(found["y_x_jacobian"], jacrev(function)(torch.tensor(X)), **TOL)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_jacobians_of_parameters(mode: str) -> None:
    found = run(og.jacobian(mlp("N"), wrt=["w", "c"], mode=mode), {"x": X})
    expected = jacrev(function, argnums=(1, 2))(torch.tensor(X), torch.tensor(W), torch.tensor(B))
    assert list(found) == ["y_w_jacobian", "y_c_jacobian"]
    for value, wanted in zip(found.values(), expected, strict=True):
        assert_allclose(value, wanted, **TOL)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("batch", ["2", "N"])
def test_jacobian_of_each_sample(batch: str, mode: str) -> None:
    found = run(og.jacobian(mlp(batch), wrt="x", mode=mode, per_sample=True), {"x": X})["y_x_jacobian"]
    assert_allclose(found, vmap(jacrev(function))(torch.tensor(X)), **TOL)


def test_jacobian_of_the_parameters_for_each_sample() -> None:
    found = run(og.jacobian(mlp("N"), wrt=["w", "c"], per_sample=True), {"x": X})
    expected = vmap(jacrev(function, argnums=(1, 2)), (0, None, None))(
        torch.tensor(X), torch.tensor(W), torch.tensor(B)
    )
    for value, wanted in zip(found.values(), expected, strict=True):
        assert_allclose(value, wanted, **TOL)


def test_several_targets_and_sources_with_a_zero() -> None:
    model = graph_of("(double[3] a, double[2] b) => (double[3] y, double[2] z) { y = Exp (a) z = Mul (b, b) }")
    with pytest.warns(UserWarning, match="The jacobian is zero: 'y' by 'b', 'z' by 'a'"):
        built = og.jacobian(model, wrt="inputs")
    a, b = np.array([0.1, 0.2, 0.3]), np.array([1.0, 2.0])
    found = run(built, {"a": a, "b": b})
    expected = {
        "y_a_jacobian": np.diag(np.exp(a)),
        "y_b_jacobian": np.zeros((3, 2)),
        "z_a_jacobian": np.zeros((2, 3)),
        "z_b_jacobian": np.diag(2 * b),
    }
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_allclose(found[name], value, **TOL)


def test_mode_auto_takes_fewer_directions() -> None:
    """Without a name of the mode, the loop has as many turns as the smaller side has numbers."""
    wide = graph_of("(double[2] x) => (double[40] y) { t = MatMul (x, v) y = Sin (t) }", v=RNG.standard_normal((2, 40)))
    for model, turns in ((wide, 2), (mlp("1"), 3)):
        built = og.jacobian(model, wrt="x")
        sizes = {tuple(i.dims) for i in built.graph.initializer if i.data_type == onnx.TensorProto.INT64}
        assert (turns,) in sizes
        assert [node.op_type for node in built.graph.node].count("Scan") == 1


def test_the_file_is_about_as_long_as_one_vjp() -> None:
    """The issue allows twice the nodes of one vector-Jacobian product."""
    model = Classifier().file(batch="1")

    def count(graph: onnx.GraphProto) -> int:
        return sum(1 + sum(count(a.g) for a in node.attribute if a.HasField("g")) for node in graph.node)

    assert count(og.jacobian(model, wrt="image").graph) < 2 * count(og.vjp(model, wrt="image").graph)


def test_convolutions_in_the_loop() -> None:
    net, x = Classifier(), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    found = run(og.jacobian(net.file(), wrt="image", per_sample=True), {"image": x.numpy()})["y_image_jacobian"]
    expected = vmap(jacrev(lambda one: net(one[None])[0]))(x)
    assert_allclose(found, expected.detach(), rtol=1e-4, atol=1e-5)


# -- hessians ----------------------------------------------------------------------------------------------------------

LOSS = """(double[N,4] x) => (double[N] e, double s) {
    a = MatMul (x, w) b = Add (a, c) h = Tanh (b) y = MatMul (h, v) q = Mul (y, y)
    e = ReduceSum <keepdims = 0> (q, axis) s = ReduceSum <keepdims = 0> (e)
}"""


def _loss() -> onnx.ModelProto:
    return graph_of(LOSS, w=W, c=B, v=V, axis=np.array([1]))


def energy(x: torch.Tensor, w: Any = W, c: Any = B) -> torch.Tensor:
    return (function(x, w, c) ** 2).sum()


def test_hessian_of_an_input() -> None:
    found = run(og.hessian(_loss(), of="s", wrt="x"), {"x": X})
    assert list(found) == ["x_x_hessian"]
    assert_allclose(found["x_x_hessian"], hessian(energy)(torch.tensor(X)), **TOL)


def test_hessian_of_each_sample() -> None:
    found = run(og.hessian(_loss(), of="e", wrt="x", per_sample=True), {"x": X})["x_x_hessian"]
    assert_allclose(found, vmap(hessian(energy))(torch.tensor(X)), **TOL)


def test_hessians_of_pairs() -> None:
    found = run(og.hessian(_loss(), of="s", wrt=["x", "c"]), {"x": X})
    expected = hessian(energy, argnums=(0, 2))(torch.tensor(X), torch.tensor(W), torch.tensor(B))
    assert list(found) == ["x_x_hessian", "x_c_hessian", "c_x_hessian", "c_c_hessian"]
    for value, wanted in zip(found.values(), (e for row in expected for e in row), strict=True):
        assert_allclose(value, wanted, **TOL)


@pytest.mark.slow
def test_hessian_through_convolution_and_pool() -> None:
    """Of a smooth network: Softplus for Relu, and a mean for the pool of maxima."""
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 2, 3)
    model = graph_of(
        """(float[1,1,5,5] x) => (float s) { a = Conv (x, w, b) h = Softplus (a)
        p = AveragePool <kernel_shape = [2, 2]> (h) q = Mul (p, p) s = ReduceSum <keepdims = 0> (q) }""",
        w=conv.weight.detach().numpy(),
        b=conv.bias.detach().numpy(),
    )
    x = torch.randn(1, 1, 5, 5)

    def smooth(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = functional_call(conv, {"weight": w}, (x,))
        return (nn.functional.avg_pool2d(nn.functional.softplus(a), 2, 1) ** 2).sum()

    found = run(og.hessian(model, of="s", wrt=["x", "w"]), {"x": x.numpy()})
    expected = hessian(smooth, argnums=(0, 1))(x, conv.weight)
    for value, wanted in zip(found.values(), (e for row in expected for e in row), strict=True):
        assert_allclose(value, wanted.detach(), rtol=1e-4, atol=1e-6)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: og.jacobian(mlp(), wrt="x", mode="back"), ArgumentError, "Unknown mode 'back'"),
        (lambda: og.jacobian(mlp(), wrt="z"), ArgumentError, "Unknown value in wrt: 'z'"),
        (
            lambda: og.hessian(mlp(), of="y", wrt="x"),
            ArgumentError,
            "hessian needs one number, but `of` is 'y' of shape",
        ),
        (
            lambda: og.hessian(_loss(), of="e", wrt="c", per_sample=True),
            ArgumentError,
            "'c' has no axis of samples",
        ),
        (
            lambda: og.jacobian(mlp(), wrt="c", mode="forward", per_sample=True),
            ArgumentError,
            "'c' has no axis of samples",
        ),
        (
            lambda: og.jacobian(
                graph_of("(double[N,4] x) => (double[N,4] y) { y = Softmax <axis = 0> (x) }"), wrt="x", per_sample=True
            ),
            DifferentiationError,
            "mixes samples",
        ),
        *(
            (lambda g=graph, m=mode: og.jacobian(graph_of(g), wrt="x", per_sample=True, mode=m), ArgumentError, message)
            for mode in ("forward", "reverse")
            for graph, message in (
                ("(double[N,4] x) => (double y) { y = ReduceMean <keepdims = 0> (x) }", "'y' has no axis of samples"),
                ("(double[N,4] x) => (double[1,1] y) { y = ReduceSum (x) }", "'y' has no axis of samples"),
                ("(double[N,4] x) => (double[4,N] y) { y = Transpose (x) }", "'y' has no axis of samples in front"),
            )
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# -- sparse Jacobians --------------------------------------------------------------------------------------------------

BAND = """(double[{n},1,8] x) => (double[{n},1,8] y) {{
    c = Conv <pads = [1,1]> (x, w)  s = Mul (c, c)  y = Sub (s, x) }}"""
INSIDE = np.abs(np.subtract.outer(np.arange(8), np.arange(8))) <= 1


@pytest.mark.parametrize("sparse", [False, True], ids=["array", "scipy"])
@pytest.mark.parametrize("mode", ["auto", "reverse", "forward"])
def test_a_band_takes_three_directions(mode: str, sparse: bool) -> None:
    model, x = graph_of(BAND.format(n=1), w=RNG.standard_normal((1, 1, 3))), RNG.standard_normal((1, 1, 8))
    pattern = scipy.sparse.csr_array(INSIDE) if sparse else INSIDE
    found = run(og.jacobian(model, wrt="x", mode=mode, sparsity=pattern), {"x": x})["y_x_jacobian"]
    whole = run(og.jacobian(model, wrt="x"), {"x": x})["y_x_jacobian"].reshape(8, 8)
    assert_allclose(found, whole[INSIDE], **TOL)
    assert Pattern.of(pattern).colors().max() == 2


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("size", ["3", "N"])
def test_a_band_of_each_sample(mode: str, size: str) -> None:
    model, x = graph_of(BAND.format(n=size), w=RNG.standard_normal((1, 1, 3))), RNG.standard_normal((3, 1, 8))
    options: dict[str, Any] = {"wrt": "x", "mode": mode, "per_sample": True}
    found = run(og.jacobian(model, sparsity=INSIDE, **options), {"x": x})["y_x_jacobian"]
    whole = run(og.jacobian(model, **options), {"x": x})["y_x_jacobian"].reshape(3, 8, 8)
    assert_allclose(found, whole[:, INSIDE], **TOL)


@given(arrays(bool, st.tuples(st.integers(1, 12), st.integers(1, 12))))
def test_columns_of_one_color_have_no_common_row(matrix: np.ndarray) -> None:
    colors = Pattern.of(matrix).colors()
    for color in range(colors.max() + 1):
        assert (matrix[:, colors == color].sum(1) <= 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": INSIDE[:4]}, "sparsity has 4 rows, but 'y' of shape"),
        ({"sparsity": INSIDE[:, :4]}, "sparsity has 4 columns, but 'x' of shape"),
        ({"sparsity": [1, 2]}, "sparsity takes a matrix"),
        ({"sparsity": INSIDE, "wrt": ["x", "w"]}, "sparsity is for one value of `of` and one of `wrt`"),
    ],
)
def test_patterns_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    model = graph_of(BAND.format(n=1), w=RNG.standard_normal((1, 1, 3)))
    with pytest.raises(ArgumentError, match=re.escape(message)):
        og.jacobian(model, **{"wrt": "x", **options})
