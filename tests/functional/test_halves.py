"""bfloat16 arrays of ml_dtypes: the float32 result, rounded once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import onnx_convgrad.functional as F
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.functional.plans import moved_axis

BF16 = np.dtype(ml_dtypes.bfloat16)


def rand(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(BF16)


def _results(x: np.ndarray, w: np.ndarray, g: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    return [
        F.conv2d(x, w, b),
        *F.convolution_backward(g, x, w, [6]),
        *F.convolution_double_backward(x, w, b, g, w, x),
        *F.conv2d_per_sample_grad(x, w, g),
        F.convolution_jvp(x, w, x, w, b),
        F.convolution_add_relu(x, w, g, 0.5, b),
    ]


def test_equal_to_float32_rounded_once() -> None:
    x, w, g, b = rand(3, 4, 6, 6), rand(6, 4, 3, 3), rand(3, 6, 4, 4), rand(6)
    wide = [a.astype(np.float32) for a in (x, w, g, b)]
    for value, expected in zip(_results(x, w, g, b), _results(*wide), strict=True):
        assert value.dtype == BF16
        np.testing.assert_array_equal(value, expected.astype(BF16))
    moved = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    y = F.conv2d(moved, w)
    assert moved_axis(y) == 1
    np.testing.assert_array_equal(y, F.conv2d(x, w))
    assert not F.convolution_backward(F.conv2d(x[:0], w), x[:0], w)[1].any()


def test_near_pytorch() -> None:
    x, w, g = rand(2, 3, 8), rand(4, 3, 3), rand(2, 4, 6)
    theirs = [torch.tensor(a.astype(np.float32)).bfloat16() for a in (g, x, w)]
    expected = torch.ops.aten.convolution_backward(*theirs, [4], [1], [0], [1], False, [0], 1, [True] * 3)
    for value, reference in zip(F.convolution_backward(g, x, w), expected, strict=True):
        np.testing.assert_allclose(value.astype(np.float32), reference.float(), rtol=2**-7, atol=2**-5)


def test_mixed_with_another_dtype() -> None:
    with pytest.raises(ArgumentError, match=r"Input type \(bfloat16\) and weight type \(float32\)"):
        F.conv1d(rand(1, 2, 5), rand(3, 2, 3).astype(np.float32))
