"""Data gradients of strided convolutions, with the phases of rows as features."""

from __future__ import annotations

from tests.support.conv_geometry import case, equal_test, refusal_test

test_equals_pytorch = equal_test(
    ("ConvInputGrad", "row_phases", case((2, 4, 11, 10), 6, (5, 4), strides=3, begin=2, end=0, groups=2)),
    ("ConvInputGrad", "row_phases", case((2, 3, 9, 8), 4, (3, 3), strides=2, begin=1)),
    ("ConvInputGrad", "row_phases", case((2, 6, 5, 6, 7), 4, (2, 3, 2), strides=2, begin=1, groups=2)),
    ("ConvInputGrad", "row_phases", case((1, 2, 9, 7, 4), 3, (3, 4, 3), strides=[1, 2, 1], begin=1)),
)
SIGNAL = case((1, 2, 20), 2, (5,), strides=2)
test_refusals = refusal_test(("ConvInputGrad", "row_phases", SIGNAL, "every stride but that along the last axis is 1"))
