"""Lowerings of the forward convolution over random geometry, and of the convolutions in gradients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import onnx_convgrad as og
from onnx_convgrad.errors import LoweringError
from onnx_convgrad.lowering.table import lowerings
from tests.support.conv_geometry import (
    SETTINGS,
    Geometry,
    case,
    check_built,
    conv_model,
    equal_test,
    error,
    forced_results,
    geometry,
    refusal_test,
)

FORWARD = [name for name in lowerings()["Conv"] if name != "conv"]


@pytest.mark.slow
@SETTINGS
@given(geometry(), st.booleans())
def test_forward_lowerings(g: Geometry, bias: bool) -> None:
    # they serve training, where a batch of unknown size is never empty
    for shapes in ("static", "symbolic") if g["batch"] else ("static",):
        for name in FORWARD:
            try:
                got, want = forced_results("Conv", name, g, shapes, bias=bias)
            except LoweringError:
                continue
            assert error(got, want) < (1e-5 if lowerings()["Conv"][name].exact else 1e-4), (name, shapes)


@pytest.mark.parametrize("name", ["conv", "stacked_conv", "winograd_2", "im2col_gemm"])
def test_the_convolution_in_a_gradient_is_lowered(name: str) -> None:
    """The data gradient of a ConvTranspose is a Conv; the model's own Conv is left unchanged."""
    g = case((2, 2, 5, 6), 3, (4, 4), strides=2, begin=1)
    model = conv_model(g, transposed=True, bias=True)
    built = og.augment(model, wrt=["x", "w", "b"], target=og.Target(lowering={"Conv": name}))
    choices = og.explain(model, wrt=["x"], target=og.Target(lowering={"Conv": name})).choices
    assert ("Conv", name) in {(c.op_type, c.chosen) for c in choices}
    check_built(built, g, 1e-4 if name.startswith("winograd") else 1e-5, transposed=True)
    assert "Conv" not in {c.op_type for c in og.explain(conv_model(g, bias=True), wrt=["x", "w"]).choices}


test_all_samples_at_once_equal_pytorch = equal_test(
    ("Conv", "stacked_conv", case((3, 4, 6, 5), 6, (3, 2), strides=2, begin=2, end=0, groups=2)),
    ("Conv", "stacked_conv", case((2, 3, 9), 4, (3,), dilations=2, begin=5)),
    ("Conv", "stacked_conv", case((3, 4, 7, 7), 5, (3, 3), begin=1)),
    ("Conv", "folded_gemm", case((3, 4, 5, 6), 6, (1, 1), strides=2, groups=2)),
    ("Conv", "folded_gemm", case((2, 5, 7), 3, (1,))),
    ("Conv", "folded_gemm", case((2, 5, 3, 2, 4), 3, (1, 1, 1), strides=3)),
)
test_refusals_of_all_samples_at_once = refusal_test(
    ("Conv", "stacked_conv", case((1, 2, 8, 8), 2, (3, 3)), "there is only one sample"),
    ("Conv", "stacked_conv", case((2, 2, 4, 4, 4), 2, (3, 3, 3)), "three axes at most"),
    ("Conv", "stacked_conv", case((2, 2, 4, 4), 2, (1, 1)), "the kernel is 1x1"),
    training=True,
)
