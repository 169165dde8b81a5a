"""Convolutions of all samples at once."""

from __future__ import annotations

import pytest

from tests.support.conv_geometry import Geometry, case, check_forced, check_refused


@pytest.mark.parametrize(
    ("name", "g"),
    [
        ("stacked_conv", case((3, 4, 6, 5), 6, (3, 2), strides=2, begin=2, end=0, groups=2)),
        ("stacked_conv", case((2, 3, 9), 4, (3,), dilations=2, begin=5)),
        ("stacked_conv", case((3, 4, 7, 7), 5, (3, 3), begin=1)),
        ("folded_gemm", case((3, 4, 5, 6), 6, (1, 1), strides=2, groups=2)),
        ("folded_gemm", case((2, 5, 7), 3, (1,))),
        ("folded_gemm", case((2, 5, 3, 2, 4), 3, (1, 1, 1), strides=3)),
    ],
)
def test_equals_pytorch(name: str, g: Geometry) -> None:
    check_forced("Conv", name, g)


@pytest.mark.parametrize(
    ("g", "reason"),
    [
        (case((1, 2, 8, 8), 2, (3, 3)), "there is only one sample"),
        (case((2, 2, 4, 4, 4), 2, (3, 3, 3)), "three axes at most"),
        (case((2, 2, 4, 4), 2, (1, 1)), "the kernel is 1x1"),
    ],
)
def test_refusals(g: Geometry, reason: str) -> None:
    check_refused("Conv", "stacked_conv", g, reason, training=True)
