"""Files whose BatchNormalization is in training mode already, in all forms, are trained and exported in inference mode."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnx_convgrad as og

FORMS: dict[str, tuple[int, int, dict[str, int]]] = {
    "training mode": (17, 3, {"training_mode": 1}),
    "training mode, one result": (15, 1, {"training_mode": 1}),
    "five results": (9, 5, {}),
    "five results, weights among the inputs": (7, 5, {}),
    "inference mode": (17, 1, {}),
}
"""Opset, number of results, and attributes."""


def network(opset: int, results: int, attributes: dict[str, int], variance: float = 1.0) -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    arrays = {
        "w": generator.standard_normal((4, 2, 3, 3)),
        "scale": np.ones(4),
        "bias": np.zeros(4),
        "mean": np.zeros(4),
        "var": np.full(4, variance),
        "f": generator.standard_normal((4, 3)),
    }
    stored = [numpy_helper.from_array(a.astype(np.float32), name) for name, a in arrays.items()]
    names = ["y", "mean_next", "var_next", "saved_mean", "saved_var"][:results]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], names, name="bn", **attributes),
        helper.make_node("GlobalAveragePool", ["y"], ["p"]),
        helper.make_node("Flatten", ["p"], ["flat"]),
        helper.make_node("MatMul", ["flat", "f"], ["logits"]),
    ]
    inputs = [helper.make_tensor_value_info("x", 1, ["N", 2, 8, 8])]
    inputs += [helper.make_tensor_value_info(t.name, 1, t.dims) for t in stored] if opset < 9 else []
    outputs = [helper.make_tensor_value_info("logits", 1, ["N", 3])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8 if opset > 8 else 3)


def trainer(form: str, **options: Any) -> og.Trainer:
    program = og.build_training(network(*FORMS[form], **options), loss="cross_entropy", optimizer=og.optim.SGD(0.1))
    return og.Trainer(program)


def batch() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {"x": generator.standard_normal((8, 2, 8, 8)).astype(np.float32), "target": np.arange(8) % 3}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_train_alike_and_are_exported_in_inference_mode(form: str, tmp_path: Path) -> None:
    ours, plain = trainer(form), trainer("inference mode")
    losses = [(ours.step(batch())["loss"], plain.step(batch())["loss"]) for _ in range(3)]
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.export(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    (node,) = (n for n in model.graph.node if n.op_type == "BatchNormalization")
    assert len(node.output) == 1
    assert not any(a.name == "training_mode" and a.i for a in node.attribute)
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    np.testing.assert_allclose(stored["mean"], plain.state()["mean"], rtol=1e-4, atol=1e-6)
    assert stored["var"].min() > 1.5


@pytest.mark.parametrize("form", FORMS)
def test_statistics_of_a_new_network_are_named_at_export(form: str, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="running statistics of BatchNormalization 'bn' are 0 and 1, as in a new network"
    ):
        trainer(form).export(tmp_path / "model.onnx")


def test_other_statistics_are_not(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer("inference mode", variance=2.0).export(tmp_path / "model.onnx")
