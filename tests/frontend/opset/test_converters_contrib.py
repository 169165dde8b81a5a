"""ONNX Runtime's own operators: values are those of their CPU kernels, gradients those of differences of the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.frontend.opset.converters import FUSED
from onnx_convgrad.runtime import run
from tests.support.contrib_kernels import CASES
from tests.support.kernels import MICROSOFT, Kernel

_RNG = np.random.default_rng(1)


def normal(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("case", CASES, ids=[f"{at} {case}" for at, case in enumerate(CASES)])
def test_values_and_gradients_are_those_of_the_kernel(case: Kernel) -> None:
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
    total, step = 0.0, 0.02
    for shift, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
        results = run(model, {**feed, name: np.asarray(feed[name] + np.float32(shift * step) * direction)})
        for result, value in ((n, v) for n, v in results.items() if f"{n}_grad" in seeds):
            shown = np.where(np.abs(value) < 1e30, value, 0).astype(np.float64)  # no scores of hidden keys
            total += weight * float(np.sum(shown * seeds[f"{result}_grad"]))
    return total / (12 * step)


def test_every_operator_is_compared() -> None:
    """Those that another test compares are in `test_function_bodies.py`, and quantized ones in their own file."""
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
        ),
        *("SkipLayerNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"),
        *("MatMulNBits", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"),
    }
