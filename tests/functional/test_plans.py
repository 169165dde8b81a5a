"""Calls whose operands have too many elements for 32-bit indices are computed in parts of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import onnx_convgrad.functional as F
from onnx_convgrad.functional import plans
from onnx_convgrad.functional.plans import moved_axis


@pytest.fixture
def clear() -> Iterator[None]:
    plans.plan.cache_clear()
    yield
    plans.plan.cache_clear()


def rand(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def _calls(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> Iterator[tuple[Any, ...]]:
    yield (F.conv1d(x, w),)
    yield F.convolution_backward(g, x, w)
    yield F.convolution_backward(g, x, w, output_mask=(False, True, False))
    yield F.convolution_double_backward(x, w, None, g, w, x)
    yield (F.conv1d_input(x.shape, w, g),)
    yield (F.conv1d_weight(x, w.shape, g),)
    yield F.conv1d_per_sample_grad(x, w, g)
    yield (F.convolution_jvp(x, w, x, w),)
    yield (F.convolution_add_relu(x, w, g),)
    yield F.convolution_add_relu_backward(g, g, x, w)
    yield (F.conv_transpose1d(g, w),)


@pytest.mark.parametrize(
    "limit",
    [pytest.param(3 * 9, marks=pytest.mark.slow), 2 * 3 * 9 + 1, pytest.param(4 * 4 * 7, marks=pytest.mark.slow)],
)
def test_parts_give_the_same(limit: int, clear: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, two and three samples at a time, a smaller last part, and channels last."""
    x, w, g = rand(5, 3, 9), rand(4, 3, 3), rand(5, 4, 7)
    moved = [np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1) for a in (x, g)]

    def every() -> list[tuple[Any, ...]]:
        return [*_calls(x, w, g), (F.conv1d(moved[0], w),), F.convolution_backward(moved[1], moved[0], w)]

    expected = every()
    plans.plan.cache_clear()
    monkeypatch.setattr(plans, "INDEX_LIMIT", limit)
    for call, wanted in zip(every(), expected, strict=True):
        for value, reference in zip(call, wanted, strict=True):
            assert (value is None) == (reference is None)
            if value is not None:
                np.testing.assert_allclose(value, reference, rtol=1e-12, atol=1e-12)
                assert value.dtype == reference.dtype
                assert moved_axis(value) == moved_axis(reference)


def test_halves_are_summed_in_float32(clear: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x, g = np.ones((2000, 1, 3), dtype), np.ones((2000, 1, 1), dtype)
        monkeypatch.setattr(plans, "INDEX_LIMIT", 600)
        dw = F.conv1d_weight(x, (1, 1, 3), g)
        assert dw.dtype == dtype
        np.testing.assert_array_equal(dw.astype(float), 2000)


def test_the_limit_and_single_samples(clear: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the limit there is one part, and a sample is never divided."""
    x, w = rand(4, 3, 9), rand(4, 3, 3)
    expected = F.conv1d(x, w)
    ran: list[plans.Plan] = []
    original = plans.Plan.run
    monkeypatch.setattr(plans.Plan, "run", lambda made, arrays: ran.append(made) or original(made, arrays))
    for limit, parts in ((4 * 4 * 7 + 1, 1), (4 * 4 * 7, 1), (4 * 4 * 7 - 1, 2), (30, 4), (3, 4)):
        plans.plan.cache_clear()
        monkeypatch.setattr(plans, "INDEX_LIMIT", limit)
        ran.clear()
        np.testing.assert_allclose(F.conv1d(x, w), expected, rtol=1e-12)
        assert len(ran) == parts
    plans.plan.cache_clear()
    monkeypatch.setattr(plans, "INDEX_LIMIT", 2 * 28 + 20)
    ran.clear()
    np.testing.assert_allclose(F.conv1d(np.concatenate([x, x[:1]]), w)[:4], expected, rtol=1e-12)
    assert len(ran) == 3, "a half of three samples is still too large"
    monkeypatch.setattr(plans, "INDEX_LIMIT", 3)
    np.testing.assert_allclose(F.conv1d(x[0], w), F.conv1d(x, w)[0], rtol=1e-12)
