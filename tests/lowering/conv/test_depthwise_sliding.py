"""Depthwise convolutions by bands of rows that are read in place."""

from __future__ import annotations

import pytest

from tests.support.conv_geometry import Geometry, case, check_forced, check_refused


@pytest.mark.parametrize(
    ("name", "g"),
    [
        ("sliding_bands", case((3, 4, 14, 9), 4, (5, 5), begin=2, groups=4)),
        ("sliding_bands", case((2, 3, 9, 5), 3, (5, 2), strides=2, dilations=2, begin=3, end=1, groups=3)),
        ("sliding_bands", case((2, 2, 61), 2, (9,), begin=4, groups=2)),
        ("folded_sliding_bands", case((3, 4, 7, 7), 4, (3, 3), begin=1, groups=4)),
        ("folded_sliding_bands", case((2, 3, 28, 12), 3, (5, 5), strides=2, begin=2, groups=3)),
        ("folded_sliding_bands", case((2, 2, 4, 3, 5), 2, (2, 3, 3), begin=3, end=0, groups=2)),
    ],
)
def test_equals_pytorch(name: str, g: Geometry) -> None:
    check_forced(["Conv", "ConvInputGrad"], name, g)


def test_one_band_is_refused() -> None:
    check_refused("ConvInputGrad", "sliding_bands", case((2, 2, 1, 8), 2, (1, 3), groups=2), "one band")
