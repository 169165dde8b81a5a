"""Linear models of ai.onnx.ml keep their results and labels, and their coefficients are parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run

SIX: dict[str, Any] = {"coefficients": [0.5, 0.3, -0.2, -0.4, 0.1, 0.7], "intercepts": [0.1, -0.2]}
THREE: dict[str, Any] = {"coefficients": [0.5, 0.3, -0.2], "intercepts": [0.1]}
NUMBERS, TEXTS = {"classlabels_ints": [7, 3]}, {"classlabels_strings": ["cat", "dog"]}
X = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


def network(op: str, outputs: dict[str, int], **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node(op, ["x"], list(outputs), name="model", domain="ai.onnx.ml", **attributes)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])]
    results = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(helper.make_graph([node], "g", inputs, results), opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("labels", [NUMBERS, TEXTS], ids=["numbers", "texts"])
@pytest.mark.parametrize("weights", [SIX, THREE], ids=["two scores", "one score"])
@pytest.mark.parametrize("kind", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
def test_labels_and_scores_are_those_of_the_kernel(labels: dict[str, Any], weights: dict[str, Any], kind: str) -> None:
    outputs = {"label": TensorProto.STRING if labels is TEXTS else TensorProto.INT64, "z": TensorProto.FLOAT}
    model = network("LinearClassifier", outputs, post_transform=kind, **labels, **weights)
    gradients = og.augment(model, wrt="parameters", of="z", cotangents="ones")
    assert "LinearClassifier" not in {node.op_type for node in gradients.graph.node}
    want, got = run(model, {"x": X}), run(gradients, {"x": X})
    assert want["label"].tolist() == got["label"].tolist()
    assert len(set(got["label"].tolist())) == 2
    np.testing.assert_allclose(got["z"], want["z"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "model",
    [
        network("LinearRegressor", {"y": TensorProto.FLOAT}, **THREE),
        network("LinearRegressor", {"y": TensorProto.FLOAT}, targets=2, post_transform="LOGISTIC", **SIX),
        network("LinearClassifier", {"label": TensorProto.INT64, "y": TensorProto.FLOAT}, **SIX, **NUMBERS),
    ],
    ids=["one target", "two targets", "classes"],
)
def test_gradients_of_coefficients_are_numeric_ones(model: onnx.ModelProto) -> None:
    gradients = run(og.augment(model, wrt="parameters", of="y", cotangents="ones"), {"x": X})
    for name in ("coefficients", "intercepts"):
        moved = onnx.ModelProto()
        moved.CopyFrom(model)
        (attribute,) = (a for a in moved.graph.node[0].attribute if a.name == name)
        change = np.random.default_rng(1).standard_normal(len(attribute.floats))
        sums = []
        for step in (1e-2, -1e-2):
            values = np.array(next(a for a in model.graph.node[0].attribute if a.name == name).floats)
            attribute.floats[:] = (values + step * change).tolist()
            sums.append(run(moved, {"x": X})["y"].astype(np.float64).sum())
        found = gradients[f"model.{name}_grad"].reshape(-1) @ change
        np.testing.assert_allclose(found, (sums[0] - sums[1]) / 2e-2, rtol=2e-3)


def test_trees_are_said_to_have_no_derivative() -> None:
    tree = {
        "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_values": [0.0, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "target_treeids": [0, 0],
        "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.0, 2.0], "n_targets": 1,
    }  # fmt: skip
    model = network("TreeEnsembleRegressor", {"y": TensorProto.FLOAT}, **tree)
    with pytest.raises(og.ConvGradError, match="Decision trees are steps, which have no derivative"):
        og.augment(model, wrt="parameters")
    with pytest.raises(og.ConvGradError, match="Decision trees are steps, which have no derivative"):
        og.build_training(model, loss="mse", optimizer="sgd")
