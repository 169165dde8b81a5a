"""Ifs of known condition are replaced by their branches."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import ROWS, graph_of, of_rows, rows_gradient


def test_branches_of_known_condition() -> None:
    """Two branches use one name, the second If is inside the first, and the condition of the third depends on x."""
    model = of_rows(
        """<int64 two = {2}, bool no = {0}> {
        s = Shape (x)  i = Constant <value = int64 {0}> ()  d = Gather (s, i)  c = Equal (d, two)
        a = If (c) <
            then_branch = t () => (float[2,3] p) {
                k = Constant <value = float[3] {1, 2, 3}> ()
                p = If (no) <then_branch = tt () => (float[2,3] q) {q = Neg (x)},
                             else_branch = te () => (float[2,3] r) {r = Mul (x, k)}>
            },
            else_branch = e () => (float[2,3] p) {p = Neg (x)}>
        y = If (no) <then_branch = u () => (float[2,3] v) {v = Neg (a)},
                     else_branch = w () => (float[2,3] p) {k = Constant <value = float {2}> () p = Mul (k, a)}>
        m = ReduceMax <keepdims = 0> (x)  h = Cast <to = 9> (m)
        z = If (h) <then_branch = l () => (float[2,3] o) {o = Neg (x)}, else_branch = n () => (float[2,3] o) {o = Exp (x)}>
        }"""
    )
    np.testing.assert_array_equal(rows_gradient(model), np.float32([[2, 4, 6]] * 2))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, [2, 3]))
    assert [node.op_type for node in og.augment(model, wrt="inputs").graph.node].count("If") == 2


@pytest.mark.parametrize("rows", ["2", "n"])
def test_a_branch_that_is_taken_declares_the_shape_of_the_other(rows: str) -> None:
    """PyTorch's exporter writes scatter_reduce with an If on a rank, which inference finds where sizes are unknown."""
    text = f"""(float[{rows}, 3] x) => (float[{rows}, 2] y)
        <float[2, 3] w = {{1, 2, 3, 4, 5, 6}}, int64[1] columns = {{3}}, int64 none = {{0}}> {{
            count = Shape <start = 0, end = 1> (x)
            sizes = Concat <axis = 0> (count, columns)
            zeros = ConstantOfShape (sizes)
            shape = Shape (zeros)
            rank = Size (shape)
            scalar = Equal (rank, none)
            sum = Add (x, zeros)
            h = If (scalar) <
                then_branch = one () => (float[6] a) {{ a = Squeeze (sum) }},
                else_branch = two () => (float[6] b) {{ b = Identity (sum) }}
            >
            y = Gemm <transB = 1> (h, w)
        }}"""
    model = graph_of(text, opset=18)
    result = run(og.vjp(model, wrt=["x", "w"]), {"x": ROWS, "y_grad": np.ones((2, 2), np.float32)})
    np.testing.assert_allclose(result["x_grad"], np.tile([5, 7, 9], (2, 1)))
    np.testing.assert_allclose(result["w_grad"], np.tile(ROWS.sum(0), (2, 1)), rtol=1e-5)


def test_sizes_behind_a_branch_are_those_of_the_inputs() -> None:
    """As in Silero VAD: an If decides by the last size, and the number of samples goes through it into an LSTM."""
    text = """(float[N,4,1] x) => (float[A,B,C] h) {
        z = Relu (x)  s = Shape <start = 2> (z)  c = Equal (s, one)
        q = If (c) <then_branch = g () => (float[] t) { t = Squeeze (z, two) },
                    else_branch = g () => (float[] e) { e = Identity (z) }>
        u = Unsqueeze (q, zero)    y, h = LSTM <hidden_size = 5> (u, w, r) }"""
    stored = {"one": np.array([1]), "two": np.array([2]), "zero": np.array([0])}
    weights = {"w": np.ones((1, 20, 4), np.float32), "r": np.ones((1, 20, 5), np.float32)}
    loaded = og.load(graph_of(text, **stored, **weights), input_shapes={"x": ["N", 4, 1]})
    assert str(loaded.canonical.graph.outputs[0].shape) == "[1,N,5]"
