"""Depthwise convolutions that compute tiles of outputs as channels."""

from __future__ import annotations

from tests.support.conv_geometry import case, equal_test, refusal_test

BOTH = ("Conv", "ConvInputGrad")

test_equals_pytorch = equal_test(
    (BOTH, "tiled_conv", case((2, 3, 31, 6), 3, (3, 5), begin=1, end=2, groups=3)),
    ("ConvInputGrad", "tiled_conv", case((2, 2, 13, 11), 4, (5, 3), strides=2, begin=2, groups=2)),
    ("ConvInputGrad", "tiled_conv", case((1, 2, 5, 6, 7), 2, (3, 3, 2), strides=2, begin=1, groups=2)),
    ("ConvInputGrad", "tiled_conv", case((1, 2, 23), 2, (4,), dilations=2, begin=5, end=0, groups=2)),
    ("Conv", "tiled_conv", case((2, 2, 23, 11), 4, (5, 3), strides=2, begin=2, groups=2)),
    ("Conv", "tiled_conv", case((1, 2, 6, 6, 7), 2, (3, 3, 2), dilations=2, begin=2, groups=2)),
    (BOTH, "tiled_sample_rows", case((2, 3, 31, 6), 3, (3, 5), begin=1, end=2, groups=3)),
    (BOTH, "tiled_sample_rows", case((3, 2, 7, 11), 2, (5, 3), dilations=2, begin=4, groups=2)),
    (BOTH, "tiled_sample_rows", case((2, 2, 5, 6, 7), 2, (3, 3, 2), begin=1, end=0, groups=2)),
)
STRIDED = case((2, 2, 8, 8), 2, (3, 3), strides=2, groups=2)
test_refusals = refusal_test(
    ("ConvInputGrad", "tiled_conv", case((2, 2, 8, 8), 2, (3, 3)), "one channel per group"),
    ("ConvInputGrad", "tiled_conv", case((2, 2, 1, 8), 2, (1, 3), groups=2), "one row"),
    ("ConvInputGrad", "tiled_sample_rows", case((2, 2, 8), 2, (3,), groups=2), "there is one spatial axis"),
    (
        "ConvInputGrad",
        "tiled_sample_rows",
        case((2, 2, 8, 8), 2, (3, 3), strides=2, groups=2),
        "stride along the last axis is 2",
    ),
)
