"""Fused operators in files that ONNX Runtime optimized, and those that it makes of the forward half of our results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from onnxruntime.transformers.fusion_options import FusionOptions
from torch.nn import functional as F

import onnx_convgrad as og
from onnx_convgrad.autodiff.remedies import _OPTIONS, _REMEDIES
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.optimizer import LEVELS, optimized
from tests.support.training_nets import off

Oracle = Callable[..., torch.Tensor]


def model(
    body: str, shapes: dict[str, tuple[int, ...]], *, opset: int = 17, outputs: str = "float[] y"
) -> onnx.ModelProto:
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    return graph_of(f"({inputs}) => ({outputs}) {{ {body} }}", opset=opset, domains=', "com.microsoft": 1')


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: (0.5 * generator.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def stored(given: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The model with some inputs turned into initializers."""
    kept = [i for i in given.graph.input if i.name not in arrays]
    del given.graph.input[:]
    given.graph.input.extend(kept)
    given.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return given


# -- nodes of files ----------------------------------------------------------------------------------------------------

IMAGE = {"x": (2, 4, 5, 5), "w": (4, 2, 3, 3), "b": (4,)}
CONV = "pads=[1,1,1,1], group=2"
MATRICES = {"a": (2, 3, 4), "b": (2, 4, 5)}
ROWS = {"x": (2, 3, 6), "skip": (2, 3, 6), "gamma": (6,), "beta": (6,), "bias": (6,)}


def conv(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return F.conv2d(x, w, b, padding=1, groups=2)


ACTIVATIONS: list[tuple[str, Oracle]] = [
    ('activation="Relu"', F.relu),
    ('activation="LeakyRelu", activation_params=[0.3]', lambda v: F.leaky_relu(v, 0.3)),
    ('activation="Tanh"', torch.tanh),
    ('activation="Sigmoid"', torch.sigmoid),
    ('activation="HardSigmoid", activation_params=[0.2, 0.5]', lambda v: (0.2 * v + 0.5).clamp(0, 1)),
    ('activation="Clip", activation_params=[0.0, 6.0]', F.relu6),
    ('activation="Clip", activation_params=[-0.5, 0.5]', lambda v: v.clamp(-0.5, 0.5)),
]

NODES: list[tuple[str, dict[str, tuple[int, ...]], Oracle]] = [
    *((f"FusedConv<{CONV}, {a}>(x, w, b)", IMAGE, lambda x, w, b, f=f: f(conv(x, w, b))) for a, f in ACTIVATIONS),
    (
        f'FusedConv<{CONV}, activation="Relu">(x, w, b, z)',
        IMAGE | {"z": (2, 4, 5, 5)},
        lambda x, w, b, z: F.relu(conv(x, w, b) + z),
    ),
    (
        f'FusedConv<{CONV}, activation="Relu">(x, w)',
        {"x": IMAGE["x"], "w": IMAGE["w"]},
        lambda x, w: F.relu(conv(x, w)),
    ),
    (
        'FusedGemm<transB=1, alpha=0.5, activation="LeakyRelu", activation_alpha=0.2>(a, b, c)',
        {"a": (3, 4), "b": (5, 4), "c": (5,)},
        lambda a, b, c: F.leaky_relu(0.5 * a @ b.T + c, 0.2),
    ),
    ("FusedMatMul<alpha=0.5>(a, b)", MATRICES, lambda a, b: 0.5 * a @ b),
    ("FusedMatMul<transA=1, transB=1>(a, b)", {"a": (2, 4, 3), "b": (2, 5, 4)}, lambda a, b: a.mT @ b.mT),
    (
        "FusedMatMul<transBatchA=1, transA=1, transBatchB=1>(a, b)",
        {"a": (4, 2, 3), "b": (4, 2, 5)},
        lambda a, b: a.permute(1, 2, 0) @ b.permute(1, 0, 2),
    ),
    ("Gelu(x)", {"x": (3, 4)}, F.gelu),
    ("BiasGelu(x, b)", {"x": (3, 4), "b": (4,)}, lambda x, b: F.gelu(x + b)),
    ("FastGelu(x)", {"x": (3, 4)}, lambda x: F.gelu(x, approximate="tanh")),
    ("FastGelu(x, b)", {"x": (3, 4), "b": (4,)}, lambda x, b: F.gelu(x + b, approximate="tanh")),
    ("QuickGelu<alpha=1.5>(x)", {"x": (3, 4)}, lambda x: x * torch.sigmoid(1.5 * x)),
    ("QuickGelu<alpha=1.0>(x)", {"x": (3, 4)}, F.silu),
    (
        "SkipLayerNormalization<epsilon=1e-5>(x, skip, gamma, beta, bias)",
        ROWS,
        lambda x, skip, gamma, beta, bias: F.layer_norm(x + skip + bias, (6,), gamma, beta),
    ),
    (
        "y = SimplifiedLayerNormalization<axis=-1, epsilon=1e-5>(x, gamma)",
        {"x": (2, 3, 6), "gamma": (6,)},
        lambda x, gamma: F.rms_norm(x, (6,), gamma, 1e-5),
    ),
    (
        "n, , , total = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=1e-5>(x, skip, gamma) y = Mul(n, total)",
        {k: ROWS[k] for k in ("x", "skip", "gamma")},
        lambda x, skip, gamma: F.rms_norm(x + skip, (6,), gamma, 1e-5) * (x + skip),
    ),
    (
        "n, , , total = com.microsoft.SkipLayerNormalization<epsilon=1e-5>(x, skip, gamma, beta) y = Mul(n, total)",
        {k: s for k, s in ROWS.items() if k != "bias"},
        lambda x, skip, gamma, beta: F.layer_norm(x + skip, (6,), gamma, beta) * (x + skip),
    ),
]


@pytest.mark.parametrize(("body", "shapes", "oracle"), NODES, ids=[body for body, _, _ in NODES])
def test_fused_node_against_pytorch(body: str, shapes: dict[str, tuple[int, ...]], oracle: Oracle) -> None:
    node = body if " = " in body else f"y = com.microsoft.{body}"
    given, arrays = model(node, shapes), drawn(shapes)
    operands = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in arrays.items()}
    y = oracle(*operands.values())
    seed = np.random.default_rng(1).standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.tensor(seed, dtype=torch.float64))
    augmented = og.augment(given, wrt="inputs")
    assert {n.domain for n in augmented.graph.node} == {""}
    assert [o.domain for o in augmented.opset_import] == [""]
    got = run(augmented, {**arrays, "y_grad": seed})
    np.testing.assert_allclose(got["y"], run(given, arrays)["y"], rtol=1e-5, atol=1e-6)
    for name, operand in operands.items():
        assert off(got[f"{name}_grad"], operand.grad) < 1e-5


@pytest.mark.parametrize(
    ("bits", "zeros", "bias"), [(2, True, False), (4, False, False), (4, True, True), (8, True, False)]
)
def test_products_with_blocks_of_bits(bits: int, zeros: bool, bias: bool) -> None:
    """The values are ONNX Runtime's, and so is the gradient: that of the matrix that unit vectors show."""
    generator = np.random.default_rng(0)
    arrays = {
        "w": generator.integers(0, 256, (10, 3, 2 * bits)).astype(np.uint8),
        "s": generator.random(30).astype(np.float32),
    }
    names = "x, w, s" + (", z" if zeros else ", " if bias else "") + (", , b" if bias else "")
    arrays |= {"z": generator.integers(0, 256, (10, -(-3 * bits // 8))).astype(np.uint8)} if zeros else {}
    arrays |= {"b": generator.random(10).astype(np.float32)} if bias else {}
    node = f"y = com.microsoft.MatMulNBits<K=48, N=10, bits={bits}, block_size=16>({names})"
    given = stored(model(node, {"x": (5, 48)}, outputs="float[5,10] y"), arrays)
    x = drawn({"x": (5, 48)})["x"]
    seed = generator.standard_normal((5, 10)).astype(np.float32)
    got = run(og.augment(given, wrt="inputs"), {"x": x, "y_grad": seed})
    assert off(got["y"], run(given, {"x": x})["y"]) < 1e-5
    units = np.concatenate([np.eye(48, dtype=np.float32), np.zeros((2, 48), np.float32)]).reshape(10, 5, 48)
    rows = np.concatenate([run(given, {"x": five})["y"] for five in units])
    assert off(got["x_grad"], seed @ (rows[:48] - rows[48]).T) < 1e-5
    (weight,) = [v for v in og.load(given).canonical.graph.initializers.values() if v.shape == [10, 48]]
    assert isinstance(weight.const_value, ir.PackedTensor if bits == 4 else ir.Tensor)  # as many bytes as in the file


def test_a_table_that_is_the_last_weight_too() -> None:
    """Tied embeddings, as GenAI's builder writes them: the table is the weight in another shape."""
    generator, ids = np.random.default_rng(0), np.array([[3, 0, 9]])
    arrays = {
        "w": generator.integers(0, 256, (10, 2, 8)).astype(np.uint8),
        "s": generator.random((10, 2)).astype(np.float32),
        "shape": np.array([10, 16]),
    }
    text = """(int64[1,3] ids, float[1,3,32] x) => (float[1,3,10] y) { table = Reshape (w, shape)
        h = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 16, quantize_axis = 1> (table, ids, s)
        t = Add (h, x) y = com.microsoft.MatMulNBits <K = 32, N = 10, bits = 4, block_size = 16> (t, w, s) }"""
    given = graph_of(text, domains=', "com.microsoft": 1', **arrays)
    x = drawn({"x": (1, 3, 32)})["x"]
    got = run(og.augment(given, wrt="x", cotangents="ones"), {"ids": ids, "x": x})
    assert off(got["y"], run(given, {"ids": ids, "x": x})["y"]) < 1e-5
    moved = run(given, {"ids": ids, "x": x + np.float32(0.5)})["y"] - got["y"]
    assert off(0.5 * got["x_grad"].sum(), moved.sum()) < 1e-4


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            'com.microsoft.FusedConv<activation="Softmax">(x, w)',
            "its activation 'Softmax' is not one that ONNX Runtime",
        ),
        ('com.microsoft.FusedConv<activation="LeakyRelu">(x, w)', "its activation needs 1 parameters, and there are 0"),
    ],
)
def test_unknown_fused_activation_is_refused(node: str, message: str) -> None:
    with pytest.raises(og.errors.ModelError, match=message):
        og.augment(model(f"y = {node}", {"x": (1, 2, 4, 4), "w": (2, 2, 3, 3)}), wrt="inputs")


# -- whole files that ONNX Runtime optimized ---------------------------------------------------------------------------

PAD = "pads=[1,1,1,1]"
WEIGHTS = {"w": (8, 8, 3, 3), "v": (8, 8, 3, 3), "s": (8,), "b": (8,)}
RESIDUAL = f"""
    c1 = Conv<{PAD}>(x, w) r1 = Relu(c1)
    c2 = Conv<{PAD}>(r1, v) l2 = LeakyRelu<alpha=0.2>(c2)
    c3 = Conv<{PAD}>(l2, w) s3 = Add(c3, r1) r3 = Relu(s3)
    c4 = Conv<{PAD}>(r3, v) t4 = Tanh(c4)
    c5 = Conv<{PAD}>(t4, w) y = HardSigmoid(c5)"""


def residual() -> onnx.ModelProto:
    arrays = {k: a / 4 for k, a in drawn({k: WEIGHTS[k] for k in "wv"}).items()}
    shapes = {"x": (2, 8, 8, 8), **{k: WEIGHTS[k] for k in "wv"}}
    return stored(model(RESIDUAL, shapes, outputs="float[2,8,8,8] y"), arrays)


def test_a_file_optimized_offline_has_the_gradients_of_the_original(tmp_path: Path) -> None:
    plain = residual()
    fused = optimized(plain, tmp_path, "extended")
    assert Counter(n.op_type for n in fused.graph.node)["FusedConv"] == 4
    x = drawn({"x": (2, 8, 8, 8)})["x"]
    seed = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
    want = run(og.augment(plain, wrt=["x", "w", "v"]), {"x": x, "y_grad": seed})
    got = run(og.augment(fused, wrt=["x", "w", "v"]), {"x": x, "y_grad": seed})
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert off(got[name], value) < 1e-5


def test_shapes_that_the_runtime_added_are_renamed(tmp_path: Path) -> None:
    """The runtime turns products of rank 3 into Gemms between Reshapes, but not beside shapes of the same names."""
    shapes = {"w": (4, 5), "b": (5,), "v": (5, 3), "c": (3,), "W": (1, 12, 3), "R": (1, 12, 4), "B": (1, 24)}
    body = (
        "p = MatMul(x, w) q = Add(p, b) t = Tanh(q) r = MatMul(t, v) s = Add(r, c) y = GRU<hidden_size=4>(s, W, R, B)"
    )
    plain = stored(model(body, {"x": (2, 6, 4), **shapes}), drawn(shapes))
    fused = optimized(plain, tmp_path, "extended")
    before = fused.SerializeToString(deterministic=True)
    assert {"gemm_input_shape", "gemm_output_shape"} <= {t.name for t in fused.graph.initializer}
    feed = drawn({"x": (2, 6, 4), "y_grad": (2, 1, 6, 4)})
    want, got = (run(og.vjp(given, wrt=["x", "w"]), feed) for given in (plain, fused))
    for name, value in want.items():
        assert off(got[name], value) < 1e-5
    assert fused.SerializeToString(deterministic=True) == before


def test_a_file_in_a_blocked_layout_is_refused_with_the_remedy(tmp_path: Path) -> None:
    blocked = optimized(residual(), tmp_path)
    if not any("nchwc" in n.domain for n in blocked.graph.node):
        pytest.skip("ONNX Runtime has no blocked layout on this machine")
    with pytest.raises(
        og.errors.ModelError, match=r"layout that ONNX Runtime made for one machine.*ORT_ENABLE_EXTENDED"
    ):
        og.augment(blocked, wrt="inputs")


# -- what ONNX Runtime fuses in the result -----------------------------------------------------------------------------


def activated(given: onnx.ModelProto) -> Counter[str]:
    """The convolutions with an activation inside, and how many operands they have."""
    found = [(a.s.decode(), len(n.input)) for n in given.graph.node for a in n.attribute if a.name == "activation"]
    return Counter(f"{name} of {count}" for name, count in found)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrt", ["inputs", "parameters", "all"])
def test_the_forward_convolutions_are_fused_as_without_gradients(level: str, wrt: str, tmp_path: Path) -> None:
    """Relu's slope comes from its result, so the value before it has one consumer; so have the sums of residuals."""
    plain = residual()
    want = activated(optimized(plain, tmp_path, level))
    assert want["Relu of 2"] == 1
    assert level != "all" or want["Relu of 4"] == 1  # Conv, Add and Relu in one
    assert activated(optimized(og.augment(plain, wrt=wrt), tmp_path, level)) == want


OWN = {"opset": 17, "domains": ', "com.microsoft": 1'}
_WAY_OUT = "use the model from before that optimization"


def test_all_operators_of_the_runtime_are_refused_together_each_with_a_way_out() -> None:
    body = "h = com.microsoft.BiasAdd (x, x, x) n = ScaledTanh (h) y = com.microsoft.BiasSoftmax (n)"
    with pytest.raises(og.errors.ModelError) as refusal:
        og.augment(graph_of(f"(float[1,2,4] x) => (float[] y) {{ {body} }}", **OWN), wrt="inputs")
    for operator in ("com.microsoft::BiasAdd", "(ScaledTanh, opset 17)", "com.microsoft::BiasSoftmax"):
        (line,) = [line for line in str(refusal.value).splitlines() if operator in line]
        assert _WAY_OUT in line


@pytest.mark.parametrize(
    ("operator", "way_out"),
    [
        ("LongformerAttention", _WAY_OUT),
        ("SkipGroupNorm", r"again with FusionOptions.enable_skip_group_norm = False"),
        ("PackedAttention", _WAY_OUT),
        ("DecoderMaskedMultiHeadAttention", "without a search and without a cache"),
        ("NGramRepeatBlock", "without a search and without a cache"),
        ("VarlenCausalConvWithState", "without a search and without a cache"),
        ("MatMulFpQ4", "from before they were quantized"),
        ("GatherPacked", "from before they were quantized"),
        ("MatMulInteger16", "quantize it again by onnxruntime.quantization"),
        ("DynamicTimeWarping", "small changes of its operands do not change its results"),
        ("Tokenizer", "small changes of its operands do not change its results"),
        ("AttnLSTM", "No optimizer makes it: export the model again with operators of ai.onnx"),
        ("EPContext", "compiled for one device"),
    ],
)
def test_operators_of_the_runtime_on_the_way_of_a_gradient_are_listed_with_a_way_out(
    operator: str, way_out: str
) -> None:
    body = f"h = com.microsoft.{operator} (x, x, x) y = com.microsoft.BiasSoftmax (h)"
    with pytest.raises(og.errors.DifferentiationError) as refusal:
        og.augment(graph_of(f"(float[1,2,4] x) => (float[1,2,4] y) {{ {body} }}", **OWN), wrt="inputs")
    last, first = refusal.value.problems
    assert (last.op_type, first.op_type) == ("com.microsoft::BiasSoftmax", f"com.microsoft::{operator}")
    assert _WAY_OUT in last.hint
    assert way_out in first.hint


def test_remedies_are_of_operators_that_the_runtime_has() -> None:
    assert _REMEDIES.keys() <= {schema.name for schema in get_all_operator_schema() if schema.domain == "com.microsoft"}


def test_the_options_named_in_remedies_exist() -> None:
    options = vars(FusionOptions("unet"))
    assert set(_OPTIONS.values()) <= options.keys()
