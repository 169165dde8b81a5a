"""Reads from sequences of known members are replaced by the members."""

from __future__ import annotations

import numpy as np
import onnx

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import ROWS, of_rows, rows_gradient
from tests.support.operators import text_model


def test_sequences_of_known_members() -> None:
    """PyTorch's exporter writes `stack`, `cat` and an index of a list like this."""
    model = of_rows(
        """<int64 first = {0}, int64 last = {-1}> {
        h = Tanh (x)  s = SequenceConstruct (x, h)  a = ConcatFromSequence <axis = 1, new_axis = 1> (s)
        n = SequenceEmpty ()  n1 = SequenceInsert (n, x)  n2 = SequenceInsert (n1, h, first)  n3 = SequenceInsert (n2, a)
        c = SequenceErase (n3)  b = ConcatFromSequence <axis = -1> (c)  y = SequenceAt (c, last)
        q = ReduceSumSquare <keepdims = 0> (a)  r = ReduceSumSquare <keepdims = 0> (b)  z = Add (q, r)
        }"""
    )
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, []))
    want = 1 + 4 * ROWS + 4 * np.tanh(ROWS) * (1 - np.tanh(ROWS) ** 2)
    np.testing.assert_allclose(rows_gradient(model), want, rtol=1e-5)
    result = run(og.augment(model, wrt="inputs", cotangents="ones"), {"x": ROWS})
    np.testing.assert_array_equal(result["y"], ROWS)


def test_sequence_map_of_members_of_different_sizes() -> None:
    body = "m (float[n,3] u, float[n,3] w, float[3] b) => (float[n,3] p) { q = Mul (u, w) p = Add (q, b) }"
    model = text_model(f"""(float[4,3] x, float[3] b) => (float[4,3] y) <int64[2] sizes = {{1, 3}}> {{
        s = SplitToSequence (x, sizes) h = Exp (x) t = SplitToSequence (h, sizes)
        m = SequenceMap <body = {body}> (s, t, b) y = ConcatFromSequence <axis = 0> (m)
    }}""")
    x, seed = np.random.default_rng(2).standard_normal((2, 4, 3)).astype(np.float32)
    got = run(og.augment(model, wrt=["x", "b"]), {"x": x, "b": np.ones(3, np.float32), "y_grad": seed})
    np.testing.assert_allclose(got["y"], x * np.exp(x) + 1, rtol=1e-5)
    np.testing.assert_allclose(got["x_grad"], seed * (1 + x) * np.exp(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["b_grad"], seed.sum(0), rtol=1e-5, atol=1e-6)
