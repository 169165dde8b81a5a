"""Data gradients of strided convolutions by phase."""

from __future__ import annotations

import pytest

from tests.support.conv_geometry import Geometry, case, check_forced, check_refused


@pytest.mark.parametrize(
    "g",
    [
        case((2, 3, 9, 8), 4, (3, 3), strides=2, begin=1),
        case((2, 4, 11, 10), 6, (5, 4), strides=3, begin=2, end=0, groups=2),
        case((2, 3, 17), 4, (7,), strides=2, dilations=3, begin=4, end=1),
        case((1, 2, 5, 6, 7), 3, (2, 3, 2), strides=2, begin=1),
        case((1, 2, 3), 2, (9,), strides=2, begin=8, end=8),
    ],
)
def test_equals_pytorch(g: Geometry) -> None:
    check_forced("ConvInputGrad", "phases", g)


@pytest.mark.parametrize("shapes", ["symbolic", "absent"])
@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("name", ["phases", "conv_transpose"])
def test_unknown_sizes(name: str, shapes: str, size: int) -> None:
    """The number of rows that no window reaches is known only at run time."""
    check_forced("ConvInputGrad", name, case((2, 3, size, size + 1), 4, (3, 3), strides=2, begin=1), shapes)


@pytest.mark.parametrize(
    ("g", "reason"),
    [
        (case((1, 2, 8, 8), 2, (3, 3), begin=1), "every stride is 1"),
        (case((1, 2, 8, 8), 2, (1, 1), strides=2), "some rows belong to no window"),
        (case((1, 2, 20, 20), 2, (5, 5), strides=5), "there are 25 phases"),
    ],
)
def test_refusals(g: Geometry, reason: str) -> None:
    check_refused("ConvInputGrad", "phases", g, reason)
