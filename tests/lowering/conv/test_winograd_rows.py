"""Winograd's minimal filtering along the first axis alone, over random geometry, against float64 PyTorch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnx_convgrad as og
from onnx_convgrad.lowering.conv.winograd import SIZES
from tests.support.conv_geometry import (
    SETTINGS,
    Axis,
    Geometry,
    axes,
    axis_fits,
    case,
    conv_model,
    equal_test,
    error,
    forced_results,
    geometry,
    refusal_test,
)


def _axis(_: int, position: int) -> st.SearchStrategy[Axis]:
    if position:
        return axes(6, 3, steps=2, pads=3)
    first = st.tuples(st.integers(1, 20), st.integers(2, 6), st.integers(0, 6), st.integers(0, 6))
    return first.map(lambda a: (a[0], a[1], 1, 1, a[2], a[3], 0)).filter(axis_fits)


@pytest.mark.slow
@settings(SETTINGS, max_examples=100)
@given(
    geometry(axis=_axis, ranks=(2, 3), channels=(1, 3), features=(1, 3), batch=(1, 3)),
    st.sampled_from(SIZES),
    st.sampled_from(["Conv", "ConvInputGrad"]),
    st.sampled_from([set(), {0}]),
)
def test_random_geometry(g: Geometry, most: int, op: str, unknown: set[int]) -> None:
    try:
        got, want = forced_results(op, f"winograd_rows_{most}", g, unknown or "static")
    except og.errors.LoweringError:
        return
    assert error(got, want) < 1e-4


DENSE = case((2, 4, 14, 9), 6, (3, 3), begin=1)


APPLIES = [
    DENSE,
    case((2, 12, 14, 9), 18, (3, 3), begin=1, groups=3),
    case((2, 4, 14, 9), 6, (3, 1), end=[2, 0]),
    case((2, 4, 14, 9), 6, (2, 4), begin=1),
    case((2, 4, 13, 5, 6), 6, (3, 2, 3), dilations=[1, 2, 1], begin=[1, 0, 1], end=[2, 1, 0]),
]
test_applies = equal_test(
    *((("Conv", "ConvInputGrad"), f"winograd_rows_{most}", g) for most in SIZES for g in APPLIES),
    shapes=[{0}],
    bound=1e-4,
)
test_the_conv_takes_a_stride_along_the_other_axes = equal_test(
    ("Conv", "winograd_rows_4", {**DENSE, "strides": [1, 2]}), bound=1e-4
)

REFUSALS: list[tuple[str, Geometry, str]] = [
    ("Conv", {"kernel": [1, 3]}, "the kernel has one row"),
    ("Conv", {"kernel": [9, 3], "begin": [4, 1], "end": [4, 1]}, "a kernel of 9 rows needs more than 8 points"),
    ("Conv", {"strides": [2, 1]}, "the stride and dilation of the rows are 2 and 1"),
    ("ConvInputGrad", {"strides": [1, 2]}, r"strides \[1, 2\] are not 1"),
    ("ConvInputGrad", {"begin": [3, 1]}, "the rows are padded by -1 and 1, which cuts some off"),
    ("Conv", {"size": [4, 9]}, "smaller tiles do the same"),
]
test_refusals = refusal_test(
    *((op, "winograd_rows_6", {**DENSE, **change}, reason) for op, change, reason in REFUSALS), training=True
)


def test_exact_leaves_it_out() -> None:
    choices = og.explain(
        conv_model({**DENSE, "size": [64, 64]}, bias=True), wrt=["x"], training=True, target=og.Target(lowering="exact")
    ).choices
    refused = {c.name: c.reason for choice in choices for c in choice.candidates if c.name.startswith("winograd_rows")}
    assert refused
    assert all("times as much as a direct sum; lowering='exact' allows 1" in reason for reason in refused.values())
