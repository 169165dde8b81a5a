"""Arithmetic, powers, trigonometry, selection, conversions and running sums."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from onnx_convgrad import api
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import autograd, rule_test, text_model

POSITIVE = {"low": 0.5, "high": 2.0}
UNIT = {"low": -0.9, "high": 0.9}
A, B, C = rand(2, 3), rand(3), rand(4, 1, 3)
MASK = np.asarray([[True, False, True], [False, False, True]])
AXIS = np.asarray(1)

BINARY = [
    Case(op, [A, other])
    for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum")
    for other in (rand(2, 3, **POSITIVE), rand(4, 1, 3, **POSITIVE))
]

UNARY = [Case(op, [A]) for op in ("Neg", "Abs", "Exp", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Tanh", "Atan", "Asinh")]

CASES = [
    *BINARY,
    *UNARY,
    *(Case(op, [rand(2, 3, **POSITIVE)]) for op in ("Log", "Sqrt", "Reciprocal")),
    *(Case(op, [rand(2, 3, **UNIT)]) for op in ("Asin", "Acos", "Atanh")),
    Case("Erf", [A], step=3e-3),  # the reference evaluator computes it in float32
    Case("Acosh", [rand(2, 3, low=1.2, high=3.0)]),
    Case("Add", [rand(), rand(2)], name="scalar"),
    Case("Mul", [rand(1, 3), rand(2, 1)], name="outer"),
    Case("Mul", [rand(0, 3), rand(3)], name="empty"),
    Case("Div", [A, rand(3, **POSITIVE)], dtype=np.float16),
    Case("Div", [A, rand(3, **POSITIVE)], dtype=np.float64),
    Case("Mod", [rand(2, 3, low=-5, high=5), rand(3, **POSITIVE)], {"fmod": 1}),
    Case("Mod", [rand(2, 3, low=-5, high=5), rand(3, low=-2, high=-0.5)], {"fmod": 1}, name="negative"),
    # Pow: every branch of a constant exponent, integer exponents, and exponents known only at run time
    *(
        Case("Pow", [base, np.asarray(k, np.float32)], wrt=[0], constants=[1], name=f"{k}")
        for base, exponents in ((A, (0, 1, 2, 3, 4)), (rand(2, 3, **POSITIVE), (0.5, -1, 1.7)))
        for k in exponents
    ),
    Case("Pow", [A, np.asarray([3, 2, 1])], name="int64"),
    Case("Pow", [A, np.asarray([3, 0, 1], np.int32)], name="int32 with zero"),
    Case("Pow", [A, np.asarray([3, 0, 1])], feed_integers=True, name="int64 fed"),
    Case("Pow", [rand(2, 3, **POSITIVE), rand(4, 1, 3)]),
    Case("Pow", [rand(2, 3, **POSITIVE), rand(3)], dtype=np.float16),
    Case("Pow", [rand(2, 3, **POSITIVE), rand(3)], dtype=np.float64),
    Case("Max", [A], name="one"),
    Case("Max", [A, B, C], name="three"),
    Case("Min", [A, B, C], name="three"),
    Case("Sum", [A, B, C], name="three"),
    Case("Sum", [A], name="one"),
    Case("Mean", [A, rand(2, 3), rand(2, 3)], name="three"),
    Case("Max", [A, rand()], dtype=np.float16),
    Case("Clip", [A]),
    Case("Clip", [A, np.asarray(-0.5, np.float32)]),
    Case("Clip", [A, None, np.asarray(0.5, np.float32)]),
    Case("Clip", [A, np.asarray(-0.5, np.float32), np.asarray(0.5, np.float32)]),
    Case("Clip", [A, np.asarray(0.0, np.float32), np.asarray(6.0, np.float32)], constants=[1, 2], wrt=[0]),
    Case("Clip", [A], {"min": -0.5, "max": 0.5}, opset=6),
    Case("Clip", [A, np.asarray(-0.5, np.float64), np.asarray(0.5, np.float64)], dtype=np.float64),
    Case("Clip", [A, np.asarray(-0.5, np.float16), np.asarray(0.5, np.float16)], dtype=np.float16),
    Case("Where", [MASK, A, rand(2, 3)]),
    Case("Where", [MASK, rand(3), rand(4, 1, 1)], name="broadcast"),
    Case("Where", [MASK, rand(), rand(2, 3)], feed_integers=True),
    Case("Where", [MASK, A, rand(2, 3)], dtype=np.float16),
    Case("Cast", [A], {"to": onnx.TensorProto.FLOAT}),
    Case("CastLike", [A, rand(1)], wrt=[0]),
    *(
        Case("CumSum", [rand(2, 3), AXIS], {"exclusive": exclusive, "reverse": backwards})
        for exclusive in (0, 1)
        for backwards in (0, 1)
    ),
    Case("CumSum", [rand(2, 3), np.asarray(-1)], feed_integers=True),
    Case("CumSum", [rand(0, 3), AXIS], name="empty"),
    Case("Range", [np.float32(0.5), np.float32(3.9), np.float32(1.25)], name="float"),
]

test_rule = rule_test(CASES)


def gradients(body: str, wrt: str, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients of a model written in ONNX's text form, by name of the operand."""
    names = wrt.split()
    result = run(api.augment(text_model(body), wrt=names, of=["y"], cotangents="ones"), feed)
    return {name: result[f"{name}_grad"] for name in names}


CONVENTIONS = {
    "abs": ("(float[3] x) => (float[3] y) { y = Abs(x) }", lambda t, x: t.abs(x)),
    "pow": ("(float[3] x, float[3] k) => (float[3] y) { y = Pow(x, k) }", lambda t, x, k: t.pow(x, k)),
    "maximum": ("(float[3] x, float[3] k) => (float[3] y) { y = Max(x, k) }", lambda t, x, k: t.maximum(x, k)),
    "minimum": ("(float[3] x, float[3] k) => (float[3] y) { y = Min(x, k) }", lambda t, x, k: t.minimum(x, k)),
    "clamp": (
        "(float[3] x, float k, float m) => (float[3] y) { y = Clip(x, k, m) }",
        lambda t, x, k, m: t.clamp(x, k, m),
    ),
    "where": (
        """(float[3] x) => (float[3] y) {
            z = Constant <value_float = 0.0> () one = Constant <value_float = 1.0> () c = Greater (x, z)
            s = Where (c, x, one) l = Sqrt (s) w = Where (c, l, z) q = Sqrt (w) y = Where (c, q, z)
        }""",
        lambda t, x: t.where(x > 0, t.sqrt(t.where(x > 0, t.sqrt(t.where(x > 0, x, 1.0)), 0.0)), 0.0),
    ),
}

POINTS = {
    "pow": [np.asarray([0, 0, -2.0]), np.asarray([0, 2, 3.0])],
    "maximum": [np.asarray([1, 0, -2.0]), np.asarray([1, 0, 3.0])],
    "minimum": [np.asarray([1, 0, -2.0]), np.asarray([1, 0, 3.0])],
    "clamp": [np.asarray([-1, 0.5, 2.0]), np.asarray(-1.0), np.asarray(2.0)],
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_pytorch_convention_at_kinks(name: str) -> None:
    body, reference = CONVENTIONS[name]
    points = POINTS.get(name, [np.asarray([-1.0, 0.0, 2.0])])
    wanted = autograd(lambda *leaves: reference(torch, *leaves), *points)
    wrt = "x k m".split()[: len(points)]
    if name == "pow":  # the gradient for the exponent of a negative base is NaN, as in PyTorch
        wrt = ["x"]
    feed = {n: p.astype(np.float32) for n, p in zip("xkm", points, strict=False)}
    for n, got in gradients(body, " ".join(wrt), feed).items():
        np.testing.assert_allclose(got, wanted["xkm".index(n)], rtol=1e-6, err_msg=n)


def test_exponent_of_a_zero_base() -> None:
    got = gradients(CONVENTIONS["pow"][0], "k", {"x": np.zeros(3, np.float32), "k": np.asarray([0, 2, 1], np.float32)})
    np.testing.assert_array_equal(got["k"], [0, 0, 0])


def test_broadcast_mean_is_a_third_of_the_sum() -> None:
    """Finite differences need a broadcasting Mean in float64, which neither the runtime nor the reference evaluator has."""
    body = "(float[2, 3] x, float[3] k, float[4, 1, 3] m) => (float[4, 2, 3] y) {{ y = {} (x, k, m) }}"
    feed = {n: np.ones(shape, np.float32) for n, shape in (("x", (2, 3)), ("k", (3,)), ("m", (4, 1, 3)))}
    mean, total = (gradients(body.format(op), "x k m", feed) for op in ("Mean", "Sum"))
    for name, value in total.items():
        np.testing.assert_allclose(3 * mean[name], value, rtol=1e-6)


def test_three_equal_operands_share() -> None:
    body = "(float[1] x, float[1] k, float[1] m) => (float[1] y) { y = Max(x, k, m) }"
    got = gradients(body, "x k m", dict.fromkeys("xkm", np.ones(1, np.float32)))
    np.testing.assert_allclose([got[n][0] for n in "xkm"], [1 / 3] * 3, rtol=1e-6)


def test_clip_with_crossed_bounds_follows_the_upper_one() -> None:
    body = "(float[2] x, float low, float high) => (float[2] y) { y = Clip(x, low, high) }"
    feed = {"x": np.asarray([0, 3], np.float32), "low": np.float32(2), "high": np.float32(1)}
    got = gradients(body, "x low high", {k: np.asarray(v) for k, v in feed.items()})
    np.testing.assert_array_equal(got["x"], [0, 0])
    assert (got["low"], got["high"]) == (0, 2)


@pytest.mark.parametrize("wide", ["double", "float16"])
def test_cast_keeps_the_precision_of_its_operand(wide: str) -> None:
    number = {"double": 11, "float16": 10}[wide]
    body = f"(float[2] x) => ({wide}[2] y) {{ s = Mul(x, x) y = Cast <to = {number}> (s) }}"
    got = gradients(body, "x", {"x": np.asarray([1, 3], np.float32)})["x"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, [2, 6])


def test_exponent_of_another_dtype_is_refused() -> None:
    body = "(float[2] x, double[2] k) => (float[2] y) { y = Pow(x, k) }"
    with pytest.raises(DifferentiationError, match=r"exponent is DOUBLE and its base is FLOAT.*Cast one of them"):
        gradients(body, "k", {})
    base = gradients(body, "x", {"x": np.asarray([1, 3], np.float32), "k": np.asarray([2.0, 2.0])})
    np.testing.assert_allclose(base["x"], [2, 6], rtol=1e-6)
