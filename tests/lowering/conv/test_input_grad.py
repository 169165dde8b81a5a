"""Data gradients by ConvTranspose, by the reversed kernel, and by products; padding and constant kernels of all of them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from tests.support.conv_geometry import (
    Geometry,
    case,
    check_forced,
    check_refused,
    conv_model,
    error,
    forced_results,
)


@pytest.mark.parametrize(
    ("name", "g"),
    [
        *(
            (name, g)
            for name in ("conv_transpose", "col2im_gemm")
            for g in (
                case((2, 4, 9, 8), 6, (3, 2), strides=3, begin=[0, 1], end=[2, 0], groups=2),
                case((2, 3, 17), 4, (5,), strides=2, dilations=3, begin=4, end=1),
                case((1, 2, 5, 6, 7), 3, (2, 3, 2), strides=2, begin=1),
            )
        ),
        ("flipped_conv", case((2, 4, 7, 6), 6, (3, 2), begin=[2, 0], end=[0, 1], groups=2)),
        ("flipped_conv", case((2, 3, 17), 4, (5,), dilations=3, begin=4)),
        ("flipped_conv", case((2, 3, 4, 5, 3), 2, (2, 3, 1), dilations=[1, 2, 1], begin=[0, 3, 1])),
    ],
)
def test_equals_pytorch(name: str, g: Geometry) -> None:
    check_forced("ConvInputGrad", name, g)


def test_strides_are_refused() -> None:
    check_refused("ConvInputGrad", "flipped_conv", case((1, 2, 8, 8), 2, (3, 3), strides=2), "are not 1")


@pytest.mark.parametrize("name", ["flipped_conv", "phases", "row_phases", "tiled_conv"])
def test_uneven_padding_is_made_explicit_where_the_provider_needs_it(name: str) -> None:
    g = case((2, 2, 9, 9), 2, (3, 3), strides=2 if name.endswith("phases") else 1, begin=2, end=0, groups=2)
    augmented = og.augment(conv_model(g, bias=True), wrt=["x"], lowering={"ConvInputGrad": name}, target="cuda")
    added = [n for n in augmented.graph.node if n.op_type == "Conv"][1:]
    assert added
    for node in added:
        pads = next(list(a.ints) for a in node.attribute if a.name == "pads")
        assert pads[: len(pads) // 2] == pads[len(pads) // 2 :]
    assert error(*forced_results("ConvInputGrad", name, g, target="cuda")) < 1e-5


def test_constant_kernels_are_reversed_when_the_model_is_loaded() -> None:
    """The reversed kernel is a constant too if no input can change it: then the cost of reversing it is not counted."""
    g = case((8, 96, 56, 56), 96, (7, 7), begin=3, groups=96)
    model = conv_model(g, bias=True)
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    fixed.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((96, 1, 7, 7), np.float32), "w"))
    del fixed.graph.input[1]
    choices = [og.explain(m, wrt=["x"]).choices[0] for m in (model, fixed)]
    assert choices[0].chosen != "flipped_conv"
    assert choices[1].chosen == "flipped_conv"
    seconds = [next(c.seconds for c in choice.candidates if c.name == "flipped_conv") for choice in choices]
    assert seconds[0] > 2 * seconds[1]
