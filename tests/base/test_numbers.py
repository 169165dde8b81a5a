"""Checks of numbers: bounds, types, and what the errors say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_convgrad.base.numbers import factors, positive, share, whole
from onnx_convgrad.errors import ArgumentError


@pytest.mark.parametrize("number", [0, 1, 0.5, np.float32(2), np.int64(3)])
def test_positive_numbers_pass(number: Any) -> None:
    positive(number, "lr")


@pytest.mark.parametrize(
    ("number", "zero", "message"),
    [
        (-1, True, "lr must be at least 0, not -1"),
        (0, False, "lr must be above 0, not 0"),
        (float("nan"), True, "lr must be at least 0, not nan"),
        (float("inf"), True, "lr must be at least 0, not inf"),
        ("1", True, "lr must be a number, not '1'"),
        (None, True, "lr must be a number, not None"),
        (1j, True, "lr must be a number, not 1j"),
    ],
)
def test_others_are_refused(number: Any, zero: bool, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        positive(number, "lr", zero=zero)


def test_shares_are_between_0_and_1() -> None:
    for number in (0, 0.5, 1):
        share(number, "ratio")
    share(0.99, "ratio", one=False)
    with pytest.raises(ArgumentError, match=r"ratio must be between 0 and 1, not 1\.5"):
        share(1.5, "ratio")
    with pytest.raises(ArgumentError, match="ratio must be at least 0 and below 1, not 1"):
        share(1, "ratio", one=False)


@pytest.mark.parametrize("number", [3, np.int32(3), np.uint8(3), np.array(3)])
def test_whole_numbers_of_any_type(number: Any) -> None:
    count = whole(number, "epochs")
    assert count == 3
    assert type(count) is int


@pytest.mark.parametrize(
    ("number", "least", "message"),
    [
        (3.0, 1, "epochs must be a whole number, not 3.0"),
        ("3", 1, "epochs must be a whole number, not '3'"),
        (0, 1, "epochs must be at least 1, not 0"),
        (-1, 0, "epochs must be at least 0, not -1"),
    ],
)
def test_other_counts_are_refused(number: Any, least: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        whole(number, "epochs", least)


def test_factors_are_finite_float64() -> None:
    array = factors([1, np.float32(0.5)], "scale")
    assert array.dtype == np.float64
    np.testing.assert_array_equal(array, [1, 0.5])
    for wrong in ("a", [1, float("nan")], [float("inf")], [[1], [2, 3]]):
        with pytest.raises(ArgumentError, match="scale must be finite numbers, not "):
            factors(wrong, "scale")
