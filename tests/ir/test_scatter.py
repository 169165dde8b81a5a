"""Sums at repeated positions, in the form that the rules of Gather emit."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_convgrad.testing import Case
from tests.support.operators import gradient


@pytest.mark.parametrize("axis", [0, 1])
def test_repeated_indices_lose_no_sum(axis: int) -> None:
    """ONNX Runtime's CPU provider loses sums in ScatterND with reduction="add", so that is not used."""
    shape = (2, 64) if axis == 0 else (64, 2)
    index = np.random.default_rng(0).integers(0, 2, 50_000)
    seed = np.ones((50_000, 64) if axis == 0 else (64, 50_000), np.float32)
    got = gradient(Case("Gather", [np.ones(shape, np.float32), index], {"axis": axis}), seed)
    counts = np.bincount(index, minlength=2).astype(np.float32)
    np.testing.assert_array_equal(got, np.broadcast_to(counts[:, None] if axis == 0 else counts, shape))


def test_half_precision_is_summed_in_single() -> None:
    case = Case("Gather", [np.ones((3, 2), np.float16), np.zeros(5000, np.int64)], dtype=np.float16)
    got = gradient(case, np.ones((5000, 2), np.float16))
    np.testing.assert_array_equal(got, np.asarray([[5000, 5000], [0, 0], [0, 0]], np.float16))
