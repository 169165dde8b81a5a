"""Convolutions that read mostly padding."""

from __future__ import annotations

from tests.support.conv_geometry import case, equal_test, refusal_test

BOTH = ("Conv", "ConvInputGrad")

test_equals_pytorch = equal_test(
    (BOTH, "boxes", case((3, 4, 7, 6), 5, (3, 3), dilations=6, begin=6)),
    (BOTH, "boxes", case((2, 3, 5, 4), 4, (3, 5), dilations=7, begin=20, end=14)),
    (BOTH, "boxes", case((2, 3, 40), 4, (4,), dilations=15, begin=45, end=0)),
    (BOTH, "boxes", case((2, 3, 3, 1, 2), 2, (3, 3, 3), dilations=2, begin=2)),
    ("Conv", "boxes", case((2, 3, 9, 10), 4, (3, 3), strides=[2, 3], dilations=8, begin=8)),
)
LITTLE = case((2, 2, 8, 8), 2, (3, 3), dilations=3, begin=3)
test_refusals = refusal_test(("ConvInputGrad", "boxes", LITTLE, "only 44% of what the taps read is padding"))
