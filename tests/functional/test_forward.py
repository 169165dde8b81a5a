"""The forward functions have the signatures and the values of `torch.nn.functional`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onnx_convgrad.functional as F
from onnx_convgrad.errors import ArgumentError


@pytest.mark.parametrize(("rank", "dtype"), [(1, "float64"), (2, "float32"), (2, "complex128"), (3, "float32")])
def test_conv(rank: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype(dtype) for s in ((2, 4, *[7] * rank), (6, 2, *[3] * rank), (6,)))
    theirs = getattr(torch.nn.functional, f"conv{rank}d")
    for arguments in ((), (2, 1, 1, 2), (1, "same", 2, 2), (1, "valid", 1, 2)):
        weight = w if len(arguments) == 4 else np.concatenate([w, w], axis=1)
        expected = theirs(*map(torch.tensor, (x, weight, b)), *arguments).numpy()
        found = getattr(F, f"conv{rank}d")(x, weight, b, *arguments)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4 if dtype == "float32" else 1e-12)
        np.testing.assert_array_equal(getattr(F, f"conv{rank}d")(x[0], weight, b, *arguments).shape, expected.shape[1:])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_conv_transpose(rank: int) -> None:
    """By position too: `output_padding` and `groups` come before `dilation`."""
    rng = np.random.default_rng(1)
    x, w, b = (rng.standard_normal(s) for s in ((2, 4, *[5] * rank), (4, 3, *[3] * rank), (6,)))
    theirs = getattr(torch.nn.functional, f"conv_transpose{rank}d")
    expected = theirs(*map(torch.tensor, (x, w, b)), 2, 1, 1, 2, 1).numpy()
    np.testing.assert_allclose(getattr(F, f"conv_transpose{rank}d")(x, w, b, 2, 1, 1, 2, 1), expected, atol=1e-12)
    options: dict[str, Any] = {"stride": 3, "dilation": 2, "output_padding": 2}
    expected = theirs(torch.tensor(x), torch.tensor(w), **options).numpy()
    np.testing.assert_allclose(getattr(F, f"conv_transpose{rank}d")(x, w, **options), expected, atol=1e-12)


def test_the_rank_is_that_of_the_name() -> None:
    x, w = np.ones((1, 2, 5)), np.ones((3, 2, 3))
    with pytest.raises(ArgumentError, match="Expected 4-dimensional weight, but got 3-dimensional weight"):
        F.conv2d(x, w)
    with pytest.raises(ArgumentError, match=r"conv1d\(\) got an unexpected keyword argument 'output_padding'"):
        F.conv1d(x, w, output_padding=1)
