"""Transposed convolutions of a training step are lowered as data gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import shape_inference

from onnx_convgrad.ir.targets import target_named
from onnx_convgrad.lowering.candidates import Choosing, Policy
from onnx_convgrad.lowering.lower import lower
from onnx_convgrad.runtime import run
from tests.support.conv_geometry import error, model_of

SHAPES = {
    "k4 s2": ([4, 32, 8, 8], [32, 16, 4, 4], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "k3 s2, rows added": (
        [2, 24, 9, 7],
        [24, 16, 3, 3],
        {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]},
    ),
    "uneven": (
        [2, 8, 6, 6],
        [8, 6, 3, 4],
        {"strides": [2, 3], "pads": [1, 0, 0, 2], "output_padding": [0, 1], "group": 2},
    ),
    "no rows cut, two added": ([2, 4, 5], [4, 6, 2], {"strides": [3], "output_padding": [2]}),
    "1x1 to 4x4": ([4, 16, 1, 1], [16, 32, 4, 4], {}),
    "a wave": ([2, 16, 40], [16, 8, 25], {"strides": [4], "pads": [11, 11], "output_padding": [1]}),
    "volumes": ([1, 8, 4, 4, 4], [8, 4, 2, 2, 2], {"strides": [2, 2, 2]}),
    "SAME": ([2, 8, 5, 5], [8, 8, 3, 3], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "stated size": ([2, 8, 5, 5], [8, 8, 3, 3], {"strides": [2, 2], "output_shape": [10, 11]}),
}


def _model(
    x: Sequence[int], w: Sequence[int], attributes: dict, *, bias: bool, unknown: Collection[int] = ()
) -> onnx.ModelProto:
    """A ConvTranspose of opset 21, with the axes `unknown` of x symbolic."""
    shapes = {"x": x, "w": w} | ({"b": [w[1] * attributes.get("group", 1)]} if bias else {})
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    model = model_of("ConvTranspose", arrays, {*unknown}, **attributes)
    model.opset_import[0].version = 21
    model.graph.node[0].name = "up"
    return shape_inference.infer_shapes(model, strict_mode=True)


def _lowered(model: onnx.ModelProto, choosing: Choosing = "auto") -> onnx.ModelProto:
    graph = ir.from_proto(model)
    (choice,) = lower(graph.graph, target_named("cpu"), Policy(choosing, training=True))
    assert (choice.node, choice.op_type) == ("up", "ConvInputGrad")
    return ir.to_proto(graph)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_the_result_is_that_of_the_operator(name: str, bias: bool) -> None:
    x, w, attributes = SHAPES[name]
    model = _model(x, w, attributes, bias=bias)
    rng = np.random.default_rng(0)
    feed = {
        i.name: rng.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim]).astype(np.float32)
        for i in model.graph.input
    }
    want = run(model, feed)["y"]
    lowered = [_lowered(model)]
    if "auto_pad" not in attributes:
        lowered.append(_lowered(_model(x, w, attributes, bias=bias, unknown=[0])))
    for form in lowered:
        assert error(run(form, feed)["y"], want) < 1e-5


def test_another_lowering_is_chosen_where_it_is_faster() -> None:
    """A layer of DCGAN (Radford et al. 2016)."""
    layer = _model([16, 256, 4, 4], [256, 128, 4, 4], SHAPES["k4 s2"][2], bias=True)
    assert "ConvTranspose" not in {n.op_type for n in _lowered(layer).graph.node}


def test_a_constant_weight_and_unknown_images_are_left_to_the_runtime() -> None:
    x, w, attributes = SHAPES["k4 s2"]
    constant = _model(x, w, attributes, bias=False)
    del constant.graph.input[1]
    constant.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(w, np.float32), "w"))
    for model in (constant, _model(x, w, attributes, bias=False, unknown=[2, 3])):
        graph = ir.from_proto(model)
        assert lower(graph.graph, target_named("cpu"), Policy(training=True)) == []
        assert [n.op_type for n in graph.graph] == ["ConvTranspose"]


def test_a_lowering_is_forced_by_operator_and_node_together() -> None:
    """A choice for all data gradients, or for the node alone, does not apply to it."""
    layer = _model([2, 8, 4, 4], [8, 8, 3, 3], {}, bias=False)
    assert [n.op_type for n in _lowered(layer, {"ConvInputGrad:up": "conv_transpose"}).graph.node] == ["ConvTranspose"]
    assert "Col2Im" in {n.op_type for n in _lowered(layer, {"ConvInputGrad:up": "col2im"}).graph.node}
    usual = [n.op_type for n in _lowered(layer).graph.node]
    assert [n.op_type for n in _lowered(layer, {"ConvInputGrad": "phases"}).graph.node] == usual
    assert [n.op_type for n in _lowered(layer, {"up": "phases"}).graph.node] == usual
