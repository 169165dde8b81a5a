"""Depthwise convolutions and their gradients as products of bands of rows."""

from __future__ import annotations

import pytest

from tests.support.conv_geometry import Geometry, case, check_forced, check_refused


@pytest.mark.parametrize(
    "g",
    [
        case((3, 4, 7, 7), 4, (3, 3), begin=1, groups=4),
        case((2, 3, 9, 5), 3, (5, 2), strides=2, dilations=2, begin=3, end=1, groups=3),
        case((2, 2, 4, 3, 5), 2, (2, 3, 3), begin=1, groups=2),
        case((2, 2, 61), 2, (9,), begin=4, groups=2),
        case((2, 3, 28, 12), 3, (5, 5), strides=2, begin=2, groups=3),
    ],
)
def test_equals_pytorch(g: Geometry) -> None:
    check_forced(["Conv", "ConvInputGrad", "ConvWeightGrad"], "bands", g)


@pytest.mark.parametrize(
    "g",
    [
        case((3, 4, 14, 9), 4, (3, 3), strides=2, begin=1, groups=4),
        case((2, 3, 7, 8), 3, (5, 2), strides=[1, 3], dilations=[2, 1], begin=[2, 0], end=[4, 2], groups=3),
        case((2, 2, 40), 2, (7,), strides=3, begin=3, groups=2),
    ],
)
def test_weight_gradient(g: Geometry) -> None:
    check_forced("ConvWeightGrad", "bands", g, bound=1e-6)


@pytest.mark.parametrize(
    ("g", "reason"),
    [
        (case((2, 2, 4, 300), 2, (3, 3), begin=1, groups=2), "rows are too long"),
        (case((2, 2, 8, 8), 4, (3, 3), groups=2), "several features"),
    ],
)
def test_refusals(g: Geometry, reason: str) -> None:
    check_refused("ConvInputGrad", "bands", g, reason)
