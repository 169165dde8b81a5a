"""Weight gradients that shift dY, or multiply tap by tap."""

from __future__ import annotations

from tests.support.conv_geometry import case, equal_test, refusal_test

SAME = case((2, 4, 7, 6), 5, (3, 3), begin=1)
GROUPED = case((2, 6, 7, 6), 9, (3, 3), begin=[1, 0], end=[2, 1], groups=3)
DILATED = case((2, 3, 6, 9), 4, (3, 2), dilations=[4, 2], begin=[4, 0], end=[4, 3])
STRIDED = case((3, 4, 9, 8), 5, (3, 3), strides=[1, 2], begin=[1, 0], end=[2, 1])
BOTH_STRIDED = case((2, 3, 9, 11), 4, (5, 4), strides=[2, 3], begin=[2, 1], end=[1, 2])
OUTSIDE = case((1, 3, 2, 3), 4, (3, 3), dilations=[2, 1], begin=[3, 1])
SIGNAL = case((2, 4, 11), 6, (3,), dilations=2, begin=1, end=2, groups=2)
VOLUME = case((2, 3, 4, 5, 6), 4, (3, 2, 3), strides=[1, 2, 1], begin=[1, 0, 1], end=1)
TILES = case((2, 3, 9, 11), 4, (2, 3), strides=[2, 3], begin=[1, 0], end=[0, 2])
WIDE = case((2, 3, 5, 5), 300, (3, 3), begin=1)
ONE = case((1, 3, 5, 5), 4, (3, 3))

CASES = {
    "row_shift": [SAME, GROUPED, DILATED, STRIDED, OUTSIDE, SIGNAL, VOLUME, WIDE, ONE],
    "split_shift": [SAME, GROUPED, DILATED, STRIDED, OUTSIDE, SIGNAL, VOLUME, WIDE, ONE],
    "merged_shift": [SAME, DILATED, STRIDED, WIDE],
    "moved_channel_rows": [SAME, GROUPED, DILATED, STRIDED, VOLUME, WIDE, ONE],
    "taps": [SAME, DILATED, STRIDED, BOTH_STRIDED, OUTSIDE, TILES, VOLUME, ONE],
    "patches": [TILES, case((2, 3, 8), 4, (4,), strides=4), case((2, 3, 4, 6, 2), 4, (2, 3, 2), strides=[2, 3, 2])],
}

test_equals_pytorch = equal_test(
    *(("ConvWeightGrad", name, g) for name, cases in CASES.items() for g in cases), shapes=[set(), {0}], bound=1e-6
)
test_refusals = refusal_test(
    ("ConvWeightGrad", "row_shift", case((1, 2, 3, 5), 2, (1, 3)), "the kernel has one row"),
    ("ConvWeightGrad", "row_shift", BOTH_STRIDED, "the stride along the first axis is 2"),
    ("ConvWeightGrad", "split_shift", BOTH_STRIDED, "the stride along the first axis is 2"),
    ("ConvWeightGrad", "merged_shift", BOTH_STRIDED, "the stride along the first axis is 2"),
    ("ConvWeightGrad", "merged_shift", VOLUME, "there are not two spatial axes"),
    ("ConvWeightGrad", "merged_shift", ONE, "there is only one sample"),
    ("ConvWeightGrad", "taps", GROUPED, "there are 3 groups"),
    ("ConvWeightGrad", "taps", case((1, 1, 9, 9), 1, (9, 8)), "the kernel has 72 taps"),
    ("ConvWeightGrad", "patches", SAME, "the windows overlap or leave gaps"),
)
