"""Data gradients by ConvTranspose, by the reversed kernel, and by products; padding and constant kernels of all of them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.pipeline import layer
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


test_products_equal_pytorch = equal_test(
    ("ConvInputGrad", "folded_gemm", case((3, 4, 5, 6), 6, (1, 1), groups=2)),
    ("ConvInputGrad", "folded_gemm", case((2, 5, 7), 3, (1,))),
    ("ConvInputGrad", "folded_gemm", case((2, 5, 3, 2, 4), 3, (1, 1, 1))),
    ("ConvInputGrad", "col2im", case((2, 4, 9, 8), 6, (3, 2), strides=2, dilations=2, begin=2, end=1, groups=2)),
    ("ConvInputGrad", "col2im", case((2, 3, 9), 4, (3,), strides=3, begin=1)),
    ("ConvInputGrad", "col2im", case((2, 3, 12), 4, (3,), strides=2, dilations=2, begin=2, end=1)),
    ("ConvInputGrad", "folded_col2im", case((2, 4, 9, 8), 6, (1, 1), strides=2, groups=2)),
    ("ConvInputGrad", "folded_col2im", case((3, 2, 7, 7), 3, (3, 3), begin=1)),
    ("ConvInputGrad", "folded_col2im", case((2, 4, 12), 4, (3,), dilations=3, begin=1, end=2, groups=2)),
)
test_refusals_of_products = refusal_test(
    ("ConvInputGrad", "folded_gemm", case((2, 2, 8, 8), 2, (3, 3)), "the kernel is not 1x1"),
    ("ConvInputGrad", "folded_gemm", case((1, 2, 8, 8), 2, (1, 1)), "there is only one sample"),
    (
        "ConvInputGrad",
        "col2im",
        case((2, 2, 4, 5, 6), 2, (3, 3, 3)),
        "before 1.28 adds up windows wrongly over three axes",
    ),
    ("ConvInputGrad", "col2im", case((2, 2, 8, 8), 2, (1, 1)), "leaves nothing to add up"),
)


@pytest.mark.parametrize("name", ["col2im", "folded_col2im"])
def test_windows_of_signals_are_added_over_two_axes(name: str) -> None:
    """Before ONNX Runtime 1.28, Col2Im is wrong over one axis and over three."""
    model = layer.conv_model(ConvSpec.layer((2, 4, 9), (6, 4, 3), Window((2,), (1,), (1,), (1,), 1)))
    nodes = og.vjp(model, wrt=["x"], target=og.Target(lowering={"ConvInputGrad": name})).graph
    (adding,) = (node for node in nodes if node.op_type == "Col2Im")
    lengths = {name: len(a.as_ints()) for name, a in adding.attributes.items()}
    assert lengths == {"dilations": 2, "pads": 4, "strides": 2}
