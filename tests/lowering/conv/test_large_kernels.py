"""Kernels with many taps: lowerings that would list them are declined before they are built, and others are left."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given

import onnx_convgrad as og
from onnx_convgrad.lowering.conv import patches
from tests.support.conv_geometry import (
    SETTINGS,
    Geometry,
    case,
    check_built,
    check_forced,
    conv_model,
    error,
    forced_results,
    geometry,
)


@pytest.mark.slow
@pytest.mark.parametrize("op_type", ["Conv", "ConvInputGrad", "ConvWeightGrad"])
@SETTINGS
@given(g=geometry(batch=(1, 2)))
def test_the_forms_for_many_taps(op_type: str, g: Geometry) -> None:
    """The few nodes that gather and add the taps of a large kernel serve every geometry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches, "MOST_TAPS", 0)
        name = "col2im_gemm" if op_type == "ConvInputGrad" else "im2col_gemm"
        for shapes in ("static", {0}, *([] if op_type == "Conv" else ["symbolic"])):
            assert error(*forced_results(op_type, name, g, shapes)) < 1e-5


LONG = case((2, 2, 2500), 2, (1200,), strides=2, begin=3, groups=2)


@pytest.mark.parametrize(
    ("op_type", "name"),
    [("ConvInputGrad", "col2im_gemm"), ("ConvWeightGrad", "im2col_gemm"), ("ConvWeightGrad", "conv_swap")],
)
def test_long_kernels(op_type: str, name: str) -> None:
    check_forced(op_type, name, LONG)


@pytest.mark.parametrize(
    "g",
    [case((1, 1, 300, 300), 1, (150, 150)), case((1, 2, 40000), 2, (16384,), groups=2), case((1, 1, 5000), 1, (4097,))],
    ids=["150x150", "16,384 taps", "one more"],
)
def test_the_choice_takes_few_nodes(g: Geometry) -> None:
    built = og.augment(conv_model(g), wrt=["x", "w"])
    assert len(built.graph.node) < 20
    assert built.ByteSize() < 10_000
    if g["size"] == [5000]:
        check_built(built, g)


def test_the_reason_names_the_number_of_taps() -> None:
    with pytest.raises(og.errors.LoweringError, match="the kernel has 22,500 taps, too many to list"):
        og.augment(
            conv_model(case((1, 1, 300, 300), 1, (150, 150))),
            wrt=["w"],
            target=og.Target(lowering={"ConvWeightGrad": "im2col_conv"}),
        )


def test_a_depthwise_axis_of_a_billion_rows_is_not_walked() -> None:
    """The heights of the bands are counted up to the largest whose matrix can be stored."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[1,4,1000000000] x, float[4,1,3] w) => (float[1,4,N] y) { y = Conv <group = 4> (x, w) }"""
    )
    assert {i.name for i in og.augment(model, wrt=["x", "w"]).graph.output} == {"y", "x_grad", "w_grad"}


def test_float64_takes_the_same_forms() -> None:
    """There is no convolution of float64 to fall back on."""
    arrays = {"x": (1, 1, 3000), "w": (1, 1, 1500)}
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Conv", ["x", "w"], ["y"])],
            "g",
            [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.DOUBLE, s) for n, s in arrays.items()],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.DOUBLE, None)],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )
    built = og.augment(model, wrt=["x", "w"])
    assert len(built.graph.node) < 60
