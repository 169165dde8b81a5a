"""The numeric check passes correct gradients, fails wrong ones, and reports its precision."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnx_convgrad as og
from onnx_convgrad.api import augment
from onnx_convgrad.bench.measure import bench
from onnx_convgrad.checking import check as checks
from onnx_convgrad.checking.check import verify_numerically
from onnx_convgrad.checking.random_inputs import draw
from onnx_convgrad.errors import ConvGradError, ExecutionError, LimitError, ModelError
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from tests.support.numeric import check
from tests.support.operators import text_model


def model(text: str, **weights: tuple[int, ...] | np.ndarray) -> onnx.ModelProto:
    """A model in ONNX's text form; weights of which only the shape is given are normally distributed."""
    proto = text_model(text)
    generator = np.random.default_rng(0)
    for name, shape in weights.items():
        drawn = not isinstance(shape, np.ndarray)
        values = 0.4 * generator.standard_normal(shape).astype(np.float32) if drawn else shape
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    return proto


MIXED = """(float[N, C, H, W] x) => (float[A, B, D, E] y) {
    a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w1, b1)
    h = HardSwish (a)
    p = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], ceil_mode = 1, strides = [2, 2]> (h)
    t = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1], output_padding = [1, 1], group = 2> (p, w2)
    l = LeakyRelu <alpha = 0.2> (t)
    m = MaxPool <kernel_shape = [2, 2]> (l)
    y = Elu (m)
}"""
MIXED_WEIGHTS = {"w1": (4, 3, 3, 3), "b1": (4,), "w2": (4, 2, 3, 3)}


def test_operators_without_a_float64_kernel_are_still_compared_in_float64() -> None:
    report = check(model(MIXED, **MIXED_WEIGHTS), samples=2)
    assert report.passed
    assert report.precision == "float64"
    assert report.pytorch == "compared with float64 autograd"
    assert {row.value for row in report.rows} == {"x", "w1", "b1", "w2"}
    assert max(row.numeric or 0 for row in report.rows) < 1e-5
    assert report.inputs["x"][:2] == (2, 3)


def test_the_same_seed_gives_the_same_report() -> None:
    proto = model(MIXED, **MIXED_WEIGHTS)
    first = check(proto, seed=3)
    assert check(proto, seed=3) == first
    assert check(proto, seed=4).rows[0].norm != first.rows[0].norm


def spoil(built: Built, name: str, factor: float) -> None:
    """Multiply an output of the augmented model."""
    wrong = next(v for v in built.model.graph.outputs if v.name == name)
    scale = ir.Value(name="wrong_factor", shape=ir.Shape(()), type=ir.TensorType(ir.DataType.FLOAT))
    scale.const_value = ir.Tensor(np.float32(factor), name="wrong_factor")
    built.model.graph.register_initializer(scale)
    node = ir.Node("", "Mul", [wrong, scale], num_outputs=1)
    wrong.name = "right"
    wrong.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
    node.replace_input_with(0, wrong)
    node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
    built.model.graph.append(node)


@pytest.mark.parametrize("factor", [-1.0, 1.01, 0.0])
def test_a_wrong_gradient_fails(factor: float) -> None:
    built = build(model(MIXED, **MIXED_WEIGHTS), Options())
    spoil(built, "w2_grad", factor)
    report = verify_numerically(built, samples=3)
    assert {row.value for row in report.rows if not row.ok} == {"w2"}
    failed = next(row for row in report.rows if row.value == "w2")
    assert (failed.torch or 0) > failed.torch_limit
    assert not report.passed


SATURATED = """(float[N, 3, 6, 6] x) => (float[N, K] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, w1)
    r = Relu (a)
    f = Flatten (r)
    m = Gemm <alpha = %s, transB = 1> (f, w2)
    y = Softmax (m)
}"""


@pytest.mark.parametrize(
    ("gain", "factor", "verdict"),
    [
        (0.5, 1, "ok"),
        (7.0, 1, "rounding"),
        (7.0, 3, "FAIL"),
        (7.0, -1, "FAIL"),
        (12.0, 1, "undetermined"),
        (12.0, 1e6, "FAIL"),
    ],
)
def test_a_saturated_softmax_differs_from_a_wrong_gradient(
    gain: float, factor: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 loses all digits where p (g - <p, g>) cancels: no fixed limit holds, and PyTorch may not be installed."""
    monkeypatch.setattr("onnx_convgrad.checking.check.find_spec", lambda _: None)
    built = build(model(SATURATED % gain, w1=(8, 3, 3, 3), w2=(10, 288)), Options(wrt="w2"))
    spoil(built, "w2_grad", factor)
    (row,) = verify_numerically(built).rows
    assert row.verdict == verdict


SPECTRUM = """(float[2, 2000] x) => (float[N, T, F] y) {
    hop = Constant <value_int = 160> ()
    s = STFT (x, hop, window)
    last = Constant <value_ints = [-1]> ()
    p = ReduceSumSquare <keepdims = 0> (s, last)
    m = MatMul (p, w)
    y = Log (m)
}"""


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "rounding"), (1.05, "FAIL")])
def test_an_inexact_fourier_transform_differs_from_a_wrong_gradient(factor: float, verdict: str) -> None:
    """ONNX Runtime's kernel for 400 samples is off by 1e-5 of the largest term, and the logarithm reads the smallest."""
    window = np.hanning(400).astype(np.float32)
    built = build(model(SPECTRUM, window=window, w=np.eye(201, dtype=np.float32)), Options(wrt="w"))
    spoil(built, "w_grad", factor)
    (row,) = verify_numerically(built).rows
    assert row.verdict == verdict


@pytest.mark.parametrize(
    ("step", "gradient"),
    [("y = Relu (a)", 0.0), ("y = Clip (a, zero, six)", 0.0), ("y = Clip (a, zero)", 1.0)],
)
def test_inputs_on_kinks_differ_from_a_wrong_gradient(
    step: str, gradient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero biases after zero channels, as in untrained networks: every difference lies between two slopes."""
    bounds = " ".join(
        f"{name} = Constant <value_float = {v}> ()" for name, v in (("zero", 0.0), ("one", 1.0), ("six", 6.0))
    )
    text = f"(float[N, 4, 5] x) => (float[N, 4, 5] y) {{ {bounds} z = Mul (x, zero) a = Add (z, b) {step} }}"
    proto = model(text, b=np.zeros((4, 1), np.float32))
    built = build(proto, Options(wrt="b"))
    (row,) = verify_numerically(built).rows
    assert row.verdict == "kinks"
    assert (row.norm > 0) == (gradient > 0)
    spoil(built, "b_grad", 3.0)
    assert [r.verdict for r in verify_numerically(built).rows] == ["FAIL" if gradient else "kinks"]
    monkeypatch.setattr("onnx_convgrad.checking.check.find_spec", lambda _: None)
    (row,) = verify_numerically(build(proto, Options(wrt="b"))).rows
    assert row.verdict == "undetermined"


def test_intermediate_values_can_be_checked() -> None:
    report = check(model(MIXED, **MIXED_WEIGHTS), wrt=["a", "t", "x"], of="l")
    assert report.passed
    assert [row.value for row in report.rows] == ["a", "t", "x"]


def test_resize_and_normalization() -> None:
    text = """(float[N, 2, H, W] x) => (float[N, 2, P, Q] y) <float[4] scales = {1, 1, 2, 1.5}> {
        n = InstanceNormalization (x, s, b) r = Resize <mode = "linear"> (n, , scales) y = Mul (r, r) }"""
    report = check(og.load(model(text, s=(2,), b=(2,)), input_shapes={"x": ["N", 2, 6, 8]}))
    assert report.passed
    assert report.precision == "float64"
    assert report.inputs == {"x": (2, 2, 6, 8)}


def test_operators_not_implemented_in_pytorch_are_reported() -> None:
    text = '(float[2, 3] x) => (float[2, 3] y) { y = Einsum <equation = "ij,ij->ij"> (x, x) }'
    assert check(model(text), wrt="inputs").pytorch == "compared with float64 autograd"
    report = check(model("(float[3, 3] x) => (float[3, 3] y) { y = Trilu (x) }"), wrt="inputs")
    assert report.passed
    assert report.pytorch == "not rebuilt (operator Trilu)"
    assert all(row.torch is None for row in report.rows)


def test_training_mode_with_batch_statistics() -> None:
    text = "(float[N, 3, 8, 8] x) => (float[N, 3, 8, 8] y) { y = BatchNormalization (x, s, b, mean, var) }"
    proto = model(text, s=(3,), b=(3,), mean=(3,), var=np.ones(3, np.float32))
    assert check(proto, training=True).passed
    assert check(proto).passed


def test_random_models_are_refused() -> None:
    text = "(float[N, 3] x) => (float[N, 3] y) { y = Dropout (x) }"
    with pytest.raises(ModelError, match=r"draws random numbers.*without --training"):
        check(model(text), wrt="inputs", training=True)
    assert check(model(text), wrt="inputs").passed


def test_a_model_that_fails_on_every_size_is_refused_with_a_hint() -> None:
    proto = model("(float[1, 2, H, W] x) => (float[P, Q] y) <int64[2] shape = {7, 11}> { y = Reshape (x, shape) }")
    with pytest.raises(ModelError, match="--input-shape"):
        check(proto, wrt="inputs")


def test_sizes_are_found_by_trial() -> None:
    proto = model("(float[N, 3, H, W] x) => (float[P, Q] y) { f = Flatten (x) y = Gemm (f, w) }", w=(3 * 28 * 28, 4))
    assert check(proto).inputs == {"x": (2, 3, 28, 28)}


def test_report_as_data() -> None:
    report = check(model("(float[2, 3] x) => (float[2, 3] y) { y = Tanh (x) }"), wrt="inputs")
    data = report.to_dict()
    assert data["passed"] is True
    assert data["rows"][0]["shape"] == [2, 3]
    assert not replace(report, rows=(replace(report.rows[0], ok=False),)).passed


def test_operators_that_both_evaluators_compute_in_float32_stay_precise() -> None:
    text = """(float[N, 4, 5] x) => (float[N, 4, 5] y) {
        e = Erf (x) n = GroupNormalization <num_groups = 2> (e, s, b) y = Gelu (n) }"""
    report = check(model(text, s=(4,), b=(4,)), samples=3)
    assert report.passed
    assert max(row.numeric or 0 for row in report.rows) < 1e-5


REFERENCES = [
    "y = LRN <size = 3, alpha = 0.3, beta = 0.6> (x)",
    "s = Squeeze (x, last) y = GlobalMaxPool (s)",
    'y = Resize <mode = "linear", coordinate_transformation_mode = "pytorch_half_pixel"> (x, , , sizes)',
    'y = MaxPool <kernel_shape = [2, 2], strides = [2, 2], dilations = [1, 2], auto_pad = "SAME_UPPER"> (x)',
    "y = AveragePool <kernel_shape = [1, 3], strides = [1, 4], pads = [0, 0, 0, 1]> (x)",
    "h = Floor (x) e = Exp (x) y = Add (h, e)",
]


@pytest.mark.parametrize("body", REFERENCES, ids=lambda body: body.split(" = ")[1].split()[0])
def test_the_references_are_correct(body: str) -> None:
    """ONNX's reference evaluator, or PyTorch, computes something else than the runtime for these operators."""
    last, y = (1, "A, B, C") if "Squeeze" in body else (5, "A, B, C, D")
    constants = "<int64[1] last = {3}, int64[4] sizes = {3, 4, 1, 3}>"
    (row,) = check(model(f"(float[3, 4, 6, {last}] x) => (float[{y}] y) {constants} {{ {body} }}")).rows
    assert row.verdict == "ok", row


def test_a_gradient_that_is_not_finite_fails() -> None:
    """The root of a zero difference: infinity minus infinity, in PyTorch too."""
    report = check(model("(float[2, 3] x) => (float[2, 3] y) { r = Sub (x, x) y = Sqrt (r) }"))
    assert not report.passed
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["rows"][0]["norm"] is None


@pytest.mark.parametrize(
    ("graph", "wrt"),
    [
        ("(float[4] x) => (float[4] y) { y = Acosh (x) }", "x"),
        ('(float[1,1,4,4] x, float[4] s) => (float[1,1,a,b] y) { y = Resize <mode = "nearest"> (x, , s) }', "x"),
        ("(float[4] x, float low, float high) => (float[4] y) { y = Clip (x, low, high) }", "inputs"),
        ("(float[2,3] x, float v) => (float[5,3] y) <int64[4] p = {1,0,2,0}> { y = Pad (x, p, v) }", "inputs"),
        ("(float[6] x) => (float y) { q, y, z = DynamicQuantizeLinear (x) }", "x"),
    ],
    ids=["at least 1", "positive", "scalars", "padded with an input", "a scale in float64"],
)
def test_inputs_and_derivatives_of_special_operators(graph: str, wrt: str) -> None:
    report = check(model(graph), wrt=wrt)
    assert report.passed
    assert all(row.verdict == "ok" for row in report.rows)


def test_the_gradients_of_a_network_are_checked_in_float64() -> None:
    """With a batch of unknown size: a lowering that loops over parts of it could not run node by node."""
    net = Path(__file__).parents[2] / "examples" / "models" / "digits_cnn.onnx"
    report = check(augment(onnx.load(net), wrt="inputs"), wrt=["image", "conv1.weight", "conv2.weight"])
    assert report.precision == "float64"
    assert [row.verdict for row in report.rows] == ["ok"] * 3


def test_other_outputs_are_not_computed() -> None:
    """A gradient output would need a cotangent of the shape of y."""
    text = "(float[N, 3, H, W] x) => (float[N, 4, P, Q] y) { y = Conv (x, w) }"
    twice = augment(model(text, w=(4, 3, 3, 3)), wrt=["w"], target=og.Target(max_workspace=2_000_000))
    report = check(og.load(twice, input_shapes={"x": [1, 3, 7, 7]}), of="y", wrt="x")
    assert report.passed
    assert report.inputs["x"] == (1, 3, 7, 7)
    assert [row.value for row in report.rows] == ["x"]


def test_inputs_beyond_the_memory_are_refused_before_they_are_drawn() -> None:
    model = text_model("(float[1000000000000] x) => (float[1000000000000] y) { y = Tanh (x) }")
    with pytest.raises(LimitError, match=r"Input 'x', \[1000000000000\], is too large.*--input-shape x:64"):
        check(model)
    with pytest.raises(LimitError, match="Input 'x'"):
        bench(model, Options(wrt="inputs"), threads=1, torch=False)


def test_a_result_that_the_runtime_refuses_is_told_from_a_model_that_it_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "g (int8[4,2] q, float[4,2] x) => (float[2,4] y) <float s = {0.1}, int8 z = {3}>"
    nodes = "{ d = DequantizeLinear (q, s, z) p = Mul (d, x) t = Transpose (d) u = Transpose (x) y = Mul (t, u) }"
    source = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 19]> {text} {nodes}')
    assert check(source, wrt="x").passed
    opened = checks.session

    def refuses(proto: Any, **options: Any) -> Any:
        if isinstance(proto, ir.Model):
            raise ExecutionError("ONNX Runtime refused the model: output_dtype.")
        return opened(proto, **options)

    monkeypatch.setattr(checks, "session", refuses)
    with pytest.raises(
        ExecutionError, match=r"loads the model but not the result\. .*output_dtype\. The result is valid"
    ):
        check(source, wrt="x")
    source.graph.node[0].op_type = "NoSuchOperator"
    source.graph.node[0].domain = "none"
    with pytest.raises(ConvGradError) as refusal:
        check(source, wrt="x")
    assert "loads the model but not" not in str(refusal.value)


IMPLIED = {
    "ConstantOfShape": "s = Shape (x) z = ConstantOfShape (s) y = Add (z, t)",
    "HannWindow": "z = HannWindow (n) y = Mul (z, t)",
    "HammingWindow": "z = HammingWindow (n) y = Mul (z, t)",
    "BlackmanWindow": "z = BlackmanWindow (n) y = Mul (z, t)",
    "EyeLike": "z = EyeLike (x) y = Add (z, t)",
    "MeanVarianceNormalization": "z = MeanVarianceNormalization <axes = [1]> (x) y = Add (z, t)",
    "DequantizeLinear": "z = DequantizeLinear (q, u, l) y = Mul (z, t)",
    "sequence": """e = SequenceEmpty () i = SequenceInsert (e, t) j = SequenceInsert (i, x)
        y = ConcatFromSequence <axis = 0> (j)""",
}


@pytest.mark.parametrize("operator", IMPLIED)
def test_results_of_implied_type_are_computed_in_float64(operator: str) -> None:
    constants = "int64 n = {3}, uint8[3] q = {1, 2, 3}, float u = {0.5}, uint8 l = {2}"
    text = f"(float[2,3] x) => (float[a,b] y) <{constants}> {{ t = Sin (x) {IMPLIED[operator]} }}"
    report = check(text_model(text), wrt="inputs")
    assert report.passed
    assert report.precision == "float64"
    assert not report.reason


def test_a_comparison_in_float32_says_why() -> None:
    text = """(float[1,2,6,7] x) => (float[a,b,c,d] y) <float[1,5] r = {0, 0, 0, 4, 4}>
        { y = MaxRoiPool <pooled_shape = [2, 3]> (x, r) }"""
    report = check(text_model(text), wrt="inputs")
    assert report.precision == "float32"
    assert "MaxRoiPool" in report.reason
    assert report.to_dict()["reason"] == report.reason


INTEGERS = {
    "scatter": "(float[1,5] x, int64[1,4] i, float[1,4] u) => (float[1,5] y) { y = ScatterElements <axis = 1> (x, i, u) }",
    "rows": "(float[4,3] x, int64[3,1] i, float[3,3] u) => (float[4,3] y) { y = ScatterND (x, i, u) }",
    "cast": """(float[1,5] x, int32[1,4] i, float[1,4] u) => (float[1,5] y)
        { j = Cast <to = 7> (i) y = ScatterElements <axis = -1> (x, j, u) }""",
    "depth": "(int64[2,2] i, float depth, float[2] x) => (float[2,2,D] y) { y = OneHot (i, depth, x) }",
    "whole depth": "(int64[2,2] i, int64 depth, float[2] x) => (float[2,2,D] y) { y = OneHot (i, depth, x) }",
    "unpool": "(float[1,1,4] x, int64[1,1,4] i) => (float[] y) { y = MaxUnpool <kernel_shape=[2], strides=[2]> (x, i) }",
    "top": "(float[2,5] x, int64[1] k) => (float[2,n] y, int64[2,n] i) { y, i = TopK (x, k) }",
}


@pytest.mark.filterwarnings("ignore:The derivative is zero.*'depth'")
@pytest.mark.parametrize("case", INTEGERS)
@pytest.mark.parametrize("seed", range(4))
def test_integers_are_drawn_that_their_readers_can_take(case: str, seed: int) -> None:
    """Equal indices leave the result of a scatter undefined; a depth is a size."""
    report = check(text_model(INTEGERS[case]), wrt="all", seed=seed)
    assert report.passed
    assert len(report.rows) >= 1


LOOKED_UP = {
    "rows": "(int64[N,L] i) => (float[N,L,3] y) <float[5,3] w> { y = Gather (w, i) }",
    "compared": """(int32[N,L] i) => (float[N,L,3] y) <float[5,3] w, int64[3] big = {2, 16, 5}, int64[2] a = {0, 2}>
        { x = Unsqueeze (i, last) e = Expand (x, big) h = Equal (e, five) f = Cast <to = 1> (h) y = MatMul (f, w) }""",
}


@pytest.mark.parametrize("case", LOOKED_UP)
def test_random_indices_reach_every_row(case: str) -> None:
    """Few rows alike make maxima tie, so that float32 takes others than float64."""
    proto = model(LOOKED_UP[case], w=(5, 3))
    if case == "compared":
        proto.graph.initializer.append(numpy_helper.from_array(np.array([2]), "last"))
        proto.graph.initializer.append(numpy_helper.from_array(np.arange(5, dtype=np.int32), "five"))
    graph = ir.from_proto(proto).graph
    drawn = draw(list(graph.inputs), {"N": 2, "L": 16}, seed=0)["i"]
    assert set(drawn.ravel().tolist()) == set(range(5))
    assert check(proto, wrt="w").passed


def test_sizes_are_those_for_which_the_result_has_the_declared_axes() -> None:
    """A Squeeze without axes gives a scalar, as the file declares, for one sample only."""
    proto = model("(float[N,3] x) => (float y) { p = MatMul (x, w) s = Squeeze (p) y = Exp (s) }", w=(3, 1))
    assert check(proto).inputs == {"x": (1, 3)}


def test_masks_of_infinite_numbers_are_compared() -> None:
    mask = np.array([[0.5, -np.inf, 1, 0.2]], np.float32)
    report = check(model("(float[2,4] x) => (float[2,4] y) { a = Add (x, w) y = Softmax (a) }", w=mask), wrt="all")
    assert report.passed
    assert {row.value for row in report.rows} == {"x", "w"}


def test_branches_are_evaluated_in_float64() -> None:
    """Of operators without a float64 kernel, and of values around the If."""
    text = """(float[3,2,4] x, bool c) => (float[3,1,2,5] y) {
        h = Erf (x)
        y = If (c) <then_branch = g () => (float[3,1,2,5] f) { f = LSTM <hidden_size = 5> (h, w, r) },
                    else_branch = g () => (float[3,1,2,5] s) { s = RNN <hidden_size = 5> (h, v, q) }> }"""
    weights = {"w": (1, 20, 4), "r": (1, 20, 5), "v": (1, 5, 4), "q": (1, 5, 5)}
    for seed in range(3):
        report = check(model(text, **weights), wrt="all", seed=seed)
        assert report.passed
        assert report.precision == "float64"
        assert max(row.numeric or 0 for row in report.rows) < 1e-5


def test_a_scan_in_which_the_runtime_finds_no_rank() -> None:
    """It infers none for what a Loop carries, and a Scan needs that of each result."""
    text = """(float[3,2] x) => (float[3,2] y) <int64 n = {20}> {
        c = Loop <body = b (int64 i, bool g, float[3,2] s) => (bool h, float[3,2] t) { h = Identity (g) t = Tanh (s) }>
            (n, , x)
        w = Scan <num_scan_inputs = 1, body = d (float[2] e) => (float[3,2] o) { p = Mul (c, e) o = Sin (p) }> (x)
        y = ReduceSum <keepdims = 0> (w, k)
    }"""
    report = check(model(text, k=np.zeros(1, np.int64)))
    assert report.passed
    assert report.precision == "float64"


def test_a_model_of_float64_with_a_function_that_has_no_kernel() -> None:
    assert check(model("(double[2,3] x) => (double[2,3] y) { h = Mish (x) y = Selu (h) }"), wrt="inputs").passed
