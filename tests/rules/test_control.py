"""Scan and Loop with a known number of iterations."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, parser

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.numeric import check as numerically
from tests.support.operators import one_node, rule_test, text_model

RECURRENT = parser.parse_graph("""body (float[2] s, float[2,3] x) => (float[2] s1, float[2,3] z)
<int64[1] last = {1}>
{ a = Tanh (s) total = ReduceSum <keepdims = 0> (x, last) s1 = Add (a, total) b = Tanh (x) z = Mul (b, b) }""")
PLAIN = parser.parse_graph("body (float[3] x, float[3] w) => (float[3] z) { z = Mul (x, w) }")
COUNTED = parser.parse_graph("""body (int64 i, bool go, float[3] s, float[3] t)
=> (bool on, float[3] s1, float[3] t1, float[3] z) { on = Identity (go) s1 = Tanh (t) t1 = Mul (s, t) z = Sin (s1) }""")

TURNED = {"scan_input_axes": [1], "scan_input_directions": [1], "scan_output_axes": [-1], "scan_output_directions": [1]}

CASES = [
    Case("Scan", [rand(2), rand(4, 2, 3)], {"body": RECURRENT, "num_scan_inputs": 1}, outputs=2),
    Case(
        "Scan", [rand(2), rand(2, 3, 3)], {"body": RECURRENT, "num_scan_inputs": 1, **TURNED}, outputs=2, name="turned"
    ),
    Case("Loop", [np.int64(3), np.asarray(True), rand(3), rand(3)], {"body": COUNTED}, outputs=3, dynamic=False),
    Case("Scan", [rand(3, 3), rand(3, 3)], {"body": PLAIN, "num_scan_inputs": 2}, name="stateless"),
]

test_rule = rule_test(CASES)


def _model(turns: int | str, **attributes: object) -> onnx.ModelProto:
    """`z[t] = x[t] w`, where the body captures w from the outer graph."""
    body = parser.parse_graph("body (float[3] x) => (float[3] z) { z = Mul (x, w) }")
    node = helper.make_node("Scan", ["x"], ["z"], name="loop", body=body, num_scan_inputs=1, **attributes)
    return one_node(node, {"x": [turns, 3], "w": [3]})


@pytest.mark.parametrize("turns", [4, 300, "n"])
def test_captured_values_have_gradients(turns: int | str) -> None:
    rng, n = np.random.default_rng(0), turns if isinstance(turns, int) else 5
    x, w, seed = (rng.standard_normal(s).astype(np.float32) for s in ((n, 3), (3,), (n, 3)))
    got = run(og.augment(_model(turns), wrt=["x", "w"]), {"x": x, "w": w, "z_grad": seed})
    np.testing.assert_allclose(got["z"], x * w, rtol=1e-6)
    np.testing.assert_allclose(got["x_grad"], seed * w, rtol=1e-6)
    np.testing.assert_allclose(got["w_grad"], (seed * x).sum(0), rtol=1e-5)


CONV = (
    "(float[N,1,2,5] x, float[2,2,3] w) => (float[N,1,2,3] y) { y = Scan <num_scan_inputs = 1, body = "
    "b (float[1,2,5] p) => (float[1,2,3] q) { q = Conv (p, w) }> (x) }"
)
TURNING = (
    "(float[N,T,3] x, float[3] w) => (float[T,N,3] y) { y = Scan <num_scan_inputs = 1, scan_input_axes = [1], body = "
    "b (float[N,3] p) => (float[N,3] q) { q = Mul (p, w) }> (x) }"
)
DROPPING = (
    "(float[N,3] x) => (float[N,3] y) <bool yes = {1}, float half = {0.5}> { y = Scan <num_scan_inputs = 1, body = "
    "b (float[3] p) => (float[3] q) { q = Dropout (p, half, yes) }> (x) }"
)
NESTED = (
    "(float[N,3] x, float[3,3] w) => (float[N,3,3] y) { y = Scan <num_scan_inputs = 1, body = "
    "b (float[3] p) => (float[3,3] q) { q = Scan <num_scan_inputs = 1, body = "
    "c (float[3] r) => (float[3] t) { t = Mul (r, p) }> (w) }> (x) }"
)


def test_the_batch_of_a_scan_along_another_axis_may_be_empty() -> None:
    """Its gradient joins slices along the second axis, at which ONNX Runtime ends the process if they are empty."""
    model = og.vjp(text_model(TURNING), wrt=["x", "w"], cotangents="ones")
    for batch in (0, 2):
        got = run(model, {"x": np.ones((batch, 4, 3), np.float32), "w": np.array([1, 2, 3], np.float32)})
        np.testing.assert_array_equal(got["x_grad"], np.broadcast_to(np.float32([1, 2, 3]), (batch, 4, 3)))
        np.testing.assert_array_equal(got["w_grad"], np.full(3, 4 * batch))


@pytest.mark.parametrize("text", [CONV, NESTED], ids=["convolution", "loop"])
def test_bodies_with_a_convolution_or_a_loop(text: str) -> None:
    unknown = og.augment(text_model(text), wrt=["x", "w"])
    known = og.augment(text_model(text.replace("N,", "3,")), wrt=["x", "w"])
    rng = np.random.default_rng(0)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in known.graph.input}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    got, want = run(unknown, feeds), run(known, feeds)
    for name in ("x_grad", "w_grad"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_random_results_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(
        og.errors.DifferentiationError, match="its body contains Dropout, whose random result cannot be kept"
    ):
        og.augment(text_model(DROPPING), wrt=["x"])


@pytest.mark.parametrize("turns", [4, "N"])
def test_random_numbers_of_the_forward_pass_are_those_of_its_gradient(turns: int | str) -> None:
    text = f"(float[{turns},3] x) => (float[{turns},3] y) {{ y = Scan <num_scan_inputs = 1, body = "
    text += "b (float[3] p) => (float[3] q) { r = RandomNormalLike (p) q = Mul (p, r) }> (x) }"
    x = np.random.default_rng(0).uniform(1, 2, (4, 3)).astype(np.float32)
    got = run(og.augment(text_model(text), wrt=["x"], cotangents="ones"), {"x": x})
    np.testing.assert_allclose(got["x_grad"], got["y"] / x, rtol=1e-5)


LOOPS = {
    "counted": """(float[3] x, float[3] w) => (float[3] y, float[4,3] all) <int64 n = {4}> {
        y, all = Loop (n, , x) <body = b (int64 i, bool go, float[3] s) => (bool on, float[3] s1, float[3] z) {
            on = Identity (go) a = Mul (s, w) s1 = Tanh (a) z = Sin (s1) }> }""",
    "until a state says so": """(float[3] x, float[3] w) => (float[3] y, int64 k) <int64 zero = {0}, bool yes = {1}> {
        y, k = Loop (, yes, x, zero) <body = b (int64 i, bool go, float[3] s, int64 c)
            => (bool on, float[3] s1, int64 c1) <int64 one = {1}, int64 last = {4}> {
            c1 = Add (c, one) on = LessOrEqual (c1, last)
            a = Mul (s, w) f = Cast <to = 1> (i) q = Add (a, f) s1 = Tanh (q) }> }""",
    "over the rows of a tensor": """(float[5,3] x, float[3] w) => (float[3] y) <int64 first = {0}, float[3] s0 = {0, 0, 0}> {
        sizes = Shape (x) n = Gather (sizes, first)
        y = Loop (n, , s0) <body = b (int64 i, bool go, float[3] s) => (bool on, float[3] s1) {
            on = Identity (go) r = Gather (x, i) a = Mul (s, w) t = Add (a, r) s1 = Tanh (t) }> }""",
    "never": """(float[3] x, float[3] w) => (float[3] y) <int64 n = {0}> {
        r = Mul (x, w) y = Loop (n, , r) <body = b (int64 i, bool go, float[3] s) => (bool on, float[3] s1) {
            on = Identity (go) s1 = Tanh (s) }> }""",
    "never, with joined results": """(float[3] x, float[3] w) => (float[3] y, float[K,3] all) <int64 n = {0}> {
        r = Mul (x, w) y, all = Loop (n, , r) <body = b (int64 i, bool go, float[3] s)
            => (bool on, float[3] s1, float[3] z) { on = Identity (go) s1 = Tanh (s) z = Sin (s1) }> }""",
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_known_length(name: str) -> None:
    report = numerically(text_model(LOOPS[name]), wrt="inputs", of="y")
    assert [row.value for row in report.rows] == ["x", "w"]
    assert all(row.verdict == "ok" and row.norm > 0 for row in report.rows)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<int64 n = {4}> {", "{ r = ReduceMax <keepdims=0> (x) r1 = Abs (r) c = Ceil (r1) n = Cast <to=7> (c)"),
        ("on = Identity (go)", "m = ReduceMax <keepdims=0> (s) n1 = Neg (m) on = Less (n1, m)"),
        ("n = {4}", "n = {300}"),
    ],
    ids=["count", "condition", "many turns"],
)
def test_loops_of_unknown_length(before: str, after: str) -> None:
    model = text_model(LOOPS["counted"].replace("float[4,3] all", "float[K,3] all").replace(before, after))
    report = numerically(model, wrt="inputs")
    assert all(row.verdict == "ok" and row.norm > 0 for row in report.rows)


GROWING = """(float[3] x, int64 n) => (float[K] y) <float[1] one = {1}, int64[1] zero = {0}> {
    e = Slice (x, zero, zero)  y = Loop (n, , x) <body = b
    (int64 i, bool go, float[J] s) => (bool on, float[L] s1) { on = Identity (go)  s1 = Concat <axis=0> (s, x) }> }"""


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        ({}, "from [3] to [6]"),
        ({"float[3] x": "float[N] x"}, "from [N] to [2*N]"),
        ({"float[3] x": "float[N] x", "(s, x)": "(s, one)"}, "from [N] to [N + 1]"),
        ({"float[3] x": "float[N] x", "(n, , x)": "(n, , e)"}, "from [0] to [N]"),
    ],
    ids=["static", "symbolic", "by one", "from nothing"],
)
def test_states_that_grow_are_refused(change: dict[str, str], sizes: str) -> None:
    text = GROWING
    for before, after in change.items():
        text = text.replace(before, after)
    with pytest.raises(
        og.errors.DifferentiationError, match=r"Loop, opset 21\): its state '\w' changes its shape"
    ) as found:
        og.augment(text_model(text), wrt="x")
    assert sizes in str(found.value)
    report = numerically(og.load(text_model(text), input_values={"n": 3}), wrt="x")  # the remedy
    assert all(row.verdict == "ok" and row.norm > 0 for row in report.rows)


def test_a_log_that_nothing_reads_may_grow() -> None:
    text = """(float[M] x, int64 n) => (float[M] y, int64[K] log) <int64[1] zero = {0}, int64[1] one = {1}> {
        y, log = Loop (n, , x, zero) <body = b (int64 i, bool go, float[M] s, int64[J] l)
            => (bool on, float[M] s1, int64[L] l1) {
            on = Identity (go)  s1 = Sin (s)  p = Reshape (i, one)  l1 = Concat <axis=0> (l, p) }> }"""
    report = numerically(text_model(text), wrt="x")
    assert all(row.verdict == "ok" and row.norm > 0 for row in report.rows)
