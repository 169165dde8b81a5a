"""BatchNormalization of a pointwise convolution by the covariance of its input: where it applies, and accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.backends import covariance
from onnx_convgrad.runtime import run
from tests.support.one_input import dims, graph_of, node_of

SIZES = {1: (6, 3, 20, 30), 2: (4, 3, 20, 9, 7), 3: (3, 2, 12, 3, 4, 5)}
"""Batch, channels, features, points; by the number of spatial axes."""


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "by_cost" not in request.node.name:
        monkeypatch.setattr(covariance, "_pays", lambda *_: True)


def _stored(channels: int, features: int, rank: int, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        "w": generator.normal(size=(features, channels, *[1] * rank)).astype(np.float32),
        "scale": generator.uniform(-1, 2, features).astype(np.float32),
        "B": generator.normal(size=features).astype(np.float32),
        "mean": generator.normal(size=features).astype(np.float32),
        "var": generator.uniform(0.5, 2, features).astype(np.float32),
    }


def _model(shape: tuple[Any, ...], stored: dict[str, np.ndarray], **conv: Any) -> onnx.ModelProto:
    """A pointwise convolution, a BatchNormalization and a Tanh."""
    convolve = node_of("Conv", "x", "w", *(["b"] if "b" in stored else []), **conv)
    normalize = "BatchNormalization <momentum = 0.75, epsilon = 0.001> (u, scale, B, mean, var)"
    text = f"(float[{dims(shape)}] x) => (y) {{ u = {convolve} z = {normalize} y = Tanh (z) }}"
    return graph_of(text, opset=21, **stored)


def _expected(x: np.ndarray, g: np.ndarray, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By float64 autograd."""
    arrays = {"x": x, **{k: stored[k] for k in ("w", "scale", "B")}}
    leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in arrays.items()}
    mean, var = (torch.tensor(stored[k], dtype=torch.float64) for k in ("mean", "var"))
    u = torch.einsum("oc,nc...->no...", leaves["w"].flatten(1), leaves["x"])
    z = torch.nn.functional.batch_norm(u, None, None, leaves["scale"], leaves["B"], True, 0.25, 1e-3)
    y = z.tanh()
    y.backward(torch.tensor(g, dtype=torch.float64))
    axes = (0, *range(2, u.ndim))
    return {
        "y": y.detach().numpy(),
        **{f"{k}_grad": leaf.grad.numpy() for k, leaf in leaves.items()},
        "mean_next": (0.75 * mean + 0.25 * u.mean(axes)).detach().numpy(),
        "var_next": (0.75 * var + 0.25 * u.var(axes, correction=0)).detach().numpy(),
    }


def _close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], limit: float) -> None:
    assert set(got) == set(want)
    for name, array in want.items():
        assert np.linalg.norm(got[name] - array) <= limit * np.linalg.norm(array), name


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("batch", ["static", "symbolic"])
@pytest.mark.parametrize("offset", [0, 10])
def test_equals_autograd(rank: int, batch: str, offset: float) -> None:
    n, channels, features, *sizes = SIZES[rank]
    stored = _stored(channels, features, rank)
    model = _model((n if batch == "static" else "n", channels, *sizes), stored)
    augmented = og.augment(model, wrt="all", training=True)
    assert not [node for node in augmented.graph.node if node.op_type == "BatchNormalization"]
    generator = np.random.default_rng(1)
    x = (offset + generator.normal(size=(n, channels, *sizes))).astype(np.float32)
    g = generator.normal(size=(n, features, *sizes)).astype(np.float32)
    _close(run(augmented, {"x": x, "y_grad": g}), _expected(x, g, stored), 1e-5)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_large_mean_costs_less_than_without(rank: int) -> None:
    """The input is centered first, so a mean of a thousand deviations costs fewer digits than in the convolution."""
    n, channels, features, *sizes = SIZES[rank]
    stored, generator = _stored(channels, features, rank), np.random.default_rng(1)
    model = _model((n, channels, *sizes), stored)
    x = (1000 + generator.normal(size=(n, channels, *sizes))).astype(np.float32)
    g = generator.normal(size=(n, features, *sizes)).astype(np.float32)
    want = _expected(x, g, stored)
    errors = []
    for choice in ("auto", "exact"):
        got = run(og.augment(model, wrt="all", training=True, target=og.Target(lowering=choice)), {"x": x, "y_grad": g})
        errors.append(sum(np.linalg.norm(got[k] - v) / np.linalg.norm(v) for k, v in want.items()))
    assert errors[0] < errors[1]


def test_a_constant_input_has_no_variance() -> None:
    stored = _stored(3, 20, 2)
    x, g = np.full((4, 3, 9, 7), 7, np.float32), np.ones((4, 20, 9, 7), np.float32)
    got = run(og.augment(_model(x.shape, stored), wrt="all", training=True), {"x": x, "y_grad": g})
    np.testing.assert_allclose(got["y"], np.tanh(np.broadcast_to(stored["B"][:, None, None], g.shape)), rtol=1e-5)
    assert all(np.isfinite(array).all() for array in got.values())


def test_second_derivatives() -> None:
    """The gradient differentiated again, against the same without the covariance."""
    model = _model((4, 3, 9, 7), _stored(3, 20, 2))
    generator = np.random.default_rng(2)
    feeds = {"x": generator.normal(size=(4, 3, 9, 7)), "y_grad": generator.normal(size=(4, 20, 9, 7))}
    feeds |= {"x_grad_grad": generator.normal(size=(4, 3, 9, 7))}
    results = []
    for choice in ("auto", "exact"):
        first = og.augment(model, wrt=["x", "w"], of=["y"], training=True, target=og.Target(lowering=choice))
        second = og.vjp(first, wrt=["x", "w"], of=["x_grad"])
        results.append(run(second, {k: v.astype(np.float32) for k, v in feeds.items()}))
    _close(*results, 1e-4)


def _normalizations(model: onnx.ModelProto, **options: Any) -> int:
    """Number of nodes that normalize with the statistics of the batch."""
    augmented = og.augment(model, **{"wrt": "all", "training": True, **options})
    nodes = [n for n in augmented.graph.node if n.op_type == "BatchNormalization"]
    return sum(a.i for n in nodes for a in n.attribute if a.name == "training_mode")


def test_where_it_applies() -> None:
    shape, stored = (4, 3, 9, 7), _stored(3, 20, 2)
    assert _normalizations(_model(shape, stored)) == 0
    assert _normalizations(_model(shape, stored), target=og.Target(lowering="exact")) == 1
    assert _normalizations(_model(shape, stored, strides=[2, 2])) == 1
    assert _normalizations(_model(shape, stored, pads=[1, 0, 0, 0])) == 1
    assert _normalizations(_model(shape, {**stored, "b": stored["B"]})) == 1
    assert _normalizations(_model(shape, stored), wrt=["u"]) == 1
    assert _normalizations(_model(shape, stored), of=["u", "y"]) == 1
    assert _normalizations(_model(shape, stored), wrt=["z"]) == 0
    assert _normalizations(_model((4, 6, 9, 7), stored, group=2)) == 1


@pytest.mark.parametrize(
    ("shape", "features", "applies"),
    [
        ((16, 24, 56, 56), 144, True),
        ((8, 64, 56, 56), 256, True),
        ((8, 256, 14, 14), 1024, False),
        ((16, 144, 56, 56), 24, False),
        ((1, 24, 4, 4), 144, False),
    ],
)
def test_where_it_pays_by_cost(shape: tuple[int, ...], features: int, applies: bool) -> None:
    assert (_normalizations(_model(shape, _stored(shape[1], features, 2))) == 0) == applies


def test_other_readers_of_the_convolution() -> None:
    """A chain of thousands of nodes is another reader."""
    model = _model((4, 3, 5), _stored(3, 20, 1))
    for i in range(2000):
        model.graph.node.append(helper.make_node("Neg", ["u" if i == 0 else f"t{i}"], [f"t{i + 1}"]))
    model.graph.output.append(helper.make_empty_tensor_value_info("t2000"))
    built = og.augment(model, wrt=["w"], of="y", training=True)
    assert any(node.op_type == "Conv" and "u" in node.output for node in built.graph.node)
