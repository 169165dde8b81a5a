"""Parts of parameters: their gradients are slices of the whole gradient, and training changes nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.pipeline import option_text
from onnx_convgrad.programs.footprint import footprint
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.quantized import LABELS, X, depthwise


def gradients(wrt: object) -> dict[str, np.ndarray]:
    return run(og.augment(depthwise(), wrt=wrt, cotangents="ones"), {"x": X})


def test_gradients_of_parts_are_slices_of_the_whole() -> None:
    """Of a convolution, a depthwise one, a pointwise one from the end, their biases, and a linear layer."""
    whole = gradients("parameters")
    wrt = {"c1.weight": slice(3), "c2.*": slice(2, 6), "c3.weight": slice(-4, None), "fc.*": slice(None)}
    parts = gradients(wrt)
    expected = {
        "c1.weight[0:3]": whole["c1.weight_grad"][:3],
        "c2.weight[2:6]": whole["c2.weight_grad"][2:6],
        "c2.bias[2:6]": whole["c2.bias_grad"][2:6],
        "c3.weight[12:16]": whole["c3.weight_grad"][12:],
        "fc.weight": whole["fc.weight_grad"],
        "fc.bias": whole["fc.bias_grad"],
    }
    assert set(parts) == {"y", *(f"{name}_grad" for name in expected)}
    for name, want in expected.items():
        np.testing.assert_allclose(parts[f"{name}_grad"], want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_other_channels_have_no_gradient_to_compute() -> None:
    """No node computes the gradient of all eight channels."""
    graph = og.augment(
        og.load(depthwise(), input_shapes={"x": [32, 1, 8, 8]}), wrt={"c1.weight": slice(3)}, cotangents="ones"
    ).graph
    shapes = [
        [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.value_info if "/c1/Conv/grad" in v.name
    ]
    assert not [shape for shape in shapes if shape[:1] == [8]]


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def test_training_changes_the_chosen_channels_alone(tmp_path: Path) -> None:
    wrt = {"c1.weight": slice(3), "fc.*": slice(5)}
    optimizer = og.optim.Adam(1e-2)
    trainer = og.Trainer(og.build_training(depthwise(), loss="cross_entropy", optimizer=optimizer, wrt=wrt))
    losses = [float(trainer.step({"x": X, "target": LABELS})["loss"]) for _ in range(5)]
    assert losses[-1] < losses[0]
    trainer.export(tmp_path / "model.onnx")
    exported = onnx.load(tmp_path / "model.onnx")
    before, after = weights(depthwise()), weights(exported)
    changed = {
        name: np.flatnonzero((before[name] != after[name]).reshape(len(before[name]), -1).any(1)).tolist()
        for name in before
    }
    statistics = {name for name in before if "running" in name}
    assert {name: rows for name, rows in changed.items() if rows and name not in statistics} == {
        "c1.weight": [0, 1, 2], "fc.weight": [0, 1, 2, 3, 4], "fc.bias": [0, 1, 2, 3, 4],
    }  # fmt: skip
    assert [n.op_type for n in exported.graph.node] == [n.op_type for n in depthwise().graph.node]


def test_the_state_of_the_optimizer_has_the_size_of_the_part() -> None:
    def program(wrt: object) -> og.TrainingProgram:
        return og.build_training(depthwise(), loss="cross_entropy", optimizer=og.optim.Adam(), wrt=wrt)

    whole, part = program("parameters"), program({"c3.weight": slice(4)})
    assert [s.shape for s in part.manifest.state if s.of] == [(4, 8, 1, 1)] * 2
    saved = footprint(part).saved
    trained = [int(np.prod(p.static_shape())) for p in whole.manifest.parameters]
    assert saved == 3 * 4 * (sum(trained) - 4 * 8)  # gradient and two moments of each number, float32
    assert footprint(whole).saved == 0


@pytest.mark.parametrize("node", ["MatMul (x, w)", 'Einsum <equation = "nk,ko->no"> (x, w)'])
def test_a_linear_layer_has_its_channels_last(node: str) -> None:
    x, w = (np.random.default_rng(0).normal(size=s).astype("f") for s in ((5, 3), (3, 4)))
    model = graph_of(f"(float[5,3] x) => (float[5,4] y) {{ y = {node} }}", w=w)
    grad = run(og.augment(model, wrt={"w": slice(1, 3)}), {"x": x, "y_grad": np.ones((5, 4), "f")})["w[1:3]_grad"]
    np.testing.assert_allclose(grad, x.T @ np.ones((5, 2), "f"), rtol=1e-6)


@pytest.mark.parametrize(
    ("wrt", "reason"),
    [
        ({"c1.weight": 3}, "not a range of output channels"),
        ({"c1.weight": slice(0, 8, 2)}, "not a range of output channels"),
        ({"c1.weight": slice(9, 12)}, "which has 8: none is left"),
        ({"x": slice(0, 1)}, "not stored in the model"),
        ({"c9.weight": slice(0, 1)}, "Unknown value in wrt"),
    ],
)
def test_wrong_parts_are_refused(wrt: object, reason: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=reason):
        og.augment(depthwise(), wrt=wrt)


def test_ranges_on_the_command_line() -> None:
    assert option_text.wrt(["layer3.*=0:16,fc.*", "a=-2:"]) == {
        "layer3.*": slice(0, 16), "fc.*": slice(None), "a": slice(-2, None),
    }  # fmt: skip
    assert option_text.wrt(["a,b"]) == ["a", "b"]
