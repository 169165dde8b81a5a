"""Ranks that convolutions give to data of unknown shape."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of


@pytest.mark.parametrize("per_sample", [False, True], ids=["", "per sample"])
@pytest.mark.parametrize(
    "body",
    [
        "y = Conv(x, w)",
        "y = ConvTranspose<strides=[2,2]>(x, w)",
        "t = Transpose<perm=[0,1,3,2]>(x) y = Conv(t, w)",
        "p = AveragePool<kernel_shape=[2,1]>(x) y = Conv(p, w)",
    ],
)
def test_operators_give_the_rank_of_data_without_a_shape(body: str, per_sample: bool) -> None:
    generator = np.random.default_rng(0)
    feed = {"x": generator.standard_normal((2, 3, 4, 5)), "w": generator.standard_normal((3, 3, 2, 2))}
    feed = {name: a.astype(np.float32) for name, a in feed.items()}
    wrt = ["w"] if per_sample else ["x", "w"]
    models = (
        graph_of(f"(float[{sizes}] x, float[3,3,2,2] w) => (float[] y) {{ {body} }}") for sizes in ("2,3,4,5", "")
    )
    known, unknown = (og.augment(model, wrt=wrt, per_sample=per_sample, cotangents="ones") for model in models)
    assert len(unknown.graph.input[0].type.tensor_type.shape.dim) == 4
    want, got = run(known, feed), run(unknown, feed)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("graph", "shapes"),
    [
        ("(float[1,3,n] x) => (float[] y) <float[2,3,1] w = {1,2,3,4,5,6}> { v = Squeeze (x) y = Conv (v, w) }", {}),
        (
            "(float[n,1,2,k] x, float[m,1,a,b] w) => (float[p,q,r,s] y) { y = Conv (x, w) }",
            {"x": (2, 1, 2, 5), "w": (3, 1, 2, 1)},
        ),
    ],
    ids=["rank", "kernel larger than is typical"],
)
def test_unknown_shapes_of_a_convolution(graph: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Inference forgets the rank that the kernel gives its data; kernels of typical sizes would not fit."""
    model = graph_of(graph)
    result = og.augment(model, wrt="inputs", cotangents="ones")
    if shapes:
        feed = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        np.testing.assert_array_equal(run(result, feed)["w_grad"], np.full((3, 1, 2, 1), 10))
    else:
        assert [o.name for o in result.graph.output] == ["y", "x_grad"]


def test_a_reduction_that_keeps_its_axes_keeps_the_rank() -> None:
    """So ends the gradient of an operand that may have been broadcast: over axes that are known at run time only."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    b = np.array([[1, 2, 3]], np.float32)
    pulled = og.vjp(graph_of("(float[N,3] x, float[M,3] b) => (float[K,3] y) { y = Mul (x, b) }"), wrt="inputs")
    feed = {"x": x, "b": b, "y_grad": np.ones((5, 2, 3), np.float32)}
    got = run(og.vmap(pulled, in_axes={"y_grad": 0}), feed)
    np.testing.assert_array_equal(got["b_grad"], [x.sum(0, keepdims=True)] * 5)
    np.testing.assert_array_equal(got["x_grad"], [np.broadcast_to(b, x.shape)] * 5)
