"""Depthwise convolutions and their gradients as products of bands of rows."""

from __future__ import annotations

from tests.support.conv_geometry import case, equal_test, refusal_test

ALL = ("Conv", "ConvInputGrad", "ConvWeightGrad")

test_equals_pytorch = equal_test(
    (ALL, "bands", case((3, 4, 7, 7), 4, (3, 3), begin=1, groups=4)),
    (ALL, "bands", case((2, 3, 9, 5), 3, (5, 2), strides=2, dilations=2, begin=3, end=1, groups=3)),
    (ALL, "bands", case((2, 2, 4, 3, 5), 2, (2, 3, 3), begin=1, groups=2)),
    (ALL, "bands", case((2, 2, 61), 2, (9,), begin=4, groups=2)),
    (ALL, "bands", case((2, 3, 28, 12), 3, (5, 5), strides=2, begin=2, groups=3)),
)
UNEVEN = case((2, 3, 7, 8), 3, (5, 2), strides=[1, 3], dilations=[2, 1], begin=[2, 0], end=[4, 2], groups=3)
test_weight_gradient = equal_test(
    ("ConvWeightGrad", "bands", case((3, 4, 14, 9), 4, (3, 3), strides=2, begin=1, groups=4)),
    ("ConvWeightGrad", "bands", UNEVEN),
    ("ConvWeightGrad", "bands", case((2, 2, 40), 2, (7,), strides=3, begin=3, groups=2)),
    bound=1e-6,
)
test_refusals = refusal_test(
    ("ConvInputGrad", "bands", case((2, 2, 4, 300), 2, (3, 3), begin=1, groups=2), "rows are too long"),
    ("ConvInputGrad", "bands", case((2, 2, 8, 8), 4, (3, 3), groups=2), "several features"),
)


BOTH = ("Conv", "ConvInputGrad")

test_windows_in_place_equal_pytorch = equal_test(
    (BOTH, "sliding_bands", case((3, 4, 14, 9), 4, (5, 5), begin=2, groups=4)),
    (BOTH, "sliding_bands", case((2, 3, 9, 5), 3, (5, 2), strides=2, dilations=2, begin=3, end=1, groups=3)),
    (BOTH, "sliding_bands", case((2, 2, 61), 2, (9,), begin=4, groups=2)),
    (BOTH, "folded_sliding_bands", case((3, 4, 7, 7), 4, (3, 3), begin=1, groups=4)),
    (BOTH, "folded_sliding_bands", case((2, 3, 28, 12), 3, (5, 5), strides=2, begin=2, groups=3)),
    (BOTH, "folded_sliding_bands", case((2, 2, 4, 3, 5), 2, (2, 3, 3), begin=3, end=0, groups=2)),
)
test_refusals_of_windows_in_place = refusal_test(
    ("ConvInputGrad", "sliding_bands", case((2, 2, 1, 8), 2, (1, 3), groups=2), "one band"),
)
