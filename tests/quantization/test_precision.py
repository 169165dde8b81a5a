"""Mixed precision: sensitivities are second derivatives of the divergence, and the choice keeps to the size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional

import onnx_convgrad as og
from onnx_convgrad.frontend.files import read
from onnx_convgrad.quantization.blocks import layers_of
from onnx_convgrad.quantization.measure import QuantizationReport
from onnx_convgrad.quantization.precision import bytes_of, drawn, knapsack, narrow, sensitivities
from onnx_convgrad.quantization.quantize import QuantizationSettings
from onnx_convgrad.quantization.quantize import run as quantized_with_report
from onnx_convgrad.runtime import run
from onnx_convgrad.surgery.quantization import prepare, store_integers
from tests.support.one_input import graph_of
from tests.support.quantized import X, depthwise, folded

WEIGHTS = ("c1.weight", "c2.weight", "c3.weight", "fc.weight")


@cache
def result(**options: Any) -> tuple[onnx.ModelProto, QuantizationReport]:
    model, report = quantized_with_report(depthwise(), {"x": X}, QuantizationSettings(method="nearest", **options))
    return ir.to_proto(model), report


def chosen_by_hand(narrowed: tuple[str, ...]) -> tuple[onnx.ModelProto, int]:
    """The model with 4 bits in the named weights, and the bytes of all weights."""
    model = read(og.transforms.insert_quantizers(depthwise(), {"x": X}))
    prepare(model, "qat")
    layers = layers_of(model.graph)
    for layer in layers:
        if layer.name in narrowed:
            narrow(layer)
    size = sum(map(bytes_of, layers))
    store_integers(model)
    return ir.to_proto(model), size


def divergence(model: onnx.ModelProto) -> float:
    """The mean of KL(float | quantized)."""
    want, got = (torch.tensor(run(m, {"x": X}, optimize=False)["y"]).double() for m in (depthwise(), model))
    return float(functional.kl_div(got.log_softmax(1), want.log_softmax(1), reduction="batchmean", log_target=True))


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def float_arrays() -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array).double() for name, array in arrays(folded()).items() if "." in name}


def network(v: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(functional.conv2d(x, v["c1.weight"], v["c1.bias"], padding=1))
    h = torch.clamp(functional.conv2d(h, v["c2.weight"], v["c2.bias"], padding=1, groups=8), 0, 6)
    h = torch.relu(functional.conv2d(h, v["c3.weight"], v["c3.bias"])).mean((2, 3))
    return functional.linear(h, v["fc.weight"], v["fc.bias"])


def loss_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The divergence per sample from the float network as a function of one weight."""
    values, x = float_arrays(), torch.tensor(X).double()
    want = network(values, x).log_softmax(1)

    def loss(w: torch.Tensor) -> torch.Tensor:
        got = network(values | {name: w}, x).log_softmax(1)
        return functional.kl_div(got, want, reduction="batchmean", log_target=True)

    return loss


def rounding(name: str, levels: float) -> torch.Tensor:
    """The change of a weight by rounding with one scale per output channel."""
    w = float_arrays()[name]
    step = (w.abs().amax(tuple(range(1, w.ndim)), keepdim=True) / 127).float().double() * 127 / levels
    bound = np.floor(levels)
    return torch.clamp((w / step).round(), -bound - 1, bound) * step - w


@pytest.mark.parametrize("kind", ["gradient", "trace"])
def test_sensitivities_are_second_derivatives(kind: str) -> None:
    """Against the Hessian of the divergence in PyTorch: half D'HD, and half its mean diagonal times |D|^2."""
    model = read(og.transforms.insert_quantizers(depthwise(), {"x": X}))
    prepare(model, "qat")
    got = sensitivities(read(folded()), layers_of(model.graph), [{"x": X[:16]}, {"x": X[16:]}], kind, 0, draws=3000)
    assert tuple(got) == WEIGHTS
    for name in WEIGHTS:
        w = float_arrays()[name]
        hessian = torch.autograd.functional.hessian(loss_of(name), w).reshape(w.numel(), w.numel())
        want = 0.0
        for levels, sign in ((127 / 17, 1), (127, -1)):
            d = rounding(name, levels).reshape(-1)
            want += sign * float(d @ hessian @ d if kind == "gradient" else hessian.diagonal().mean() * (d @ d)) / 2
        assert got[name] == pytest.approx(want, rel=0.1), name


def test_the_trace_is_that_of_hessian_vector_products() -> None:
    """The sum of e'He over unit vectors e, from `hvp` of the divergence, is the trace in the sensitivity."""
    text = """(float[8,3] x, float[8,4] p) => (float loss) {
        y = Gemm <transB = 1> (x, w)
        s = LogSoftmax (y)
        m = Mul (p, s)
        t = ReduceSum <keepdims = 0> (m)
        loss = Neg (t)
    }"""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(4, 3)).astype("f"), rng.normal(size=(8, 3)).astype("f")
    proto = graph_of("(float[N,3] x) => (float[N,4] y) { y = Gemm <transB = 1> (x, w) }", w=w)
    shares = torch.softmax(torch.tensor(x @ w.T), 1).numpy()
    product = og.hvp(graph_of(text, opset=21, w=w), wrt=["w"], of="loss")
    feeds = {"x": x, "p": shares}
    (tangent,) = {v.name for v in product.graph.input} - set(feeds)
    units = np.eye(w.size, dtype="f").reshape(-1, *w.shape)
    trace = sum(float(np.vdot(unit, og.session(product).run(None, feeds | {tangent: unit})[-1])) for unit in units)
    model = read(og.transforms.insert_quantizers(proto, {"x": x}))
    prepare(model, "qat")
    (layer,) = layers_of(model.graph)
    got = sensitivities(read(proto), [layer], [{"x": x}], "trace", 0, draws=4000)["w"]
    step = np.abs(w).max(1, keepdims=True) / 127
    narrow_, wide = (np.rint(w / s).clip(-n - 1, n) * s - w for s, n in ((step * 17, 7), (step, 127)))
    want = trace / len(x) / w.size * (np.square(narrow_).sum() - np.square(wide).sum()) / 2
    assert got == pytest.approx(want, rel=0.1)


@pytest.mark.parametrize("sensitivity", ["gradient", "trace"])
def test_the_choice_is_better_than_most_others_that_fit(sensitivity: str) -> None:
    model, report = result(bits=6.0, sensitivity=sensitivity)
    size = sum(row.bytes for row in report.layers)
    assert size <= sum(row.bytes for row in result()[1].layers) * 6 / 8
    others = [chosen_by_hand(names) for count in range(5) for names in combinations(WEIGHTS, count)]
    fitting = [divergence(other) for other, other_size in others if other_size <= 324]
    assert len(fitting) == 8
    assert divergence(model) < 0.8 * np.median(fitting)
    assert divergence(model) < 0.5 * divergence(result(weights="int4")[0])


@pytest.mark.parametrize(
    ("options", "most"), [({"bits": 4.0}, 216), ({"bits": 5.5}, 297), ({"size": 250}, 250), ({"size": 0.2}, 345)]
)
def test_the_size_holds(options: dict[str, float], most: int) -> None:
    model, report = result(**options)
    kinds = {t.name: t.data_type for t in model.graph.initializer}
    for row in report.layers:
        four = kinds[f"{row.weight}_quantized"] == onnx.TensorProto.INT4
        assert (row.bits, row.bytes) == ((4, np.prod(row.shape) // 2) if four else (8, np.prod(row.shape)))
        assert row.sensitivity is not None
    assert sum(row.bytes for row in report.layers) <= most
    onnx.checker.check_model(model, full_check=True)


def test_all_layers_have_eight_bits_if_there_is_room() -> None:
    model, report = result(bits=8.0)
    assert {row.bits for row in report.layers} == {8}
    assert divergence(model) == divergence(result()[0])


def test_unsigned_weights_keep_their_zero_points() -> None:
    model, report = result(bits=5.0, weights="uint8", activations="uint8")
    kinds = {t.data_type for t in model.graph.initializer}
    assert {onnx.TensorProto.UINT4, onnx.TensorProto.UINT8} <= kinds
    assert {row.bits for row in report.layers} == {4, 8}
    assert divergence(model) < divergence(result(weights="uint4", activations="uint8")[0])


def test_rounding_is_learned_with_both_precisions() -> None:
    settings = QuantizationSettings(method="adaround", bits=5.0, iterations=60, lr=3e-2, batch_size=16)
    model, report = quantized_with_report(depthwise(), {"x": X}, settings)
    before, after = report.outputs["y"]
    assert after.mean_square < 0.6 * before.mean_square
    kinds = {t.data_type for t in ir.to_proto(model).graph.initializer}
    assert {onnx.TensorProto.INT4, onnx.TensorProto.INT8} <= kinds
    assert {row.bits for row in report.layers} == {4, 8}


def test_the_knapsack_is_the_best_of_all_choices() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        gains, sizes = rng.random(8).tolist(), rng.integers(1, 50, 8).tolist()
        room = int(sum(sizes) * 0.4)
        found = knapsack(gains, sizes, room)
        sets = [set(c) for n in range(9) for c in combinations(range(8), n)]
        best = max(sum(gains[i] for i in s) for s in sets if sum(sizes[i] for i in s) <= room)
        assert sum(sizes[i] for i in found) <= room
        assert sum(gains[i] for i in found) == pytest.approx(best)


def test_drawn_gradients_have_the_covariance_of_the_fisher_matrix() -> None:
    y = np.tile(np.asarray([[0.0, 1.0, -1.0]], np.float32), (20000, 1))
    p = torch.softmax(torch.tensor(y[0]), 0).numpy()
    g = drawn(y, np.random.default_rng(0))
    np.testing.assert_allclose(g.T @ g / len(g), np.diag(p) - np.outer(p, p), atol=0.01)
    other = drawn(np.zeros((20000, 1), np.float32), np.random.default_rng(0))
    assert other.std() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bits": 3}, "between 4 and 8"),
        ({"bits": 5, "size": 100}, "one of them"),
        ({"size": 0}, "size must be above 0"),
        ({"size": 100}, "216 bytes with 4 bits each, and 100 are wanted"),
        ({"bits": 5, "weights": "int4"}, "Use 'int8' or 'uint8'"),
        ({"bits": 5, "sensitivity": "hvp"}, "sensitivity"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=reason):
        og.transforms.quantize(depthwise(), {"x": X}, method="nearest", **options)
