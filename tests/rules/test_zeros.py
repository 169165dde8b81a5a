"""Operators with derivative zero, and operators without a derivative."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnx_convgrad import api
from onnx_convgrad.autodiff.registry import rules
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import rule_test, text_model

CASES = [
    *(Case(op, [rand(2, 3)]) for op in ("Ceil", "Floor", "Round", "Sign")),
    *(Case(op, [rand(2, 3)], dtype=np.float16) for op in ("Floor", "Sign")),
]

# Models in which y depends on x through the operator and through x^2: the gradient must be that of x^2 alone.
BESIDE = {
    "Floor": "q = Floor (x)",
    "Ceil": "q = Ceil (x)",
    "Round": "q = Round (x)",
    "Sign": "q = Sign (x)",
    "Greater": "b = Greater (x, one) q = Cast <to = 1> (b)",
    "GreaterOrEqual": "b = GreaterOrEqual (x, one) q = Cast <to = 1> (b)",
    "Less": "b = Less (x, one) q = Cast <to = 1> (b)",
    "LessOrEqual": "b = LessOrEqual (x, one) q = Cast <to = 1> (b)",
    "Equal": "b = Equal (x, one) q = Cast <to = 1> (b)",
    "IsNaN": "b = IsNaN (x) q = Cast <to = 1> (b)",
    "IsInf": "b = IsInf (x) q = Cast <to = 1> (b)",
    "Logic": (
        "a = Greater (x, one) b = Less (x, one) c = And (a, b) d = Or (c, a) k = Xor (d, b) h = Not (k) "
        "q = Cast <to = 1> (h)"
    ),
    "ArgMax": "b = ArgMax <axis = 0> (x) q = Cast <to = 1> (b)",
    "ArgMin": "b = ArgMin <axis = 0> (x) q = Cast <to = 1> (b)",
    "Shape": "b = Shape (x) q = Cast <to = 1> (b)",
    "Size": "b = Size (x) q = Cast <to = 1> (b)",
    "NonZero": "b = NonZero (x) c = ReduceSum <keepdims = 0> (b) q = Cast <to = 1> (c)",
    "EyeLike": "m = Unsqueeze (x, axis) r = EyeLike (m) q = ReduceSum (r)",
    "ConstantOfShape": "b = Shape (x) q = ConstantOfShape (b)",
    "Cast to int": "b = Cast <to = 7> (x) q = Cast <to = 1> (b)",
    "QuantizeLinear": "b = QuantizeLinear (x, one) q = Cast <to = 1> (b)",
    "Bernoulli": "p = Clip (x, zero, one) q = Bernoulli (p)",
    "Multinomial": "m = Unsqueeze (x, axis) b = Multinomial <sample_size = 1> (m) q = Cast <to = 1> (b)",
    "RandomNormalLike": "q = RandomNormalLike (x)",
    "RandomUniformLike": "q = RandomUniformLike (x)",
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
    constants = (
        "one = Constant <value_float = 1.0> () zero = Constant <value_float = 0.0> () "
        "axis = Constant <value_ints = [0]> ()"
    )
    return text_model(
        "(float[3] x) => (float[N, M] y) "
        f"{{ {constants} {body} s = Mul (x, x) t = ReduceSum (s) f = ReduceSum (q) y = Add (t, f) }}"
    )


test_rule = rule_test(CASES)


@pytest.mark.parametrize("name", BESIDE)
def test_operators_of_derivative_zero_contribute_nothing(name: str) -> None:
    model = beside(BESIDE[name])
    x = np.asarray([0.25, 1.5, 2.75], np.float32)
    got = run(api.augment(model, wrt=["x"], of=["y"], seed="ones"), {"x": x})["x_grad"]
    np.testing.assert_allclose(got, 2 * x, rtol=1e-6)


def test_a_zero_gradient_has_a_warning() -> None:
    model = text_model("(float[3] x) => (float[3] y) { y = Floor (x) }")
    with pytest.warns(UserWarning, match="is zero"):
        augmented = api.augment(model, wrt=["x"], seed="ones")
    np.testing.assert_array_equal(run(augmented, {"x": np.ones(3, np.float32)})["x_grad"], 0)


def test_unique_is_refused_with_the_reason() -> None:
    model = text_model("(float[3] x) => (float[N] y) { y = Unique (x) }")
    with pytest.raises(DifferentiationError, match="number of its results depends on which values are equal"):
        api.augment(model, wrt=["x"], seed="ones")


def test_dynamic_quantization_is_differentiated_by_its_function_body() -> None:
    """scale = (max(x, 0) - min(x, 0)) / 255."""
    model = text_model("(float[3] x) => (float y) { q, y, z = DynamicQuantizeLinear (x) }")
    got = run(api.augment(model, wrt=["x"], seed="ones"), {"x": np.asarray([-1, 0.5, 3], np.float32)})["x_grad"]
    np.testing.assert_allclose(got, np.asarray([-1, 0, 1]) / 255, rtol=1e-6)


def test_every_declared_name_is_an_operator() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if not schema.domain}
    assert not [rule.name for rule in rules() if not rule.domain and rule.op_type not in known]
