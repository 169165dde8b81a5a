"""Convolutions along rows that hold channels or samples side by side."""

from __future__ import annotations

import pytest

from tests.support.conv_geometry import Geometry, case, check_forced, check_refused

DENSE = case((2, 4, 7, 6), 5, (3, 3), begin=1)
GROUPED = case((3, 6, 7, 6), 9, (3, 3), begin=[1, 0], end=[2, 1], groups=3)
STRIDED = case((3, 4, 9, 8), 5, (3, 3), strides=2, begin=1)


@pytest.mark.parametrize(
    ("name", "g"),
    [
        *(("channel_rows", g) for g in (DENSE, GROUPED, STRIDED, case((2, 3, 40), 2, (7,), strides=3, begin=3))),
        *(("moved_channel_rows", g) for g in (DENSE, GROUPED, case((2, 3, 4, 5, 6), 4, (3, 2, 3), begin=1))),
        *(("folded_channel_rows", g) for g in (DENSE, STRIDED, case((3, 4, 11), 6, (3,), dilations=2, begin=1))),
    ],
)
def test_weight_gradient(name: str, g: Geometry) -> None:
    check_forced("ConvWeightGrad", name, g, bound=1e-6)


@pytest.mark.parametrize("g", [DENSE, GROUPED, case((3, 4, 11), 6, (3,), dilations=2, begin=1, groups=2)])
def test_sample_rows(g: Geometry) -> None:
    check_forced(["Conv", "ConvInputGrad"], "sample_rows", g)


@pytest.mark.parametrize(
    "g",
    [
        STRIDED,
        case((2, 4, 11, 10), 6, (5, 4), strides=3, begin=2, end=0, groups=2),
        case((3, 2, 9), 4, (4,), strides=2),
    ],
)
def test_sample_phases(g: Geometry) -> None:
    check_forced("ConvInputGrad", "sample_phases", g)


@pytest.mark.parametrize(
    ("op_type", "name", "g", "reason"),
    [
        ("ConvWeightGrad", "channel_rows", case((2, 4, 8, 8), 4, (3, 3), groups=4), "a group has one channel"),
        ("ConvWeightGrad", "channel_rows", case((2, 4, 8, 8), 4, (1, 1)), "the kernel is 1x1"),
        ("ConvWeightGrad", "moved_channel_rows", STRIDED, "the stride along the first axis is 2"),
        ("ConvWeightGrad", "moved_channel_rows", case((2, 4, 11), 6, (3,), groups=2), "there is one spatial axis"),
        ("ConvInputGrad", "sample_rows", STRIDED, r"strides \[2, 2\] are not 1"),
    ],
)
def test_refusals(op_type: str, name: str, g: Geometry, reason: str) -> None:
    check_refused(op_type, name, g, reason)
