"""ONNX Runtime's own operators: values are those of their CPU kernels, gradients those of differences of the kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.frontend.opset.converters import FUSED
from onnx_convgrad.runtime import run
from tests.support.contrib_kernels import CASES
from tests.support.kernels import MICROSOFT, Kernel


def numbers() -> Callable[..., np.ndarray]:
    """A function that draws normal numbers of a shape."""
    draw = np.random.default_rng(1)
    return lambda *shape: draw.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("case", CASES, ids=[f"{at} {case}" for at, case in enumerate(CASES)])
def test_values_and_gradients_are_those_of_the_kernel(case: Kernel) -> None:
    normal = numbers()
    model, feed = case.model(), case.feed
    wanted = run(model, feed)
    wrt = [name for name, array in feed.items() if array.dtype == np.float32 and array.size]
    augmented = og.augment(model, wrt=wrt)
    assert {node.domain for node in augmented.graph.node} == {""}
    seeds = {f"{name}_grad": normal(*value.shape) for name, value in wanted.items() if value.dtype == np.float32}
    got = run(augmented, {**feed, **seeds})
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=case.tolerance, atol=case.tolerance, err_msg=name)
    for name in wrt:
        direction = normal(*feed[name].shape) * min(1, np.abs(feed[name]).mean())
        want = _derivative(model, feed, name, direction, seeds)
        found = float(np.sum(got[f"{name}_grad"].astype(np.float64) * direction))
        scale = float(np.linalg.norm(got[f"{name}_grad"]) * np.linalg.norm(direction)) / direction.size**0.5
        assert abs(found - want) < 2e-3 * max(scale, 1, abs(want)), name


def _derivative(model: Any, feed: Any, name: str, direction: np.ndarray, seeds: Any) -> float:
    """The derivative of the results, weighted by `seeds`, along a direction of one operand: differences of order 4."""
    total, step = 0.0, 0.005
    for shift, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
        results = run(model, {**feed, name: np.asarray(feed[name] + np.float32(shift * step) * direction)})
        for result, value in ((n, v) for n, v in results.items() if f"{n}_grad" in seeds):
            shown = np.where(np.abs(value) < 1e30, value, 0).astype(np.float64)  # no scores of hidden keys
            total += weight * float(np.sum(shown * seeds[f"{result}_grad"]))
    return total / (12 * step)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if at % 8 else [], id=f"{at} {case}")
        for at, case in enumerate(CASES)
        if case.op not in ("CausalConvWithState", "GatherBlockQuantized")  # their weights are stored
    ],
)
def test_values_are_those_of_the_kernel_if_no_size_is_known(case: Kernel) -> None:
    model, feed = case.model(), case.feed
    wanted = run(model, feed)
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{axis}"
    augmented = og.augment(model, wrt=[name for name, array in feed.items() if array.dtype == np.float32])
    seeds = {f"{name}_grad": np.ones_like(value) for name, value in wanted.items() if value.dtype == np.float32}
    got = run(augmented, {**feed, **seeds})
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=case.tolerance, atol=case.tolerance, err_msg=name)


HALVES = [
    case for case in CASES if case.op in ("GroupQueryAttention", "RotaryEmbedding", "MoE", "QMoE", "GatedDeltaNet")
]


@pytest.mark.parametrize("case", HALVES[::4], ids=str)
def test_values_in_half_precision(case: Kernel) -> None:
    kept = (6, 7, 8) if case.op == "GatedDeltaNet" else ()  # the state and the activation of the decay
    narrow = [
        a.astype(np.float16) if a is not None and a.dtype == np.float32 and at not in kept else a
        for at, a in enumerate(case.inputs)
    ]
    half = dataclasses.replace(case, inputs=narrow)
    wanted = run(half.model(), half.feed)
    seeds = {f"{name}_grad": np.ones_like(value) for name, value in wanted.items()}
    augmented = og.augment(half.model(), wrt=["x0"])
    got = run(augmented, {**half.feed, **seeds})
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype == (np.float32 if name in case.floats and kept else np.float16)
        np.testing.assert_allclose(got[name], value, rtol=1e-2, atol=1e-2, err_msg=name)


@pytest.mark.parametrize(
    ("op", "stored"),
    [
        ("CropAndResize", (3,)),
        ("GroupQueryAttention", ()),
        ("Inverse", ()),
        ("MRotaryEmbedding", ()),
        ("MatMulBnb4", (1, 2)),
    ],
)
def test_constants_of_a_formula_are_no_parameters(op: str, stored: tuple[int, ...]) -> None:
    for case in [case for case in CASES if case.op == op]:
        with pytest.raises(og.errors.ArgumentError, match="no trainable parameters"):
            og.augment(dataclasses.replace(case, stored=stored).model(), wrt="parameters")


def test_packed_heads_are_those_of_separate_operands() -> None:
    """ONNX Runtime's CPU kernel takes no packed operands."""
    normal = numbers()
    packed = normal(2, 3, 2, 3, 4)
    q, k, v = (np.ascontiguousarray(part.reshape(2, 3, 8)) for part in np.moveaxis(packed, 3, 0))
    keys = np.ascontiguousarray(packed[:, :, :, 1:])
    options = {"num_heads": 2, "unidirectional": 1}
    want = run(Kernel("MultiHeadAttention", [q, k, v], options, domain=MICROSOFT).model(), {"x0": q, "x1": k, "x2": v})
    for operands in ([packed], [q, keys]):
        case = Kernel("MultiHeadAttention", list(operands), options, domain=MICROSOFT)
        augmented = og.augment(case.model(), wrt="inputs", of="y", cotangents="ones")
        np.testing.assert_allclose(run(augmented, case.feed)["y"], want["y"], atol=1e-5)


def test_a_dynamically_quantized_product_has_the_gradient_of_the_dequantized_one() -> None:
    normal = numbers()
    a, b = normal(2, 3, 8), np.random.default_rng(0).integers(-60, 60, (8, 5)).astype(np.int8)
    scale, zero, bias = np.abs(normal(5)) / 100, np.full(5, 4, np.int8), normal(5)
    case = Kernel("DynamicQuantizeMatMul", [a, b, scale, zero, bias], domain=MICROSOFT)
    augmented = og.augment(case.model(), wrt=["x0", "x2", "x4"])
    want, seed = run(case.model(), case.feed)["y"], normal(2, 3, 5)
    got = run(augmented, {**case.feed, "y_grad": seed})
    np.testing.assert_allclose(got["y"], want, atol=1e-4)
    weight = (b - zero.astype(np.float32)) * scale
    np.testing.assert_allclose(got["x0_grad"], seed @ weight.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["x4_grad"], seed.sum((0, 1)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["x2_grad"], ((want - bias) / scale * seed).sum((0, 1)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("op", "count", "attributes", "reason"),
    [
        ("Attention", 7, {}, r"past_sequence_length \(input 6\)"),
        ("Attention", 3, {"do_rotary": 1}, "do_rotary is 1, which ONNX Runtime's CPU kernel lacks"),
        ("MultiHeadAttention", 10, {}, r"past_sequence_length \(input 8\)"),
        ("GroupQueryAttention", 15, {}, r"k_scale \(input 12\)"),
        ("GroupQueryAttention", 7, {"sliding_window_cache": 1}, "its cache slides"),
        ("RotaryEmbedding", 4, {"is_packed_batching": 1}, "packed without padding"),
        ("CropAndResize", 4, {}, "crop_size is not stored"),
        ("CDist", 2, {"metric": "cosine"}, "its metric is 'cosine'"),
        ("ConvTransposeWithDynamicPads", 3, {}, "Pads is not stored"),
        ("GatherBlockQuantized", 3, {}, "its data are not integers"),
        ("GatedDeltaNet", 4, {}, r"cu_seqlens \(input 3\)"),
        ("MatMulBnb4", 3, {}, "not stored in 4 bits per number"),
        ("MoEGroupRouter", 3, {}, "projection_weight"),
        ("QMoE", 7, {"quant_type": "fp4"}, "not integers in the order"),
        ("QMoE", 7, {"fc2_expert_weight_bits": 8}, "different widths"),
        ("QMoE", 7, {}, "not stored, in 2, 4 or 8 bits"),
    ],
)
def test_a_form_without_an_equivalent_is_refused(op: str, count: int, attributes: Any, reason: str) -> None:
    case = Kernel(
        op,
        [np.ones((2, 2, 2), np.float32)] * count,
        {"num_heads": 1, "kv_num_heads": 1, **attributes},
        domain=MICROSOFT,
    )
    with pytest.raises(og.errors.ModelError, match=reason):
        og.augment(case.model(), wrt="inputs")


def test_every_operator_is_compared() -> None:
    """Operators without a case have one in `test_function_bodies.py` or, if quantized, `test_converters_quantized.py`."""
    compared = {case.op for case in CASES}
    others = {op for domain, op in FUSED if domain == MICROSOFT} - compared
    assert {op for op in others if not op.startswith(("QLinear", "Fused"))} == {
        *(
            "BiasGelu",
            "FastGelu",
            "Gelu",
            "QuickGelu",
            "TransposeMatMul",
            "QuantizeLinear",
            "DequantizeLinear",
            "QGemm",
            "NhwcMaxPool",
        ),
        *("SkipLayerNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"),
        *("MatMulNBits", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"),
    }
