"""A model's proto is made of the one that was verified, and holds the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from onnx_convgrad.ir.serialize import completed, skeleton, whole_proto
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build


def _model() -> onnx.ModelProto:
    """A network with a large and a small weight, and a branch with a weight of its own."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 64] x, bool flag) => (float[N, 32] y) <float[32] b = {1.0}> {
            h = MatMul (x, w)
            s = Add (h, b)
            y = If (flag) <then_branch = t () => (float[N, 32] p) <float[1] c = {2.0}> { p = Mul (s, c) },
                           else_branch = e () => (float[N, 32] q) { q = Relu (s) }>
        }""".replace(" <float[32] b = {1.0}>", "")
    )
    draw = np.random.default_rng(0)
    for name, shape in (("w", (64, 32)), ("b", (32,))):
        model.graph.initializer.append(numpy_helper.from_array(draw.standard_normal(shape).astype(np.float32), name))
    return model


def _sorted(proto: onnx.ModelProto) -> onnx.ModelProto:
    infos = sorted(proto.graph.value_info, key=lambda info: info.name)
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(infos)
    return proto


@pytest.mark.parametrize("inputs", [False, True], ids=["stored", "fed"])
def test_a_completed_skeleton_is_the_whole_model(inputs: bool) -> None:
    model = ir.from_proto(_model())
    if inputs:
        model.graph.inputs.append(model.graph.initializers["w"])
    proto = skeleton(model)
    assert not [tensor for tensor in proto.graph.initializer if tensor.name == "w"]
    model.metadata_props["later"] = "1"
    assert _sorted(completed(proto, model)) == _sorted(whole_proto(model))
    assert _sorted(completed(proto, model)) == _sorted(whole_proto(model)), "a second time"


@pytest.mark.parametrize("trainable", [False, True])
def test_a_built_model_is_what_was_verified(trainable: bool) -> None:
    model = _model()
    del model.graph.node[2:]
    model.graph.output[0].name = "s"
    built = build(model, Options(trainable_inputs=trainable))
    assert built.checked is not None
    whole = whole_proto(built.model)
    assert _sorted(built.proto()) == _sorted(whole)
    assert [tensor.name for tensor in built.proto().graph.initializer] == [t.name for t in whole.graph.initializer]
