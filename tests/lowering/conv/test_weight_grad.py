"""Weight gradients by products with all patches, and negative padding and empty batches for all that multiply matrices."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_convgrad as og
from tests.support.conv_geometry import (
    Geometry,
    arrays_of,
    attributes_of,
    case,
    check_forced,
    check_refused,
    conv_model,
    cotangent,
    error,
    model_of,
    oracle,
    run_inputs,
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


@pytest.mark.parametrize(("name", "g"), [(name, g) for name, cases in CASES.items() for g in cases])
@pytest.mark.parametrize("unknown", [set(), {0}], ids=["static", "batch"])
def test_equals_pytorch(name: str, g: Geometry, unknown: set[int]) -> None:
    if name == "pointwise_gemm" and unknown:
        pytest.skip("needs the batch size")
    check_forced("ConvWeightGrad", name, g, unknown, bound=1e-6)


@pytest.mark.parametrize(
    ("name", "g"),
    [
        ("pointwise", POINTS),
        ("patches", case((2, 3, 9, 11), 4, (2, 3), strides=[2, 3], begin=[1, 0], end=[0, 2])),
        *((name, SAME) for name in ("im2col_conv", "im2col_gemm", *SHIFTS)),
    ],
)
def test_an_empty_batch_gives_zeros(name: str, g: Geometry) -> None:
    check_forced("ConvWeightGrad", name, {**g, "batch": 0}, {0})


@pytest.mark.parametrize("name", ["im2col_gemm", "taps"])
def test_float64(name: str) -> None:
    arrays = {k: v.astype(np.float64) for k, v in arrays_of(SAME, bias=False).items()}
    seed = cotangent(oracle("Conv", arrays, SAME)["y"]).astype(np.float64)
    model = og.vjp(model_of("Conv", arrays, **attributes_of(SAME)), wrt="w", lowering={"ConvWeightGrad": name})
    got = run_inputs(model, {**arrays, "y_grad": seed})["w_grad"]
    assert error(got, oracle("Conv", arrays, SAME, seed)["w_grad"]) < 1e-12


@pytest.mark.parametrize("name", ["im2col_conv", "im2col_gemm", *SHIFTS, "winograd_2", "winograd_4", "winograd_6"])
def test_negative_padding(name: str) -> None:
    """The weight gradient of a ConvTranspose padded by more than its kernel is that of a convolution with negative pads."""
    g = case((2, 3, 12, 11), 4, (3, 3), begin=[4, 0], end=[3, 5])
    arrays = arrays_of(g, transposed=True, bias=False)
    model = model_of("ConvTranspose", arrays, pads=[4, 0, 3, 5])
    seed = cotangent(oracle("ConvTranspose", arrays, g)["y"])
    backward = og.vjp(model, wrt=["x", "w"], lowering={"ConvWeightGrad": name})
    got, want = run_inputs(backward, {**arrays, "y_grad": seed}), oracle("ConvTranspose", arrays, g, seed)
    assert error(got["w_grad"], want["w_grad"]) < (1e-4 if name.startswith("winograd") else 1e-6)
    assert error(got["x_grad"], want["x_grad"]) < 1e-5


@pytest.mark.parametrize(
    ("name", "g", "reason"),
    [
        ("pointwise", SAME, "the kernel is not 1x1"),
        ("pointwise", case((1, 2, 3, 3), 2, (1, 1), begin=1), "the input is padded"),
        ("pointwise_gemm", case((1, 2, 3, 3), 2, (1, 1)), "there is only one sample"),
    ],
)
def test_refusals(name: str, g: Geometry, reason: str) -> None:
    check_refused("ConvWeightGrad", name, g, reason)


def test_cuda_has_no_fast_convolution_with_a_large_kernel() -> None:
    """The output gradient would be the kernel."""
    g = case((2, 4, 20, 20), 4, (3, 3))
    with pytest.raises(og.LoweringError, match="no fast convolution with a kernel as large as the output gradient"):
        og.vjp(conv_model(g), wrt="w", lowering={"ConvWeightGrad": "conv_swap"}, target="cuda")
