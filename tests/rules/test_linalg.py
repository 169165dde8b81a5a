"""MatMul, Gemm and Det."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import autograd, one_node, rule_test, text_model

MATMUL = [
    *(Case("MatMul", [rand(3, 4), rand(4, 5)], dtype=dtype) for dtype in (np.float32, np.float16, np.float64)),
    *(
        Case("MatMul", [rand(*a), rand(*b)])
        for b, others in {
            (4,): [(4,), (3, 4), (2, 3, 4)],
            (4, 5): [(4,), (2, 3, 4), (6, 2, 3, 4)],
            (2, 4, 5): [(4,), (3, 4), (2, 3, 4), (1, 3, 4)],
            (2, 3, 4, 5): [(4,)],
            (6, 4, 5): [(2, 1, 3, 4)],
            (1, 1): [(1, 1)],
        }.items()
        for a in others
    ),
    Case("MatMul", [rand(6, 2, 3, 4), rand(4, 5)], constants=[1], name="dense layer"),
    Case("MatMul", [rand(2, 1, 3, 4), rand(1, 6, 4, 5)], dtype=np.float64),
    *(Case("MatMul", [rand(*a), rand(4, 5)], name="empty batch") for a in ((0, 4), (2, 0, 4))),
]

ROWS = [rand(3, 4), rand(4, 5)]
BOTH = {"transA": 1, "transB": 1, "alpha": 1.5}
GEMM = [
    Case("Gemm", ROWS, {"transA": 0, "transB": 0}),
    Case("Gemm", [rand(3, 4), rand(5, 4)], {"transA": 0, "transB": 1}),
    Case("Gemm", [rand(4, 3), rand(4, 5)], {"transA": 1, "transB": 0}),
    Case("Gemm", [rand(4, 3), rand(5, 4)], {"transA": 1, "transB": 1}),
    *(
        Case("Gemm", [*ROWS, rand(*c)], {"alpha": 0.5, "beta": -2.0})
        for c in [(), (1,), (5,), (1, 5), (3, 1), (3, 5), (1, 1)]
    ),
    Case("Gemm", [rand(4, 3), rand(5, 4), rand(5)], {**BOTH, "beta": 0.5}),
    Case("Gemm", [rand(4, 3), rand(5, 4), rand(5)], BOTH, dtype=np.float64),
    Case("Gemm", [rand(3, 4), rand(5, 4), rand(5)], {"transB": 1}, dtype=np.float16),
    Case("Gemm", [rand(3, 4), rand(5, 4), rand(5)], {"transB": 1}, constants=[1, 2], name="dense layer"),
    Case("Gemm", [*ROWS, rand(5)], {"beta": 0.0}),
    Case("Gemm", [rand(0, 4), rand(4, 5), rand(5)], name="empty batch"),
    Case("Gemm", [*ROWS, rand(5)], opset=9),
    Case("Gemm", [rand(1, 4), rand(4, 5), rand(1, 5)]),
]

OTHERS = [
    *(Case("Det", [rand(*shape)]) for shape in [(1, 1), (2, 2), (3, 3), (2, 4, 4), (2, 1, 3, 3), (3, 1, 1)]),
    Case("Det", [np.array([[1, 2, 3], [2, 4, 6], [1, 0, 1]], np.float32)], name="singular"),
    Case("Det", [np.zeros((3, 3), np.float32)], name="zero"),
]

test_rule = rule_test([*MATMUL, *GEMM, *OTHERS])


SHAPES = [((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4,)), ((4,), (2, 4, 5)), ((3, 4), (2, 4, 5)),
          ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (6, 4, 5))]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
@pytest.mark.parametrize("known", [(True, False), (False, True), (False, False)], ids=str)
def test_matmul_of_unknown_rank(a: tuple[int, ...], b: tuple[int, ...], known: tuple[bool, bool]) -> None:
    """Each combination of known and unknown ranks, against PyTorch."""
    shapes = {n: [None] * len(s) if k else None for n, s, k in zip("ab", (a, b), known, strict=True)}
    model = og.vjp(one_node(helper.make_node("MatMul", ["a", "b"], ["y"]), shapes), wrt="inputs")
    generator = np.random.default_rng(0)
    left, right = (generator.uniform(size=s).astype(np.float32) for s in (a, b))
    g = np.asarray(generator.uniform(size=np.shape(left @ right)), np.float32)
    got = run(model, {"a": left, "b": right, "y_grad": g})
    for name, want in zip(("a_grad", "b_grad"), autograd(torch.matmul, left, right, seed=g), strict=True):
        np.testing.assert_allclose(got[name], want, rtol=1e-5)


def test_dense_layer_is_two_products() -> None:
    """Each cotangent of a batched dense layer is one product, without a reduction."""
    model = one_node(helper.make_node("MatMul", ["a", "b"], ["y"]), {"a": (2, 3, 4), "b": (4, 5)})
    operators = [n.op_type for n in og.vjp(model, wrt="inputs").graph.node]
    assert operators.count("ReduceSum") == 0
    assert sorted(set(operators)) == ["Gemm", "MatMul", "Reshape", "Transpose"]


@pytest.mark.parametrize("nodes", ["t = Transpose (w) y = MatMul (v, t)", "y = MatMul (w, v)"])
def test_a_vector_and_a_transposed_matrix(nodes: str) -> None:
    """ONNX Runtime 1.32 fuses a Transpose and the following MatMul with a vector incorrectly."""
    model = text_model(f"(float[7,5] w, float[5] v) => (float[7] y) {{ {nodes} }}")
    generator = np.random.default_rng(0)
    w, v, g = (generator.standard_normal(shape).astype(np.float32) for shape in ((7, 5), 5, 7))
    got = run(og.augment(model, wrt="inputs"), {"w": w, "v": v, "y_grad": g})
    np.testing.assert_allclose(got["v_grad"], w.T @ g, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["w_grad"], np.outer(g, v), rtol=1e-5, atol=1e-6)


def test_the_tangent_of_a_product_plus_a_bias_of_unknown_size_has_the_rank_of_the_result() -> None:
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"])
    built = og.jvp(one_node(node, {"x": ["n", "k"], "w": ["k", "m"], "b": ["c"]}), wrt=["x", "w", "b"])
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in built.graph.output}
    assert ranks == {"y_tangent": 2}
