"""Data gradients by products and Col2Im."""

from __future__ import annotations

import pytest

import onnx_convgrad as og
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.pipeline.layer import conv_model
from tests.support.conv_geometry import case, equal_test, refusal_test

test_equals_pytorch = equal_test(
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
test_refusals = refusal_test(
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
    model = conv_model(ConvSpec.layer((2, 4, 9), (6, 4, 3), Window((2,), (1,), (1,), (1,), 1)))
    nodes = og.vjp(model, wrt=["x"], target=og.Target(lowering={"ConvInputGrad": name})).graph
    (adding,) = (node for node in nodes if node.op_type == "Col2Im")
    lengths = {name: len(a.as_ints()) for name, a in adding.attributes.items()}
    assert lengths == {"dilations": 2, "pads": 4, "strides": 2}
