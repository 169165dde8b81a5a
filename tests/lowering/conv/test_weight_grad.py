"""Weight gradients by products with all patches, and negative padding and empty batches for all that multiply matrices."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_convgrad as og
from tests.support.conv_geometry import (
    arrays_of,
    attributes_of,
    case,
    check_built,
    check_refused,
    conv_model,
    equal_test,
    model_of,
    refusal_test,
)

SAME = case((2, 4, 7, 6), 5, (3, 3), begin=1)
PATCHES = [
    SAME,
    case((2, 6, 7, 6), 9, (3, 3), begin=[1, 0], end=[2, 1], groups=3),
    case((2, 3, 6, 9), 4, (3, 2), dilations=[4, 2], begin=[4, 0], end=[4, 3]),
    case((2, 3, 9, 11), 4, (5, 4), strides=[2, 3], begin=[2, 1], end=[1, 2]),
    case((2, 4, 11), 6, (3,), dilations=2, begin=1, end=2, groups=2),
    case((2, 3, 4, 5, 6), 4, (3, 2, 3), strides=[1, 2, 1], begin=[1, 0, 1], end=1),
    case((2, 3, 5, 5), 300, (3, 3), begin=1),
    case((1, 3, 5, 5), 4, (3, 3)),
]
POINTS = case((3, 4, 5, 6), 6, (1, 1), groups=2)
STEPS = case((3, 4, 8, 7), 6, (1, 1), strides=[2, 3], groups=2)
CASES = {
    "pointwise": [POINTS, STEPS, case((2, 3, 7), 4, (1,), strides=2)],
    "pointwise_gemm": [POINTS, STEPS, case((2, 3, 2, 3, 4), 4, (1, 1, 1))],
    "conv_swap": PATCHES,
    "im2col_conv": PATCHES,
    "im2col_gemm": PATCHES,
}
SHIFTS = ["row_shift", "split_shift", "moved_channel_rows", "taps"]


EACH = [("ConvWeightGrad", name, g) for name, cases in CASES.items() for g in cases]

test_equals_pytorch = equal_test(*EACH, bound=1e-6)
test_an_unknown_batch = equal_test(*(c for c in EACH if c[1] != "pointwise_gemm"), shapes=[{0}], bound=1e-6)


@pytest.mark.parametrize("name", ["im2col_gemm", "taps"])
def test_float64(name: str) -> None:
    arrays = {k: v.astype(np.float64) for k, v in arrays_of(SAME, bias=False).items()}
    model = og.vjp(
        model_of("Conv", arrays, **attributes_of(SAME)), wrt="w", target=og.Target(lowering={"ConvWeightGrad": name})
    )
    check_built(model, SAME, 1e-12, arrays=arrays)


@pytest.mark.parametrize("name", ["im2col_conv", "im2col_gemm", *SHIFTS, "winograd_2", "winograd_4", "winograd_6"])
def test_negative_padding(name: str) -> None:
    """The weight gradient of a ConvTranspose padded by more than its kernel is that of a convolution with negative pads."""
    g = case((2, 3, 12, 11), 4, (3, 3), begin=[4, 0], end=[3, 5])
    winograd = name.startswith("winograd")
    model = conv_model(g, transposed=True)
    built = og.vjp(model, wrt=["w"] if winograd else ["x", "w"], target=og.Target(lowering={"ConvWeightGrad": name}))
    check_built(built, g, 1e-4 if winograd else 1e-6, transposed=True)


test_refusals = refusal_test(
    ("ConvWeightGrad", "pointwise", SAME, "the kernel is not 1x1"),
    ("ConvWeightGrad", "pointwise", case((1, 2, 3, 3), 2, (1, 1), begin=1), "the input is padded"),
    ("ConvWeightGrad", "pointwise_gemm", case((1, 2, 3, 3), 2, (1, 1)), "there is only one sample"),
)


def test_cuda_has_no_fast_convolution_with_a_large_kernel() -> None:
    """The output gradient would be the kernel."""
    reason = "no fast convolution with a kernel as large as the output gradient"
    check_refused("ConvWeightGrad", "conv_swap", case((2, 4, 20, 20), 4, (3, 3)), reason, target="cuda")
