"""Instance and group normalization written out for training: where it applies, and accuracy against autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import dims, graph_of

SIZES = {1: (3, 8, 30), 2: (3, 8, 7, 5), 3: (2, 8, 3, 4, 5)}
"""Batch, channels, points; by the number of spatial axes."""

GROUPS = {"instance": 8, "plain": 8, "group": 4, "exported": 2, "led": 2, "one": 1}
"""Form -> groups of channels."""


def _vector(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.uniform(0.5, 2, size).astype(np.float32)


def _model(form: str, shape: Sequence[Any], *, more: str = "", last: str = "z") -> onnx.ModelProto:
    """A normalization of x by one of the forms, and a Tanh of its result `z` or of what `more` makes of it."""
    rng = np.random.default_rng(0)
    channels, rank = 8, len(shape) - 2
    groups = GROUPS[form]
    stored = {"scale": _vector(rng, channels), "B": _vector(rng, channels)}
    if form == "plain":
        stored = {"scale": np.ones(channels, np.float32), "B": np.zeros(channels, np.float32)}
    if form in ("instance", "plain"):
        nodes = "[norm] z = InstanceNormalization <epsilon = 0.001> (x, scale, B)"
    elif form in ("group", "one"):
        nodes = f"[norm] z = GroupNormalization <num_groups = {groups}, epsilon = 0.001> (x, scale, B)"
    else:
        stored = {k: v.reshape(*[1] * (form == "led"), channels, *[1] * rank) for k, v in stored.items()}
        stored |= {"ones": np.ones(groups, np.float32), "zeros": np.zeros(groups, np.float32)}
        stored |= {"grouped": np.array([0, groups, -1]), "whole": np.array([0, *shape[1:]])}
        nodes = f"""xg = Reshape (x, grouped) [norm] ng = InstanceNormalization <epsilon = 0.001> (xg, ones, zeros)
            n = Reshape (ng, whole) s = Mul ({"n, scale" if form == "exported" else "scale, n"}) z = Add (s, B)"""
    return graph_of(f"(float[{dims(shape)}] x) => (y) {{ {nodes} {more} y = Tanh ({last}) }}", opset=21, **stored)


def _expected(form: str, model: onnx.ModelProto, x: np.ndarray, g: np.ndarray) -> dict[str, np.ndarray]:
    """By float64 autograd."""
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    arrays = {"x": x, "scale": stored["scale"], "B": stored["B"]}
    leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in arrays.items()}
    flat = {k: leaves[k].reshape(-1) for k in ("scale", "B")}
    y = torch.nn.functional.group_norm(leaves["x"], GROUPS[form], flat["scale"], flat["B"], 1e-3).tanh()
    y.backward(torch.tensor(g, dtype=torch.float64))
    found = {"y": y.detach().numpy()}
    return found | {f"{k}_grad": leaf.grad.numpy() for k, leaf in leaves.items() if leaf.grad is not None}


def _normalizations(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node if n.op_type.endswith("Normalization")]


@pytest.mark.parametrize("form", GROUPS)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("batch", ["static", "symbolic"])
@pytest.mark.parametrize("offset", [0, 100])
def test_equals_autograd(form: str, rank: int, batch: str, offset: float) -> None:
    n, *sizes = SIZES[rank]
    model = _model(form, [n if batch == "static" else "n", *sizes])
    augmented = og.augment(model, wrt=["x"] if form == "plain" else ["x", "scale", "B"], training=True)
    assert not _normalizations(augmented)
    rng = np.random.default_rng(1)
    x = (offset + rng.normal(size=(n, *sizes))).astype(np.float32)
    g = rng.normal(size=x.shape).astype(np.float32)
    got = run(augmented, {"x": x, "y_grad": g})
    want = _expected(form, model, x, g)
    assert set(got) == set(want) - ({"scale_grad", "B_grad"} if form == "plain" else set())
    for name, array in got.items():
        limit = 2e-5 if offset else 1e-6  # float32 has 100 to 4e-6
        assert np.linalg.norm(array - want[name].reshape(array.shape)) <= limit * np.linalg.norm(want[name]), name


def test_the_scale_joins_the_deviation() -> None:
    both = [
        og.augment(_model(form, [3, 8, 7, 5]), wrt="parameters", training=True).graph.node
        for form in ("exported", "group")
    ]
    wide = [sum(n.op_type == "Mul" for n in nodes) for nodes in both]
    assert wide[0] == wide[1]


@pytest.mark.parametrize("kept", ["ng", "n"])
def test_differentiated_values_inside_stay(kept: str) -> None:
    model = _model("exported", [3, 8, 7, 5])
    augmented = og.augment(model, wrt=["x", kept], training=True)
    assert not _normalizations(augmented)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 8, 7, 5)).astype(np.float32)
    g = rng.normal(size=x.shape).astype(np.float32)
    got, want = run(augmented, {"x": x, "y_grad": g}), _expected("exported", model, x, g)
    np.testing.assert_allclose(got["x_grad"], want["x_grad"], atol=1e-5)
    scale = numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "scale"))
    slope = g * (1 - want["y"] ** 2) * scale
    np.testing.assert_allclose(got[f"{kept}_grad"].reshape(x.shape), slope, atol=1e-5)


def test_a_second_reader_gets_the_same_value() -> None:
    model = _model("exported", [3, 8, 7, 5], more="both = Add (z, n)", last="both")
    augmented = og.augment(model, wrt="inputs", training=True)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 8, 7, 5)).astype(np.float32)
    got = run(augmented, {"x": x, "y_grad": np.ones_like(x)})
    np.testing.assert_allclose(got["y"], run(model, {"x": x})["y"], atol=1e-5)


def test_inference_mode_and_exact_keep_the_operator() -> None:
    model = _model("instance", [3, 8, 7, 5])
    assert _normalizations(og.augment(model, wrt="all")) == ["InstanceNormalization"]
    assert _normalizations(og.augment(model, wrt="all", training=True, target=og.Target(lowering="exact"))) == [
        "InstanceNormalization"
    ]


def test_second_order_equals_autograd() -> None:
    model = _model("exported", [3, 8, 7, 5])
    model.graph.node.append(helper.make_node("ReduceSumSquare", ["y"], ["loss"], keepdims=0))
    model.graph.output[0].CopyFrom(helper.make_empty_tensor_value_info("loss"))
    product = og.hvp(model, wrt=["x"], of="loss", training=True)
    rng = np.random.default_rng(1)
    x, v = (rng.normal(size=(3, 8, 7, 5)).astype(np.float32) for _ in range(2))
    got = run(product, {"x": x, "x_tangent": v})["x_grad_tangent"]
    stored = {t.name: torch.tensor(numpy_helper.to_array(t)).double() for t in model.graph.initializer}
    scale, bias = stored["scale"].reshape(-1), stored["B"].reshape(-1)

    def scalar(u: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.group_norm(u, 2, scale, bias, 1e-3).tanh().square().sum()

    _, want = torch.autograd.functional.hvp(scalar, torch.tensor(x).double(), torch.tensor(v).double())
    assert np.linalg.norm(got - want.numpy()) <= 1e-5 * np.linalg.norm(want.numpy())
