"""Operators with derivative zero, and operators without a derivative."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnx_convgrad import api
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import rule_test, text_model

CASES = [
    *(Case(op, [rand(2, 3)]) for op in ("Ceil", "Floor", "Round", "Sign")),
    *(Case(op, [rand(2, 3)], dtype=np.float16) for op in ("Floor", "Sign")),
]

COMPARISONS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "QuantizeLinear")

# Models in which y depends on x through the operator and through x^2: the gradient must be that of x^2 alone.
BESIDE = {
    **{op: f"q = {op} (x)" for op in ("Floor", "Ceil", "Round", "Sign", "RandomNormalLike", "RandomUniformLike")},
    **{op: f"b = {op} (x, one) q = Cast <to = 1> (b)" for op in COMPARISONS},
    **{op: f"b = {op} (x) q = Cast <to = 1> (b)" for op in ("IsNaN", "IsInf", "Shape", "Size")},
    **{op: f"b = {op} <axis = 0> (x) q = Cast <to = 1> (b)" for op in ("ArgMax", "ArgMin")},
    "Logic": (
        "a = Greater (x, one) b = Less (x, one) c = And (a, b) d = Or (c, a) k = Xor (d, b) h = Not (k) "
        "q = Cast <to = 1> (h)"
    ),
    "NonZero": "b = NonZero (x) c = ReduceSum <keepdims = 0> (b) q = Cast <to = 1> (c)",
    "EyeLike": "m = Unsqueeze (x, axis) r = EyeLike (m) q = ReduceSum (r)",
    "ConstantOfShape": "b = Shape (x) q = ConstantOfShape (b)",
    "Cast to int": "b = Cast <to = 7> (x) q = Cast <to = 1> (b)",
    "Bernoulli": "p = Clip (x, zero, one) q = Bernoulli (p)",
    "Multinomial": "m = Unsqueeze (x, axis) b = Multinomial <sample_size = 1> (m) q = Cast <to = 1> (b)",
    "BitShift": 'b = Cast <to = 12> (x) c = BitShift <direction = "LEFT"> (b, b) q = Cast <to = 1> (c)',
    "Bitwise": (
        "b = Cast <to = 6> (x) c = BitwiseAnd (b, b) d = BitwiseOr (c, b) k = BitwiseXor (d, b) h = BitwiseNot (k) "
        "q = Cast <to = 1> (h)"
    ),
    "MatMulInteger": (
        "u = QuantizeLinear (x, one) m = Unsqueeze (u, axis) k = Transpose <perm = [1, 0]> (m) "
        "b = MatMulInteger (k, m) q = Cast <to = 1> (b)"
    ),
}


def beside(body: str) -> onnx.ModelProto:
    return text_model(f"""(float[3] x) => (float[N, M] y) {{
        one = Constant <value_float = 1.0> () zero = Constant <value_float = 0.0> () axis = Constant <value_ints = [0]> ()
        {body} s = Mul (x, x) t = ReduceSum (s) f = ReduceSum (q) y = Add (t, f) }}""")


test_rule = rule_test(CASES)


@pytest.mark.parametrize("name", BESIDE)
def test_operators_of_derivative_zero_contribute_nothing(name: str) -> None:
    model = beside(BESIDE[name])
    x = np.asarray([0.25, 1.5, 2.75], np.float32)
    got = run(api.augment(model, wrt=["x"], of=["y"], cotangents="ones", straight_through=False), {"x": x})["x_grad"]
    np.testing.assert_allclose(got, 2 * x, rtol=1e-6)


def test_a_zero_gradient_has_a_warning() -> None:
    model = text_model("(float[3] x) => (float[3] y) { y = Floor (x) }")
    with pytest.warns(UserWarning, match="is zero"):
        augmented = api.augment(model, wrt=["x"], cotangents="ones")
    np.testing.assert_array_equal(run(augmented, {"x": np.ones(3, np.float32)})["x_grad"], 0)


TREE = onnx.helper.make_node(
    "TreeEnsembleRegressor",
    ["x"],
    ["t"],
    domain="ai.onnx.ml",
    n_targets=1,
    nodes_treeids=[0, 0, 0],
    nodes_nodeids=[0, 1, 2],
    nodes_featureids=[1, 0, 0],
    nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
    nodes_values=[0.5, 0.0, 0.0],
    nodes_truenodeids=[1, 0, 0],
    nodes_falsenodeids=[2, 0, 0],
    target_treeids=[0, 0],
    target_nodeids=[1, 2],
    target_ids=[0, 0],
    target_weights=[3.0, 5.0],
)
BINARIZER = onnx.helper.make_node("Binarizer", ["x"], ["t"], domain="ai.onnx.ml", threshold=0.25)


@pytest.mark.parametrize("node", [TREE, BINARIZER], ids=lambda node: node.op_type)
def test_trees_and_thresholds_contribute_nothing(node: onnx.NodeProto) -> None:
    model = text_model("(float[2,3] x) => (float[2,3] y) { z = Mul(x, x) y = Mul(z, t) }")
    model.graph.node.insert(0, node)
    model.opset_import.add(domain="ai.onnx.ml", version=3)
    x = np.random.default_rng(5).standard_normal((2, 3)).astype(np.float32)
    t = np.where(x[:, 1:2] <= 0.5, 3, 5) if node is TREE else x > 0.25
    seed = np.random.default_rng(6).standard_normal((2, 3)).astype(np.float32)
    got = run(api.augment(model, wrt=["x"]), {"x": x, "y_grad": seed})
    np.testing.assert_allclose(got["x_grad"], 2 * x * t * seed, rtol=1e-6)


def test_dynamic_quantization_is_differentiated_by_its_function_body() -> None:
    """scale = (max(x, 0) - min(x, 0)) / 255."""
    model = text_model("(float[3] x) => (float y) { q, y, z = DynamicQuantizeLinear (x) }")
    got = run(api.augment(model, wrt=["x"], cotangents="ones"), {"x": np.asarray([-1, 0.5, 3], np.float32)})["x_grad"]
    np.testing.assert_allclose(got, np.asarray([-1, 0, 1]) / 255, rtol=1e-6)
