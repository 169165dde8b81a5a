"""Sizes of two symbols that are broadcast."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of


@pytest.mark.filterwarnings("ignore:The derivative is zero")
@pytest.mark.parametrize("batches", [(1, 2), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "nodes",
    [
        "y = Mul (x, u)",
        "q = Less (x, u) f = Cast <to = 1> (q) y = Mul (f, x)",
        "m = Max (x, u) s = Sin (m) y = Mul (s, x)",
        "q = Greater (x, u) y = Where (q, x, u)",
        "s = Shape (u) h = Expand (x, s) y = Mul (h, x)",
        "m = MatMul (x, k) n = MatMul (u, k) y = Sub (m, n)",
    ],
)
def test_sizes_of_two_names_may_differ(nodes: str, batches: tuple[int, int]) -> None:
    """One of them may be 1 when the model runs, and then it is broadcast."""

    def gradients(*sizes: object) -> dict[str, np.ndarray]:
        text = "(float[{},3] x, float[{},3] u)".format(*sizes)
        model = graph_of(f"{text} => (float[p,3] y) <float[3,3] k = {{1,2,3,4,5,6,7,8,10}}> {{ {nodes} }}")
        return run(og.augment(model, wrt="inputs", cotangents="ones"), feed)

    generator = np.random.default_rng(0)
    feed = {n: generator.uniform(0.1, 1, (size, 3)).astype(np.float32) for n, size in zip("xu", batches, strict=True)}
    want, got = gradients(*batches), gradients("N", "B")
    for name in ("x_grad", "u_grad"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batches", [(1, 2), (2, 1)], ids=str)
def test_a_computed_size_keeps_its_name_when_shapes_are_inferred_again(batches: tuple[int, int]) -> None:
    """The Transpose gives `r` a rank, and all shapes are inferred again."""

    def gradients(*sizes: object) -> dict[str, np.ndarray]:
        text = "(float[{},{},3] x, float[{},3] u, float[] r)".format(*sizes)
        nodes = "a = Reshape (x, k) t = Tanh (a) m = Mul (t, u) y = Add (t, m) s = Transpose <perm = [1, 0]> (r)"
        model = graph_of(f"{text} => (float[p,3] y, float[q,r] s) <int64[2] k = {{-1, 3}}> {{ {nodes} }}")
        return run(og.augment(model, wrt=["x", "u"], of="y", cotangents="ones"), feed)

    generator = np.random.default_rng(0)
    feed = {n: generator.uniform(0.1, 1, (size, 3)).astype(np.float32) for n, size in zip("xu", batches, strict=True)}
    feed = {"x": feed["x"][:, None], "u": feed["u"], "r": feed["u"]}
    want, got = gradients(batches[0], 1, batches[1]), gradients("N", "T", "B")
    for name in ("x_grad", "u_grad"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)
