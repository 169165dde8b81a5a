"""Inferred shapes are those that ONNX Runtime produces."""

from __future__ import annotations

import numpy as np

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of


def test_a_transposed_convolution_whose_kernel_is_shorter_than_its_stride() -> None:
    """ONNX Runtime omits rows at the end, where the specification of SAME_UPPER requires n times the stride."""
    model = graph_of(
        "(float[1,1,4] x, float[1,1,1] w, float[7,2] k) => (float[1,1,2] y)"
        ' { v = ConvTranspose <auto_pad = "SAME_UPPER", strides = [2]> (x, w) y = MatMul (v, k) }'
    )
    feed = {"x": np.ones((1, 1, 4)), "w": np.full((1, 1, 1), 3), "k": np.arange(14).reshape(7, 2)}
    made = og.augment(model, wrt=["x", "v"])
    got = run(made, {**{n: a.astype(np.float32) for n, a in feed.items()}, "y_grad": np.ones((1, 1, 2), np.float32)})
    np.testing.assert_array_equal(got["v_grad"], (4 * np.arange(7) + 1).reshape(1, 1, 7))
    np.testing.assert_array_equal(got["x_grad"], 3 * (8 * np.arange(4) + 1).reshape(1, 1, 4))


def test_a_reshape_to_absurdly_many_axes_is_not_inferred() -> None:
    """A declared size that no tensor can have costs no time: the library would make a symbol for each axis."""
    model = graph_of("(float[2,3] x, int64[9000000000000000000] shape) => (float[] y) { y = Reshape (x, shape) }")
    built = og.augment(model, wrt="x", cotangents="ones")
    assert [o.name for o in built.graph.output] == ["y", "x_grad"]


def test_an_expansion_by_sizes_of_which_some_are_minus_one() -> None:
    """PyTorch's older exporter writes `expand(x.shape[0], -1, 3)` with a choice among sizes."""
    loaded = og.load(
        graph_of(
            "(float[N,5] x, float[1,4,1] z) => (float[] y) <int64[2] rest = {-1, 3}, int64[3] one = {1, 1, 1}> {"
            " s = Shape <end = 1> (x) sizes = Concat <axis = 0> (s, rest) m = Neg (one) q = Equal (sizes, m)"
            " w = Where (q, one, sizes) e = Expand (z, w) y = Neg (e) }"
        )
    )
    shapes = {v.name: str(v.shape) for node in loaded.canonical.graph for v in node.outputs}
    assert shapes["e"] == "[N,4,3]"
