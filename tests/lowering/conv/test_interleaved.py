"""Convolutions along rows that hold channels or samples side by side."""

from __future__ import annotations

from tests.support.conv_geometry import case, equal_test, refusal_test

DENSE = case((2, 4, 7, 6), 5, (3, 3), begin=1)
GROUPED = case((3, 6, 7, 6), 9, (3, 3), begin=[1, 0], end=[2, 1], groups=3)
STRIDED = case((3, 4, 9, 8), 5, (3, 3), strides=2, begin=1)
CHANNELS = {
    "channel_rows": [DENSE, GROUPED, STRIDED, case((2, 3, 40), 2, (7,), strides=3, begin=3)],
    "moved_channel_rows": [DENSE, GROUPED, case((2, 3, 4, 5, 6), 4, (3, 2, 3), begin=1)],
    "folded_channel_rows": [DENSE, STRIDED, case((3, 4, 11), 6, (3,), dilations=2, begin=1)],
}

test_weight_gradient = equal_test(
    *(("ConvWeightGrad", name, g) for name, cases in CHANNELS.items() for g in cases), bound=1e-6
)
test_equals_pytorch = equal_test(
    (("Conv", "ConvInputGrad"), "sample_rows", DENSE),
    (("Conv", "ConvInputGrad"), "sample_rows", GROUPED),
    (("Conv", "ConvInputGrad"), "sample_rows", case((3, 4, 11), 6, (3,), dilations=2, begin=1, groups=2)),
    ("ConvInputGrad", "sample_phases", STRIDED),
    ("ConvInputGrad", "sample_phases", case((2, 4, 11, 10), 6, (5, 4), strides=3, begin=2, end=0, groups=2)),
    ("ConvInputGrad", "sample_phases", case((3, 2, 9), 4, (4,), strides=2)),
)
test_refusals = refusal_test(
    ("ConvWeightGrad", "channel_rows", case((2, 4, 8, 8), 4, (3, 3), groups=4), "a group has one channel"),
    ("ConvWeightGrad", "channel_rows", case((2, 4, 8, 8), 4, (1, 1)), "the kernel is 1x1"),
    ("ConvWeightGrad", "moved_channel_rows", STRIDED, "the stride along the first axis is 2"),
    ("ConvWeightGrad", "moved_channel_rows", case((2, 4, 11), 6, (3,), groups=2), "there is one spatial axis"),
    ("ConvInputGrad", "sample_rows", STRIDED, r"strides \[2, 2\] are not 1"),
)
