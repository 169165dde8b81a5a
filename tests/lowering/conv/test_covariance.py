"""BatchNormalization of pointwise convolutions by products in float16: accuracy, derivatives of both orders, choice.

The operators are the same in float32, in which their derivatives are compared to all digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.backends import covariance
from onnx_convgrad.runtime import run
from tests.support.one_input import dims, graph_of

SIZES = {1: (6, 3, 20, 32), 2: (8, 16, 64, 8, 8), 3: (3, 2, 12, 4, 4, 4)}
"""Batch, channels, features, points; by the number of spatial axes."""


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "by_cost" not in request.node.name:
        monkeypatch.setattr(covariance, "_pays_in_halves", lambda *_: True)


def _stored(channels: int, features: int, rank: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(features, channels, *[1] * rank)) / np.sqrt(channels)
    return {
        "w": weight.astype(np.float32),
        "scale": generator.uniform(0.5, 2, features).astype(np.float32),
        "B": generator.normal(size=features).astype(np.float32),
        "mean": generator.normal(size=features).astype(np.float32),
        "var": generator.uniform(0.5, 2, features).astype(np.float32),
    }


def _model(shape: tuple[Any, ...], stored: dict[str, np.ndarray], dtype: str = "float16") -> onnx.ModelProto:
    """A pointwise convolution in a type, and a BatchNormalization with statistics in float32."""
    kernel = "k = Cast <to = 10> (w)" if dtype == "float16" else "k = Identity (w)"
    normalize = "y = BatchNormalization <momentum = 0.75, epsilon = 0.001> (u, scale, B, mean, var)"
    return graph_of(f"({dtype}[{dims(shape)}] x) => (y) {{ {kernel} u = Conv (x, k) {normalize} }}", opset=21, **stored)


def _data(rank: int, dtype: str = "float16", offset: float = 0) -> dict[str, np.ndarray]:
    """Rectified data, and cotangents with a large mean, which must not leak into the gradients of the kernel."""
    n, channels, features, *sizes = SIZES[rank]
    generator = np.random.default_rng(1)
    x = np.maximum(generator.normal(size=(n, channels, *sizes)), 0) + offset
    g = generator.normal(size=(n, features, *sizes)) + generator.normal(size=(features, *[1] * rank))
    return {"x": x.astype(dtype), "y_grad": g.astype(dtype)}


def _expected(feed: dict[str, np.ndarray], stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By float64 autograd."""
    arrays = {"x": feed["x"], **{k: stored[k] for k in ("w", "scale", "B")}}
    leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in arrays.items()}
    u = torch.einsum("oc,nc...->no...", leaves["w"].flatten(1), leaves["x"])
    y = torch.nn.functional.batch_norm(u, None, None, leaves["scale"], leaves["B"], True, 0.25, 1e-3)
    y.backward(torch.tensor(feed["y_grad"], dtype=torch.float64))
    axes = (0, *range(2, u.ndim))
    return {
        "y": y.detach().numpy(),
        **{f"{k}_grad": leaf.grad.numpy() for k, leaf in leaves.items()},
        "mean_next": 0.75 * stored["mean"] + 0.25 * u.mean(axes).detach().numpy(),
        "var_next": 0.75 * stored["var"] + 0.25 * u.var(axes, correction=0).detach().numpy(),
    }


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("batch", ["static", "symbolic"])
def test_float16_has_the_digits_of_float16(rank: int, batch: str) -> None:
    n, channels, features, *sizes = SIZES[rank]
    stored, feed = _stored(channels, features, rank), _data(rank)
    model = _model((n if batch == "static" else "n", channels, *sizes), stored)
    built = og.augment(model, wrt=["x", "w", "scale", "B"], training=True, target="cuda")
    assert sum(node.op_type == "Conv" for node in built.graph.node) > 1, "the covariance adds a convolution"
    got, want = run(built, feed), _expected(feed, stored)
    assert set(got) == set(want)
    errors = {name: _error(got[name], array) for name, array in want.items()}
    assert max(errors.values()) < 2e-3, errors


def test_a_large_mean_costs_no_digits() -> None:
    n, channels, features, *sizes = SIZES[2]
    stored, feed = _stored(channels, features, 2), _data(2, offset=4)
    built = og.augment(_model((n, channels, *sizes), stored), wrt=["w", "scale"], training=True, target="cuda")
    got, want = run(built, feed), _expected(feed, stored)
    assert max(_error(got[name], want[name]) for name in got) < 4e-3


def test_the_gradient_of_the_data_has_no_mean() -> None:
    """Its sum per channel is zero. The mean that is subtracted has more digits than float16."""
    n, channels, features, *sizes = SIZES[2]
    stored, feed = _stored(channels, features, 2), _data(2)
    built = og.augment(_model((n, channels, *sizes), stored), wrt=["x"], training=True, target="cuda")
    gradient = run(built, feed)["x_grad"].astype(np.float64)
    assert np.abs(gradient.mean((0, 2, 3))).max() < 5e-5 * np.abs(gradient).mean()


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("batch", ["static", "symbolic"])
def test_derivatives_in_float32(rank: int, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covariance, "sums_halves", lambda *_: True)
    n, channels, features, *sizes = SIZES[rank]
    stored, feed = _stored(channels, features, rank), _data(rank, "float32")
    model = _model((n if batch == "static" else "n", channels, *sizes), stored, "float")
    got, want = run(og.augment(model, wrt=["x", "w", "scale", "B"], training=True), feed), _expected(feed, stored)
    assert max(_error(got[name], array) for name, array in want.items()) < 2e-6


def test_second_derivatives_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient differentiated again, against the same by plain operators."""
    monkeypatch.setattr(covariance, "sums_halves", lambda *_: True)
    n, channels, features, *sizes = SIZES[2]
    model = _model((n, channels, *sizes), _stored(channels, features, 2), "float")
    feed = _data(2, "float32")
    feed["x_grad_grad"] = np.random.default_rng(2).normal(size=feed["x"].shape).astype(np.float32)
    results = []
    for choice in ("auto", "exact"):
        first = og.augment(model, wrt=["x", "w", "scale"], of=["y"], training=True, target=og.Target(lowering=choice))
        results.append(run(og.vjp(first, wrt=["x", "w", "scale"], of=["x_grad"]), feed))
    got, want = results
    assert set(got) == set(want)
    assert max(_error(got[name], array) for name, array in want.items()) < 1e-4


@pytest.mark.parametrize(
    ("shape", "features", "applies"),
    [
        ((64, 64, 56, 56), 256, True),
        ((64, 256, 14, 14), 1024, True),
        ((64, 512, 7, 7), 2048, False),
        ((64, 256, 56, 56), 64, False),
    ],
)
def test_where_it_pays_by_cost(shape: tuple[int, ...], features: int, applies: bool) -> None:
    built = og.augment(_model(shape, _stored(shape[1], features, 2)), wrt=["w"], training=True, target="cuda")
    assert any("covariance" in node.name for node in built.graph.node) == applies
