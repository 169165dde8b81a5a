"""Malformed nodes are refused, sparse weights become dense, and an exporter's ones and zeros are no parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.errors import ModelError
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from tests.support.families import export

WEIGHT = np.random.default_rng(0).standard_normal((3, 3, 3, 3)).astype(np.float32)


def one_node(op_type: str, inputs: str = "x w", **attributes: Any) -> onnx.ModelProto:
    """A model of one node, whose other operands are weights."""
    names = inputs.split()
    node = helper.make_node(op_type, names, ["y"], name="here", **attributes)
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 6, 6])]
    weights = [numpy_helper.from_array(WEIGHT, name) for name in names if name != "x"]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", infos, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


MALFORMED = [
    (one_node("Conv", "x"), "it has 1 input, and must have 2 to 3"),
    (one_node("Conv", "x w b c"), "it has 4 inputs"),
    (one_node("Relu", "x w"), "it has 2 inputs, and must have 1"),
    (one_node("Conv", auto_pad="SAME"), "its auto_pad is 'SAME', and must be one of NOTSET, SAME_UPPER"),
    (one_node("Conv", auto_pad="VALID", pads=[0, 0, 0, 0]), "both auto_pad=VALID and pads"),
    (one_node("Conv", strides=[1, 1, 1]), r"strides are \[1, 1, 1\], but 2 spatial axes take 2"),
    (one_node("ConvTranspose", strides=[0, 1]), r"strides are \[0, 1\], and must not be below 1"),
    (one_node("Conv", pads=[-1, 0, 0, 0]), "must not be below 0"),
    (one_node("Conv", kernel_shape=[2, 2]), r"kernel_shape is \[2, 2\], but its weight has the kernel 3x3"),
    (one_node("Conv", strides=1), "strides is of type INT, and must be INTS"),
    (one_node("Conv", stride=[1, 1]), "an attribute 'stride', which Conv does not have"),
    (one_node("AveragePool", "x"), "its attribute kernel_shape is missing"),
]


@pytest.mark.parametrize(("model", "reason"), MALFORMED, ids=[reason for _, reason in MALFORMED])
def test_a_malformed_node_is_refused(model: onnx.ModelProto, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"'here' \(\w+, opset 17\): .*{reason}"):
        og.augment(model, wrt="inputs")


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("as_node", [True, False])
def test_sparse_weights_become_dense(tmp_path: Path, *, linear: bool, as_node: bool) -> None:
    model = one_node("Conv")
    del model.graph.initializer[:]
    places = np.array([3, 40], np.int64) if linear else np.array([[0, 0, 1, 0], [1, 1, 1, 1]], np.int64)
    values = numpy_helper.from_array(np.array([2.0, -1.0], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(places, "w_indices"), [3, 3, 3, 3])
    if as_node:
        model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    else:
        model.graph.sparse_initializer.append(sparse)
    onnx.save(model, tmp_path / "sparse.onnx")
    before = model.SerializeToString()
    for given in (model, tmp_path / "sparse.onnx"):
        made = og.augment(given, wrt="all")
        x = np.random.default_rng(1).standard_normal((1, 3, 6, 6)).astype(np.float32)
        g = np.ones((1, 3, 4, 4), np.float32)
        y, dx, dw = _session(made).run(["y", "x_grad", "w_grad"], {"x": x, "y_grad": g})
        np.testing.assert_array_equal(y, _session(model).run(None, {"x": x})[0])
        assert dw.shape == (3, 3, 3, 3)
        np.testing.assert_allclose(np.vdot(dx, x), np.vdot(y, g), rtol=1e-5)
    assert model.SerializeToString() == before


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


NORMALIZATIONS = {
    "instance": lambda affine: torch.nn.InstanceNorm2d(3, affine=affine),
    "batch": lambda affine: torch.nn.BatchNorm2d(3, affine=affine),
    "layer": lambda affine: torch.nn.LayerNorm(4, elementwise_affine=affine),
}


@pytest.mark.parametrize("name", NORMALIZATIONS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dynamo", [True, False])
def test_ones_and_zeros_of_an_exporter_are_no_parameters(name: str, *, affine: bool, dynamo: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), NORMALIZATIONS[name](affine))
    model = export(net, torch.ones(2, 2, 6, 6), dynamo=dynamo, training=not dynamo, fold=name != "batch")
    found = build(model, Options()).gradients
    assert list(found) == ["0.weight", "0.bias", *(["1.weight", "1.bias"] if affine else [])]
