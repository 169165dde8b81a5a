"""Depthwise convolutions by bands of rows that are read in place."""

from __future__ import annotations

from tests.support.conv_geometry import case, equal_test, refusal_test

BOTH = ("Conv", "ConvInputGrad")

test_equals_pytorch = equal_test(
    (BOTH, "sliding_bands", case((3, 4, 14, 9), 4, (5, 5), begin=2, groups=4)),
    (BOTH, "sliding_bands", case((2, 3, 9, 5), 3, (5, 2), strides=2, dilations=2, begin=3, end=1, groups=3)),
    (BOTH, "sliding_bands", case((2, 2, 61), 2, (9,), begin=4, groups=2)),
    (BOTH, "folded_sliding_bands", case((3, 4, 7, 7), 4, (3, 3), begin=1, groups=4)),
    (BOTH, "folded_sliding_bands", case((2, 3, 28, 12), 3, (5, 5), strides=2, begin=2, groups=3)),
    (BOTH, "folded_sliding_bands", case((2, 2, 4, 3, 5), 2, (2, 3, 3), begin=3, end=0, groups=2)),
)
test_refusals = refusal_test(("ConvInputGrad", "sliding_bands", case((2, 2, 1, 8), 2, (1, 3), groups=2), "one band"))
