"""Convolutions that read mostly padding."""

from __future__ import annotations

import pytest

from tests.support.conv_geometry import Geometry, case, check_forced, check_refused


@pytest.mark.parametrize(
    "g",
    [
        case((3, 4, 7, 6), 5, (3, 3), dilations=6, begin=6),
        case((2, 3, 5, 4), 4, (3, 5), dilations=7, begin=20, end=14),
        case((2, 3, 40), 4, (4,), dilations=15, begin=45, end=0),
        case((2, 3, 3, 1, 2), 2, (3, 3, 3), dilations=2, begin=2),
    ],
)
def test_equals_pytorch(g: Geometry) -> None:
    check_forced(["Conv", "ConvInputGrad"], "boxes", g)


def test_forward_with_strides() -> None:
    check_forced("Conv", "boxes", case((2, 3, 9, 10), 4, (3, 3), strides=[2, 3], dilations=8, begin=8))


def test_little_padding_is_refused() -> None:
    g = case((2, 2, 8, 8), 2, (3, 3), dilations=3, begin=3)
    check_refused("ConvInputGrad", "boxes", g, "only 44% of what the taps read is padding")
