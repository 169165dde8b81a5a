"""Weight gradients of depthwise convolutions by windows that overlap in memory, over random geometry."""

from __future__ import annotations

import onnx
import onnxruntime as ort
import pytest
from hypothesis import given

import onnx_convgrad as og
from tests.support.conv_geometry import (
    SETTINGS,
    Geometry,
    axes,
    case,
    check_built,
    check_forced,
    check_refused,
    conv_model,
    geometry,
)

LOWERINGS = ("masked_windows", "placed_windows", "batch_windows")
GEOMETRY = geometry(
    axis=lambda rank, _: axes({1: 12, 2: 8, 3: 5}[rank], {1: 7, 2: 5, 3: 3}[rank], steps=3),
    groups=(2, 3),
    channels=(1, 1),
    batch=(1, 3),
)


def _applies(name: str, g: Geometry, *, batch: bool) -> bool:
    if name == "masked_windows" and (g["features"] > g["groups"] or set(g["strides"]) != {1}):
        return False
    return batch or name == "batch_windows"


@pytest.mark.parametrize("name", LOWERINGS)
@SETTINGS
@given(GEOMETRY)
def test_windows(name: str, g: Geometry) -> None:
    if name == "masked_windows":
        g = {**g, "features": g["groups"], "strides": [1] * g["rank"]}
    check_forced("ConvWeightGrad", name, g)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOWERINGS)
@SETTINGS
@given(GEOMETRY)
def test_an_unknown_batch(name: str, g: Geometry) -> None:
    if _applies(name, g, batch=False):
        check_forced("ConvWeightGrad", name, g, {0})
        return
    with pytest.raises(og.errors.LoweringError, match=r"but (a group has several|strides|the batch size)"):
        og.vjp(conv_model(g, {0}), wrt=["w"], target=og.Target(lowering={"ConvWeightGrad": name}))


@pytest.mark.parametrize("name", LOWERINGS)
def test_refusals(name: str) -> None:
    g = case((2, 2, 5, 5), 4, (3, 3), strides=2, begin=1, groups=2)
    if not _applies(name, g, batch=True):
        check_refused("ConvWeightGrad", name, g, "but (a group has several|strides)")
    check_refused("ConvWeightGrad", name, g, "web provider copies windows that overlap in memory", target="web")


@pytest.mark.parametrize("strides", [[1, 1], [2, 3]])
@pytest.mark.parametrize("name", LOWERINGS)
def test_negative_padding(name: str, strides: list[int]) -> None:
    """The gradients of a transposed convolution are convolutions whose padding may be negative."""
    if name == "masked_windows" and strides != [1, 1]:
        pytest.skip("takes unit strides")
    g = case((2, 3, 4, 5), 3, (3, 2), strides=strides, begin=[0, 1], end=[1, 0], groups=3)
    built = og.vjp(conv_model(g, transposed=True), wrt=["w"], target=og.Target(lowering={"ConvWeightGrad": name}))
    check_built(built, g, transposed=True)


@pytest.mark.parametrize("name", LOWERINGS)
def test_windows_are_not_copied(name: str) -> None:
    """Every convolution but the one that thins x has a kernel as wide as its input, which is what makes it fast."""
    model = conv_model(case((2, 16, 8, 8), 16, (3, 3), begin=1, groups=16))
    backward = og.vjp(model, wrt=["w"], target=og.Target(lowering={"ConvWeightGrad": name}))
    shaped = onnx.shape_inference.infer_shapes(backward)
    known = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in shaped.graph.value_info}
    convs = [n for n in backward.graph.node if n.op_type == "Conv" and len(known[n.input[0]]) == 4]
    assert len(convs) == {"masked_windows": 3, "placed_windows": 3, "batch_windows": 1}[name]
    for conv in convs:
        assert known[conv.input[0]][3] == known[conv.input[1]][3]
        assert not {a.name for a in conv.attribute} & {"pads", "strides", "dilations"}
    assert ort.InferenceSession(backward.SerializeToString(), providers=["CPUExecutionProvider"])
