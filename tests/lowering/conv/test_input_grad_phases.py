"""Data gradients of strided convolutions by phase."""

from __future__ import annotations

from tests.support.conv_geometry import case, equal_test, refusal_test

test_equals_pytorch = equal_test(
    ("ConvInputGrad", "phases", case((2, 3, 9, 8), 4, (3, 3), strides=2, begin=1)),
    ("ConvInputGrad", "phases", case((2, 4, 11, 10), 6, (5, 4), strides=3, begin=2, end=0, groups=2)),
    ("ConvInputGrad", "phases", case((2, 3, 17), 4, (7,), strides=2, dilations=3, begin=4, end=1)),
    ("ConvInputGrad", "phases", case((1, 2, 5, 6, 7), 3, (2, 3, 2), strides=2, begin=1)),
    ("ConvInputGrad", "phases", case((1, 2, 3), 2, (9,), strides=2, begin=8, end=8)),
)
# the number of rows that no window reaches is known only at run time
test_unknown_sizes = equal_test(
    *(
        ("ConvInputGrad", name, case((2, 3, size, size + 1), 4, (3, 3), strides=2, begin=1))
        for name in ("phases", "conv_transpose")
        for size in (8, 9)
    ),
    shapes=["symbolic", "absent"],
)
test_refusals = refusal_test(
    ("ConvInputGrad", "phases", case((1, 2, 8, 8), 2, (3, 3), begin=1), "every stride is 1"),
    ("ConvInputGrad", "phases", case((1, 2, 8, 8), 2, (1, 1), strides=2), "some rows belong to no window"),
    ("ConvInputGrad", "phases", case((1, 2, 20, 20), 2, (5, 5), strides=5), "there are 25 phases"),
)


test_rows_in_order_equal_pytorch = equal_test(
    ("ConvInputGrad", "row_phases", case((2, 4, 11, 10), 6, (5, 4), strides=3, begin=2, end=0, groups=2)),
    ("ConvInputGrad", "row_phases", case((2, 3, 9, 8), 4, (3, 3), strides=2, begin=1)),
    ("ConvInputGrad", "row_phases", case((2, 6, 5, 6, 7), 4, (2, 3, 2), strides=2, begin=1, groups=2)),
    ("ConvInputGrad", "row_phases", case((1, 2, 9, 7, 4), 3, (3, 4, 3), strides=[1, 2, 1], begin=1)),
)
SIGNAL = case((1, 2, 20), 2, (5,), strides=2)
test_refusals_of_rows_in_order = refusal_test(
    ("ConvInputGrad", "row_phases", SIGNAL, "every stride but that along the last axis is 1")
)
