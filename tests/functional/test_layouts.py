"""Results are in the memory format of the operands, by PyTorch's rule."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import onnx_convgrad.functional as F
from onnx_convgrad.functional.plans import moved_axis


def last(array: np.ndarray, axis: int = 1) -> np.ndarray:
    """The same array with `axis` innermost in memory."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, axis, -1)), -1, axis)


def rand(*shape: int, dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(len(shape))
    parts = rng.standard_normal(shape), rng.standard_normal(shape)
    return (parts[0] + 1j * parts[1] if dtype.startswith("complex") else parts[0]).astype(dtype)


@pytest.mark.parametrize(("x_last", "w_last", "g_last"), list(product([False, True], repeat=3)))
def test_the_rule_is_that_of_pytorch(x_last: bool, w_last: bool, g_last: bool) -> None:
    x, w, g = rand(2, 4, 7, 6), rand(6, 4, 3, 3), rand(2, 6, 5, 4)
    x, w, g = (last(a) if moved else a for a, moved in ((x, x_last), (w, w_last), (g, g_last)))
    y = F.convolution(x, w)
    expected = torch.convolution(torch.from_numpy(x), torch.from_numpy(w), None, [1], [0], [1], False, [0], 1)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert tuple(s // 4 for s in y.strides) == expected.stride()
    theirs = torch.ops.aten.convolution_backward(
        *map(torch.from_numpy, (g, x, w)), [6], [1], [0], [1], False, [0], 1, [True] * 3
    )
    for value, reference in zip(F.convolution_backward(g, x, w), theirs, strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-4)
        assert tuple(s // 4 for s in value.strides) == reference.stride()


QUICK = [
    (1, "float64", False, False),
    (2, "float32", True, False),
    (2, "complex64", True, True),
    (3, "float16", False, True),
]
EVERY = product([1, 2, 3], ["float16", "float32", "float64", "complex64"], [False, True], [False, True])


@pytest.mark.parametrize(
    ("rank", "dtype", "batched", "transposed"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in EVERY],
)
def test_values(rank: int, dtype: str, batched: bool, transposed: bool) -> None:
    """Every function gives what it gives for arrays in C order, with its channels last."""
    axis = int(batched)
    x = rand(2, 4, *[5] * rank, dtype=dtype)[slice(None) if batched else 0]
    w = rand(4, 3, *[2] * rank, dtype=dtype)
    w = w if transposed else np.ascontiguousarray(w.swapaxes(0, 1))
    y = F.convolution(x, w, transposed=transposed)
    moved = last(x, axis), last(w)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == "float16" else {"rtol": 1e-4, "atol": 1e-4}
    out = F.convolution(*moved, transposed=transposed)
    assert moved_axis(out) == axis
    np.testing.assert_allclose(out, y, **tolerance)
    for plain, fast in (
        (F.convolution_backward(y, x, w, transposed=transposed),
         F.convolution_backward(last(y, axis), *moved, transposed=transposed)),
        (F.convolution_double_backward(x, w, None, y, w, x, transposed=transposed),
         F.convolution_double_backward(*moved, None, last(y, axis), *moved[::-1], transposed=transposed)),
    ):  # fmt: skip
        for value, expected in zip(fast, plain, strict=True):
            np.testing.assert_allclose(
                value, expected, **{**tolerance, "atol": 0.5} if dtype == "float16" else tolerance
            )
            assert value.ndim == 1 or moved_axis(value) == (1 if value.shape == w.shape else axis)
    pushed = F.convolution_jvp(*moved, *moved, transposed=transposed)
    np.testing.assert_allclose(pushed, F.convolution_jvp(x, w, x, w, transposed=transposed), **tolerance)
    kind = f"conv{'_transpose' * transposed}{rank}d"
    plain, fast = (getattr(F, f"{kind}_per_sample_grad")(*a) for a in ((x, w, y), (*moved, last(y, axis))))
    np.testing.assert_allclose(fast[0], plain[0], **{**tolerance, "atol": 0.5} if dtype == "float16" else tolerance)
    assert moved_axis(fast[0]) == 1 + axis
    dx = getattr(F, f"{kind}_input")(x.shape, w, last(y, axis))
    np.testing.assert_allclose(dx, getattr(F, f"{kind}_input")(x.shape, w, y), **tolerance)
    assert moved_axis(dx) == axis


def test_rectified() -> None:
    x, w, z = rand(2, 4, 6, 6), rand(4, 4, 3, 3), rand(2, 4, 6, 6)
    y = F.convolution_add_relu(last(x), w, z, padding=1)
    np.testing.assert_allclose(y, F.convolution_add_relu(x, w, last(z), padding=1), rtol=1e-5, atol=1e-5)
    assert moved_axis(y) == 1
    gradients = F.convolution_add_relu_backward(z, y, last(x), w, padding=1)
    assert [moved_axis(value) for value in gradients] == [1, 1, 1, None]


def test_which_arrays_have_their_channels_last() -> None:
    """Only one axis is moved; C order where both are true; no broadcast or reversed arrays."""
    x = rand(2, 3, 4, 5)
    assert [moved_axis(last(x, axis)) for axis in range(4)] == [0, 1, 2, None]
    assert moved_axis(last(x[:, :1])) is None
    assert moved_axis(last(x[..., :1, :1])) is None
    assert moved_axis(np.broadcast_to(np.float32(1), x.shape)) is None
    assert moved_axis(last(x)[::-1]) is None
    assert moved_axis(last(x)[..., ::2]) is None
    assert moved_axis(x[:, :, :0]) is None
