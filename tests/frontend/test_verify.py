"""Input shapes that do not fit the model are refused."""

from __future__ import annotations

import pytest

import onnx_convgrad as og
from tests.support.one_input import graph_of


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1, 1, 5, 5], r"given shapes: .*Gemm.*mismatch"),
        ([1, 3, 4, 4], r"given shapes: .*takes 1 channels, and 'x' has 3"),
    ],
)
def test_shapes_that_the_model_does_not_take(shape: list[int], message: str) -> None:
    ones = ", ".join("1" * 32)
    model = graph_of(
        "(float[N, C, H, W] x) => (float[N, 2] y) <float[1, 1, 1, 1] k = {2},"
        f" float[16, 2] w = {{{ones}}}> {{ c = Conv (x, k) f = Flatten (c) y = Gemm (f, w) }}"
    )
    og.augment(og.load(model, input_shapes={"x": [3, 1, 4, 4]}))
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.augment(og.load(model, input_shapes={"x": shape}))


@pytest.mark.parametrize(
    ("layer", "shape", "channels"),
    [
        ("Conv <group = 2>", "4, 1, 1, 1", 2),
        ("ConvTranspose", "4, 1, 1, 1", 4),
        ("ConvTranspose <group = 2>", "2, 2, 1, 1", 2),
    ],
)
def test_channels_of_a_convolution(layer: str, shape: str, channels: int) -> None:
    model = graph_of(
        f"(float[N, C, H, W] x) => (float[N, D, P, Q] y) <float[{shape}] k = {{1, 2, 3, 4}}> {{ y = {layer} (x, k) }}"
    )
    og.augment(og.load(model, input_shapes={"x": [1, channels, 2, 2]}))
    with pytest.raises(og.errors.ArgumentError, match=rf"takes {channels} channels, and 'x' has 3"):
        og.augment(og.load(model, input_shapes={"x": [1, 3, 2, 2]}))
