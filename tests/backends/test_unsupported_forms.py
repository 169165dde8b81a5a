"""Forms that CUDA lacks are replaced in models built for it, with equal results."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.backends.cuda.cuda_kernels import lacks
from onnx_convgrad.runtime import run
from tests.support.cuda_models import augmented, close, lacking
from tests.support.one_input import graph_of

FORMS = {
    "conv": ("x[2,3,7,8] w[4,3,3,3]", "y = Conv <pads=[0,1,2,1]> (x, w)"),
    "conv_same": ("x[2,3,7,8] w[4,3,3,3]", 'y = Conv <auto_pad="SAME_UPPER", strides=[2,2]> (x, w)'),
    "conv1d": ("x[2,3,9] w[4,3,3]", "y = Conv <pads=[0,2]> (x, w)"),
    "transpose": ("x[2,3,4,5] w[3,4,3,3]", "y = ConvTranspose <pads=[0,1,2,1], strides=[2,3]> (x, w)"),
    "transpose_extra": (
        "x[2,3,4,5] w[3,2,3,3]",
        "y = ConvTranspose <pads=[2,0,1,1], strides=[2,3], output_padding=[1,2], group=1> (x, w)",
    ),
    "transpose_same": ("x[2,3,4,5] w[3,2,4,4]", 'y = ConvTranspose <auto_pad="SAME_UPPER", strides=[3,3]> (x, w)'),
}


def _form(name: str) -> onnx.ModelProto:
    operands, body = FORMS[name]
    declared = ", ".join(f"float[{text.partition('[')[2]} {text[0]}" for text in operands.split())
    rank = declared.count(",", 0, declared.index("]")) + 1
    return graph_of(f"({declared}) => (float[{','.join('abcd'[:rank])}] y) {{ [node] {body} }}", opset=21)


@pytest.mark.parametrize("open_sizes", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_uneven_padding_of_the_model_is_made_even(name: str, open_sizes: bool) -> None:
    model = _form(name)
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    if open_sizes and "same" not in name:  # there, the padding is not known
        for axis, dim in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
            dim.dim_param = f"n{axis}"
    built = augmented(model, "cuda", wrt="inputs")
    assert lacking(augmented(model, og.Target(lowering={"Conv": "conv"}), wrt="inputs"))
    assert lacking(built) == []
    rng = np.random.default_rng(1)
    feed = {key: rng.normal(size=size).astype(np.float32) for key, size in sizes.items()}
    close(run(built, feed), run(augmented(model, "cpu", wrt="inputs"), feed), name)


@pytest.mark.parametrize("batch", ["4", "N"])
@pytest.mark.parametrize("space", ["", ",5", ",5,6", ",5,8"])
def test_batch_statistics_are_primitives(space: str, batch: str) -> None:
    model = graph_of(
        f"(float[{batch},3{space}] x) => (float[{batch},3{space}] y)"
        " <float[3] s = {1, 2, 3}, float[3] b = {0, 1, -1}, float[3] m = {1, 2, 3}, float[3] v = {1, 2, 3}>"
        " { [norm] y = BatchNormalization <epsilon = 0.01, momentum = 0.7> (x, s, b, m, v) }",
        opset=21,
    )
    built = augmented(model, "cuda", wrt="all", training=True)
    assert lacking(built) == []
    plain = augmented(model, "cpu", wrt="all", training=True)
    assert [o.name for o in built.graph.output] == [o.name for o in plain.graph.output]
    assert {"m_next", "v_next"} <= {o.name for o in built.graph.output}
    shape = (4, 3, *(int(size) for size in space.split(",") if size))
    feed = {"x": (np.random.default_rng(2).normal(size=shape) * 2 + 30).astype(np.float32)}
    close(run(built, feed), run(plain, feed), space)


@pytest.mark.parametrize("batch", ["4", "N"])
@pytest.mark.parametrize("space", [(5, 8), (64,), (3, 4, 5)])
def test_statistics_and_gradients_of_float16_equal_those_of_torch(space: tuple[int, ...], batch: str) -> None:
    """Passes over float16, sums in float32: within the rounding of float16, also if the mean is larger than the rest."""
    sizes = ",".join(map(str, space))
    model = graph_of(
        f"(float16[{batch},3,{sizes}] x, float16[3] s, float16[3] b) => (float16[{batch},3,{sizes}] y)"
        " <float[3] m = {0, 0, 0}, float[3] v = {1, 1, 1}>"
        " { [norm] y, m_next, v_next = BatchNormalization <training_mode = 1> (x, s, b, m, v) }",
        opset=21,
    )
    built = onnx.shape_inference.infer_shapes(og.augment(model, wrt=["x", "s", "b"], target="cuda"))
    assert lacking(built) == []
    assert sum(node.op_type == "MatMul" for node in built.graph.node) == 2
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(4, 3, *space)) * 2 + 10).astype(np.float16)
    s, b, seed = (rng.normal(size=size).astype(np.float16) for size in (3, 3, x.shape))
    got = run(built, {"x": x, "s": s, "b": b, "y_grad": seed})
    leaves = [torch.from_numpy(v).double().requires_grad_() for v in (x, s, b)]
    y = torch.nn.functional.batch_norm(leaves[0], None, None, *leaves[1:], training=True)
    y.backward(torch.from_numpy(seed).double())
    for name, leaf in zip("xsb", leaves, strict=True):
        assert leaf.grad is not None
        want = leaf.grad.numpy()
        error = np.abs(got[f"{name}_grad"] - want).max() / np.abs(want).max()
        assert error < 4e-3, (name, error)
    assert np.abs(got["y"] - y.detach().numpy()).max() < 2e-2


def _statistics_of(x: np.ndarray, weight: np.ndarray, batch: str | int | None = None) -> tuple[onnx.ModelProto, dict]:
    """The step for CUDA of a convolution of one tap and a BatchNormalization in training, in float16; and its results."""
    features, channels = weight.shape[:2]
    sizes = ",".join(map(str, x.shape[2:]))
    ones, zeros = (",".join([digit] * features) for digit in "10")
    model = graph_of(
        f"(float16[{batch or len(x)},{channels},{sizes}] x, float16[{features},{channels},1,1] w)"
        f" => (float16[{batch or len(x)},{features},{sizes}] y, float[{features}] m_next, float[{features}] v_next)"
        f" <float16[{features}] s = {{{ones}}}, float16[{features}] b = {{{zeros}}},"
        f" float[{features}] m = {{{zeros}}}, float[{features}] v = {{{ones}}}>"
        " { c = Conv(x, w) y, m_next, v_next = BatchNormalization <training_mode = 1, momentum = 0.0> (c, s, b, m, v) }",
        opset=21,
    )
    built = og.augment(model, wrt=["x", "w"], of="y", target="cuda")
    assert lacking(onnx.shape_inference.infer_shapes(built)) == []
    seed = np.random.default_rng(6).normal(size=(len(x), features, *x.shape[2:])).astype(np.float16)
    return built, run(built, {"x": x, "w": weight, "y_grad": seed})


def _used(built: onnx.ModelProto, op_type: str) -> int:
    return sum(node.op_type == op_type for node in built.graph.node)


@pytest.mark.parametrize(("ratio", "bound"), [(0, 2e-4), (1, 4e-4), (4, 4e-3), (16, 0.06), (200, 20)])
def test_variances_from_products_lose_digits_if_the_mean_is_large(ratio: float, bound: float) -> None:
    """By (1 + (mean / deviation)^2) / 3000 / sqrt(N) on average; below 1/64 of the mean deviations count as that."""
    x = (np.random.default_rng(5).normal(size=(32, 32, 12, 12)) + ratio).astype(np.float16)
    built, got = _statistics_of(x, np.eye(32, dtype=np.float16)[..., None, None])
    assert not _used(built, "LayerNormalization")
    wide = x.astype(np.float64)
    error = np.abs(got["v_next"] / wide.var((0, 2, 3)) - 1)
    assert error.max() < bound
    assert error.mean() < 2 * (1 + ratio**2) / 3000 / np.sqrt(32) or ratio > 64
    np.testing.assert_allclose(got["m_next"], wide.mean((0, 2, 3)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fill", [0, 5, 300])
def test_channels_of_one_value_and_of_large_ones_stay_finite(fill: float) -> None:
    """A square above the range of float16 counts as its largest number; a variance is positive beside a mean."""
    x = np.full((8, 16, 12, 12), fill, np.float16)
    _, got = _statistics_of(x, np.eye(16, dtype=np.float16)[..., None, None])
    assert all(np.isfinite(value).all() for value in got.values())
    assert np.abs(got["y"]).max() < 0.05 + (fill > 255)
    assert (got["v_next"] >= 0).all()


@pytest.mark.parametrize(
    ("shape", "batch", "used"),
    [
        ((8, 16, 12, 12), "N", "Gather"),
        ((4, 16, 12, 12), None, "LayerNormalization"),  # few samples
        ((8, 67, 12, 12), None, "LayerNormalization"),  # a prime number of channels
        ((8, 16, 7, 7), None, "LayerNormalization"),  # short rows
        ((8, 512, 6, 6), None, "Transpose"),
        ((8, 512, 6, 6), "N", "LayerNormalization"),
    ],
)
def test_moments_of_float16_are_taken_in_the_fastest_form(shape: tuple[int, ...], batch: str | None, used: str) -> None:
    x = (np.random.default_rng(8).normal(size=shape) * 3 + 1).astype(np.float16)
    built, got = _statistics_of(x, np.eye(shape[1], dtype=np.float16)[..., None, None], batch)
    assert (_used(built, "LayerNormalization") == 0) == (used == "Gather")
    if used == "Transpose":
        (rows,) = (node.input[0] for node in built.graph.node if node.op_type == "LayerNormalization")
        shapes = {v.name: v.type.tensor_type.shape.dim for v in built.graph.value_info}
        assert [d.dim_value for d in shapes[rows]] == [512, 8 * 36]
    wide = x.astype(np.float64)
    np.testing.assert_allclose(got["v_next"], wide.var((0, 2, 3)), rtol=1e-3)
    np.testing.assert_allclose(got["m_next"], wide.mean((0, 2, 3)), rtol=1e-3, atol=1e-3)


def test_mixed_precision_keeps_variances_that_float16_does_not_hold() -> None:
    """Stored statistics in float32 beside data in float16: a variance of 1e-9 is 0 in float16."""
    model = graph_of(
        "(float16[2,2,3] x) => (float16[2,2,3] y)"
        " <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m = {0.0009765625, 2}, float[2] v = {0.000000001, 90000}>"
        " { [norm] y = BatchNormalization <epsilon = 0.0000000001> (x, s, b, m, v) }",
        opset=21,
    )
    assert [str(lack) for lack in lacks(model)] == [
        "norm (BatchNormalization): its statistics are of another type than its data"
    ]
    built = augmented(model, "cuda", wrt=["x"])
    assert lacking(built) == []
    x = np.array([0.001, 0.00101, 0.0009, 300, -500, 2] * 2, np.float16).reshape(2, 2, 3)
    got = run(built, {"x": x})["y"].astype(np.float64)
    mean, deviation = np.array([[2.0**-10], [2]]), np.sqrt([[1.1e-9], [90000]])
    want = (x - mean) / deviation * [[1], [2]] + [[0], [1]]
    np.testing.assert_allclose(got, want, rtol=4e-3, atol=1e-2)


GROUPED = {
    "filled": ("x[2,4,7,8] w[10,2,3,3]", "y = Conv <group=2, pads=[1,1,1,1]> (x, w)"),
    "depthwise": ("x[2,3,9] w[27,1,3]", "y = Conv <group=3, strides=[2]> (x, w)"),
    "bias": ("x[2,4,7,8] w[12,2,3,3] b[12]", "y = Conv <group=2, dilations=[2,2]> (x, w, b)"),
    "volume": ("x[2,4,5,4,3] w[6,2,3,3,3] b[6]", "y = Conv <group=2, pads=[1,1,1,1,1,1]> (x, w, b)"),
    "kept": ("x[2,4,7,8] w[8,1,3,3]", "y = Conv <group=4> (x, w)"),
}


@pytest.mark.parametrize("batch", ["2", "N"])
@pytest.mark.parametrize("target", ["web", "portable"])
@pytest.mark.parametrize("name", GROUPED)
def test_groups_that_webgpu_computes_wrongly_are_filled(name: str, target: str, batch: str) -> None:
    operands, body = GROUPED[name]
    sizes = {text[0]: [int(d) for d in text[2:-1].split(",")] for text in operands.split()}
    declared = ", ".join(f"float[{text[2:-1]}] {text[0]}" for text in operands.split()).replace("[2,", f"[{batch},", 1)
    results = ",".join("abcde"[: len(sizes["x"])])
    model = graph_of(f"({declared}) => (float[{results}] y) {{ {body} }}", opset=21)
    built = augmented(model, target, wrt="inputs")
    rng = np.random.default_rng(1)
    feed = {key: rng.normal(size=size).astype(np.float32) for key, size in sizes.items()}
    plain = augmented(model, "cpu", wrt="inputs")
    close(run(built, feed), run(plain, feed), name)
    weights = {t.name: t.dims for t in built.graph.initializer} | {v.name: sizes.get(v.name) for v in built.graph.input}
    for node in built.graph.node:
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        if node.op_type == "Conv" and groups > 1 and (dims := weights.get(node.input[1])):
            each = dims[0] // groups
            assert len(dims) < 5
            assert each <= 4 or each % 4 == 0, node.name


@pytest.mark.parametrize("target", ["web", "webgpu", "portable"])
@pytest.mark.parametrize(("channels", "filled"), [(3, 3), (6, 8), (9, 12), (12, 12), (7, 7)])
def test_channels_that_webgpu_computes_wrongly_are_filled(target: str, channels: int, filled: int) -> None:
    text = f"(float[2,{channels},7,8] x, float[8,{channels},3,3] w, float[8] b) => (float[2,8,5,6] y)"
    model = graph_of(f"{text} {{ y = Conv (x, w, b) }}", opset=21)
    built, plain = (augmented(model, name, wrt="inputs") for name in (target, "cpu"))
    rng = np.random.default_rng(1)
    shapes = {"x": (2, channels, 7, 8), "w": (8, channels, 3, 3), "b": (8,), "y_grad": (2, 8, 5, 6)}
    feed = {i.name: rng.normal(size=shapes[i.name]).astype(np.float32) for i in plain.graph.input}
    close(run(built, feed), run(plain, feed), target)
    inferred = onnx.shape_inference.infer_shapes(built).graph
    sizes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*inferred.input, *inferred.value_info)
    }
    (forward,) = (n for n in built.graph.node if n.op_type == "Conv" and "y" in n.output)
    assert sizes[forward.input[1]] == [8, filled, 3, 3]
