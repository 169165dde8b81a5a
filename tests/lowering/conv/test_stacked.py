"""Convolutions of all samples at once."""

from __future__ import annotations

from tests.support.conv_geometry import case, equal_test, refusal_test

test_equals_pytorch = equal_test(
    ("Conv", "stacked_conv", case((3, 4, 6, 5), 6, (3, 2), strides=2, begin=2, end=0, groups=2)),
    ("Conv", "stacked_conv", case((2, 3, 9), 4, (3,), dilations=2, begin=5)),
    ("Conv", "stacked_conv", case((3, 4, 7, 7), 5, (3, 3), begin=1)),
    ("Conv", "folded_gemm", case((3, 4, 5, 6), 6, (1, 1), strides=2, groups=2)),
    ("Conv", "folded_gemm", case((2, 5, 7), 3, (1,))),
    ("Conv", "folded_gemm", case((2, 5, 3, 2, 4), 3, (1, 1, 1), strides=3)),
)
test_refusals = refusal_test(
    ("Conv", "stacked_conv", case((1, 2, 8, 8), 2, (3, 3)), "there is only one sample"),
    ("Conv", "stacked_conv", case((2, 2, 4, 4, 4), 2, (3, 3, 3)), "three axes at most"),
    ("Conv", "stacked_conv", case((2, 2, 4, 4), 2, (1, 1)), "the kernel is 1x1"),
    training=True,
)
