"""Cubic and linear Resize in training graphs are products with the matrices of the operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run


def _model(shape: tuple[int | str, ...], scales: list[float], **attributes: Any) -> onnx.ModelProto:
    """y = w times x, resized."""
    node = helper.make_node("Resize", ["x", "", "scales"], ["r"], "resize", **attributes)
    nodes = [node, helper.make_node("Mul", ["r", "w"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", None)))
    values = [numpy_helper.from_array(np.float32(1.5), "w"), numpy_helper.from_array(np.float32(scales), "scales")]
    graph = helper.make_graph(nodes, "resize", [x], [y], values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


CASES: list[tuple[list[float], dict[str, Any]]] = [
    ([1, 1, 2, 2], {"mode": "cubic"}),
    ([1, 1, 2.5, 1], {"mode": "cubic", "coordinate_transformation_mode": "align_corners", "cubic_coeff_a": -0.5}),
    ([1, 1, 0.5, 3], {"mode": "cubic", "coordinate_transformation_mode": "asymmetric", "exclude_outside": 1}),
    ([1, 1, 2, 2], {"mode": "linear"}),
    ([1, 1, 1.7, 3], {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}),
]


@pytest.mark.parametrize(("scales", "attributes"), CASES, ids=str)
@pytest.mark.parametrize("batch", [2, "N"])
def test_values_and_gradients_stay(scales: list[float], attributes: dict[str, Any], batch: int | str) -> None:
    """They equal those of inference mode, which keeps the node."""
    model = _model((batch, 16, 24, 30), scales, **attributes)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 16, 24, 30)).astype(np.float32)
    want = run(model, {"x": x})["y"]
    given = {"x": x, "y_grad": rng.standard_normal(want.shape).astype(np.float32)}
    trained, kept = (og.augment(model, wrt=["x", "w"], of=["y"], training=training) for training in (True, False))
    large = [node for node in trained.graph.node if node.op_type == "Resize" and node.input[0] == "x"]
    assert not large
    got, base = run(trained, given), run(kept, given)
    np.testing.assert_allclose(got["y"], want, rtol=1e-5, atol=1e-5)
    for name in ("x_grad", "w_grad"):
        np.testing.assert_allclose(got[name], base[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_modes_with_fast_kernels_stay(mode: str) -> None:
    """Nearest elements, and lines of many points."""
    made = og.augment(_model((1, 1, 100, 100), [1, 1, 2, 2], mode=mode), wrt=["x", "w"], training=True)
    assert [node for node in made.graph.node if node.op_type == "Resize" and node.input[0] == "x"]


@pytest.mark.parametrize(
    ("shape", "scales", "attributes"),
    [
        ((2, 16, 4, 20, 22), [1, 1, 2, 2, 3], {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}),
        ((2, 16, 4, 20, 22), [1, 1, 3, 1, 2], {"mode": "nearest"}),
        ((2, 16, 700), [1, 1, 2], {"mode": "linear"}),
        ((2, 16, 700), [1, 1, 2.5], {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ],
    ids=str,
)
def test_volumes_and_signals(shape: tuple[int, ...], scales: list[float], attributes: dict[str, Any]) -> None:
    nearest = {"nearest_mode": "floor"} if "coordinate_transformation_mode" in attributes else {}
    model = _model(shape, scales, **attributes, **(nearest if attributes["mode"] == "nearest" else {}))
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    want = run(model, {"x": x})["y"]
    given = {"x": x, "y_grad": rng.standard_normal(want.shape).astype(np.float32)}
    trained, kept = (og.augment(model, wrt=["x", "w"], of=["y"], training=training) for training in (True, False))
    assert not [node for node in trained.graph.node if node.op_type == "Resize" and node.input[0] == "x"]
    got, base = run(trained, given), run(kept, given)
    np.testing.assert_allclose(got["y"], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["x_grad"], base["x_grad"], rtol=1e-4, atol=1e-4)


MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("shape", [(2, 3, 130), (1, 2, 128, 5), (1, 2, 6, 131), (1, 1, 3, 129, 4)], ids=str)
@pytest.mark.parametrize("target", ["cpu", "cuda", "web"])
def test_long_axes_need_no_matrix(shape: tuple[int, ...], factor: int, target: str) -> None:
    """Linear interpolation by powers of two, against PyTorch in float64."""
    scales = [1.0, 1.0, *[float(factor)] * (len(shape) - 2)]
    model = og.augment(_model(shape, scales, mode="linear"), wrt=["x"], of=["y"], target=target)
    largest = max(np.prod(t.dims) for t in model.graph.initializer)
    assert largest < 128 * 128
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal(shape), requires_grad=True)
    y = torch.nn.functional.interpolate(x, scale_factor=factor, mode=MODES[len(shape)])
    seed = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    (y * 1.5).backward(torch.tensor(seed, dtype=torch.float64))
    assert x.grad is not None
    given = {"x": x.detach().numpy().astype(np.float32), "y_grad": seed}
    got = run(model, {i.name: given[i.name] for i in model.graph.input})["x_grad"]
    np.testing.assert_allclose(got, x.grad.numpy(), rtol=1e-5, atol=1e-5)
