"""Data gradients of strided convolutions, with the phases of rows as features."""

from __future__ import annotations

import pytest

from tests.support.conv_geometry import Geometry, case, check_forced, check_refused


@pytest.mark.parametrize(
    "g",
    [
        case((2, 4, 11, 10), 6, (5, 4), strides=3, begin=2, end=0, groups=2),
        case((2, 3, 9, 8), 4, (3, 3), strides=2, begin=1),
        case((2, 6, 5, 6, 7), 4, (2, 3, 2), strides=2, begin=1, groups=2),
        case((1, 2, 9, 7, 4), 3, (3, 4, 3), strides=[1, 2, 1], begin=1),
    ],
)
def test_equals_pytorch(g: Geometry) -> None:
    check_forced("ConvInputGrad", "row_phases", g)


def test_a_signal_is_refused() -> None:
    g = case((1, 2, 20), 2, (5,), strides=2)
    check_refused("ConvInputGrad", "row_phases", g, "every stride but that along the last axis is 1")
