"""Data gradients by ConvTranspose, by the reversed kernel, and by products; padding and constant kernels of all of them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from tests.support.conv_geometry import (
    case,
    check_even_padding,
    conv_model,
    equal_test,
    error,
    forced_results,
    refusal_test,
)

CASES = {
    ("conv_transpose", "col2im_gemm"): [
        case((2, 4, 9, 8), 6, (3, 2), strides=3, begin=[0, 1], end=[2, 0], groups=2),
        case((2, 3, 17), 4, (5,), strides=2, dilations=3, begin=4, end=1),
        case((1, 2, 5, 6, 7), 3, (2, 3, 2), strides=2, begin=1),
    ],
    ("flipped_conv",): [
        case((2, 4, 7, 6), 6, (3, 2), begin=[2, 0], end=[0, 1], groups=2),
        case((2, 3, 17), 4, (5,), dilations=3, begin=4),
        case((2, 3, 4, 5, 3), 2, (2, 3, 1), dilations=[1, 2, 1], begin=[0, 3, 1]),
    ],
}

test_equals_pytorch = equal_test(
    *(("ConvInputGrad", name, g) for names, cases in CASES.items() for name in names for g in cases)
)
STRIDED = case((1, 2, 8, 8), 2, (3, 3), strides=2)
test_refusals = refusal_test(("ConvInputGrad", "flipped_conv", STRIDED, "are not 1"))


@pytest.mark.parametrize("name", ["flipped_conv", "phases", "row_phases", "tiled_conv"])
def test_uneven_padding_is_made_explicit_where_the_provider_needs_it(name: str) -> None:
    g = case((2, 2, 9, 9), 2, (3, 3), strides=2 if name.endswith("phases") else 1, begin=2, end=0, groups=2)
    augmented = og.augment(
        conv_model(g, bias=True), wrt=["x"], target=og.Target("cuda", lowering={"ConvInputGrad": name})
    )
    assert sum(n.op_type == "Conv" for n in augmented.graph.node) > 1
    del augmented.graph.node[0]  # the model's own
    check_even_padding(augmented)
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
