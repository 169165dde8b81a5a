"""Certified bounds hold for every sampled input, are exact where the network is affine, and CROWN's are never looser."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import onnx_convgrad as og
from onnx_convgrad import attacks
from onnx_convgrad.runtime import run
from tests.support.classifiers import Classifier
from tests.support.one_input import graph_of

SLACK = 1e-4
"""Bounds hold up to rounding."""

TAIL = "f = Flatten (h)  y = Gemm <transB = 1> (f, v, c)"
BODIES = {
    "Relu": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  h = Relu (a)",
    "LeakyRelu": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  h = LeakyRelu <alpha = 0.2> (a)",
    "Sigmoid": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  h = Sigmoid (a)",
    "Tanh": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  t = Tanh (a)  n = Neg (t)  h = Sub (n, a)",
    "steep": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  h = LeakyRelu <alpha = 3.0> (a)",
    "Elu": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  h = Elu (a)",
    "Clip": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  l = Constant <value_float = -0.5> ()  h = Clip (a, l)",
    "MaxPool": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  m = MaxPool <kernel_shape = [2, 2], strides = [1, 1], "
    "pads = [0, 0, 1, 1]> (a)  h = Relu (m)",
    "two": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  r = Relu (a)  d = Conv <pads = [1, 1, 1, 1]> (r, w, b)  "
    "t = Tanh (d)  h = Add (t, r)",
    "gate": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  s = Sigmoid (a)  h = Mul (a, s)",
    **{
        op: f"a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  h = {op} (a)"
        for op in ("Softplus", "Erf", "HardSigmoid", "Softsign")
    },
    "norm": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  n = BatchNormalization (a, g, b, b, q)  r = Relu (n)  "
    "k = Constant <value_float = -2.0> ()  d = Div (r, k)  h = Add (d, image)",
    "larger": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  k = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]> ()  "
    'l = Resize <mode = "linear"> (a, , k)  h = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (l)',
    "three factors": "a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  k = Constant <value_floats = [-2.0, 1.0]> ()  "
    'h = Einsum <equation = "nchw,c,c->nchw"> (a, b, k)',
}
"""The nodes between the image and the last layer."""


def network(body: str, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    shapes = {"w": (2, 2, 3, 3), "b": (2,), "v": (3, 18), "c": (3,), "g": (2,)}
    stored = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    stored["q"] = rng.random(2).astype(np.float32) + 0.5
    stored = {name: value for name, value in stored.items() if name in "wbvc" or body == BODIES["norm"]}
    return graph_of(f"(float[N,2,3,3] image) => (float[N,3] y) {{ {body}  {TAIL} }}", **stored)


def sampled(model: Any, x: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Scores of inputs of the box: random ones, and corners; `[samples, N, C]`."""
    change = rng.uniform(-epsilon, epsilon, (60, *x.shape))
    change[30:] = np.sign(change[30:]) * epsilon
    points = np.clip(x + change, 0, 1).astype(np.float32)
    flat = run(model, {"image": points.reshape(-1, *x.shape[1:])})["y"]
    return flat.reshape(60, len(x), -1)


@pytest.mark.parametrize("name", BODIES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), epsilon=st.sampled_from([0.01, 0.1, 0.5]))
def test_no_input_of_the_box_crosses_the_bounds(name: str, seed: int, epsilon: float) -> None:
    rng = np.random.default_rng(seed)
    model, x = network(BODIES[name], seed), rng.random((2, 2, 3, 3)).astype(np.float32)
    scores = sampled(model, x, epsilon, rng)
    widths = []
    for method in ("crown", "crown-ibp", "interval"):
        found = run(attacks.certify(model, epsilon, method=method), {"image": x})
        assert (found["lower"] - SLACK <= scores).all() and (scores <= found["upper"] + SLACK).all()
        label = found["certified_label"]
        gaps = scores[:, np.arange(2), label][..., None] - scores
        assert (found["margin"] - SLACK <= gaps).all()
        others = np.where(np.eye(3)[label] > 0, np.inf, found["margin"])
        assert np.array_equal(found["certified"], others.min(1) > 0)
        widths.append((found["upper"] - found["lower"], found["margin"]))
    *walks, (loose, less) = widths
    for tight, margin in walks:
        assert (tight <= loose + SLACK).all()
        assert (margin >= less - SLACK).all()


@pytest.mark.parametrize(
    "body",
    [
        "h = DeformConv <pads = [1, 1, 1, 1]> (image, w, o, b, m)",
        "h = GridSample (image, g)",
        "h = Shrink <bias = 0.2> (image)",
    ],
)
def test_bounds_behind_operators_that_sample_hold(body: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"w": (2, 2, 3, 3), "o": (1, 18, 3, 3), "b": (2,), "m": (1, 9, 3, 3), "g": (1, 3, 3, 2)}
    stored = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    stored = {name: array for name, array in stored.items() if f", {name}" in body}
    model = graph_of(f"(float[1,2,3,3] image) => (float[1,18] y) {{ {body}  y = Flatten (h) }}", opset=21, **stored)
    x = rng.random((1, 2, 3, 3)).astype(np.float32)
    points = np.clip(x + rng.uniform(-0.2, 0.2, (100, *x.shape[1:])), 0, 1).astype(np.float32)
    scores = np.concatenate([run(model, {"image": point[None]})["y"] for point in points])
    for method in ("crown", "interval"):
        found = run(attacks.certify(model, 0.2, method=method), {"image": x})
        assert (found["lower"] - SLACK <= scores).all() and (scores <= found["upper"] + SLACK).all()


def test_bounds_of_an_affine_network_are_reached() -> None:
    model = network("a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  h = AveragePool <kernel_shape = [1, 1]> (a)")
    x = np.random.default_rng(1).random((2, 2, 3, 3)).astype(np.float32)
    found = run(attacks.certify(model, 0.1), {"image": x})
    seeds = np.eye(3, dtype=np.float32)
    vjp = og.vjp(model, wrt="inputs")
    slope = np.stack([run(vjp, {"image": x, "y_grad": seeds[[i, i]]})["image_grad"] for i in range(3)])
    ends = [np.where(slope * sign > 0, np.minimum(x + 0.1, 1), np.maximum(x - 0.1, 0)) for sign in (-1, 1)]
    for name, point in zip(("lower", "upper"), ends, strict=True):
        want = [run(model, {"image": point[i].astype(np.float32)})["y"][:, i] for i in range(3)]
        assert_allclose(found[name], np.stack(want, 1), atol=1e-4)


@pytest.mark.parametrize("name", ["Relu", "Elu", "Softplus", "Sigmoid", "Erf"])
def test_crown_is_tighter_than_intervals(name: str) -> None:
    model, x = network(BODIES[name]), np.random.default_rng(1).random((2, 2, 3, 3)).astype(np.float32)
    crown, interval = (run(attacks.certify(model, 0.05, method=m), {"image": x}) for m in ("crown", "interval"))
    assert (crown["upper"] - crown["lower"]).mean() < 0.8 * (interval["upper"] - interval["lower"]).mean()


@pytest.mark.parametrize(
    "options", [{}, {"end": "Softmax"}, {"layout": "NHWC"}, {"batch": "2"}, {"product": "MatMul"}], ids=str
)
def test_attacks_never_succeed_where_the_prediction_is_certified(options: dict[str, str]) -> None:
    net = Classifier().balanced().eval()
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).numpy()
    x = x.transpose(0, 2, 3, 1).copy() if options.get("layout") == "NHWC" else x
    certified = 0
    for epsilon in (1e-4, 1e-3, 1e-2):
        found = run(attacks.certify(net.file(**options), epsilon), {"image": x})
        attacked = run(attacks.pgd(net.file(**options), epsilon, steps=10), {"image": x})
        assert not (found["certified"] & attacked["success"]).any()
        certified += int(found["certified"].sum())
    assert certified >= 2


def test_operators_without_bounds_are_listed() -> None:
    model = network("a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  s = Sin (a)  h = Floor (s)")
    with pytest.raises(og.errors.DifferentiationError, match="no interval") as refused:
        attacks.certify(model, 0.1)
    assert "Sin" in str(refused.value)
    signal = "f = Constant <value_int = 4> ()  r = Reshape (image, s)  h = STFT (r, f, k)"
    stored = {"s": np.array([0, 18, 1]), "k": np.ones(4, np.float32)}
    spectrum = graph_of(f"(float[2,2,3,3] image) => (float[2,4,3,2] h) {{ {signal} }}", **stored)
    with pytest.raises(og.errors.DifferentiationError, match=r"STFT.*no interval"):
        attacks.certify(spectrum, 0.1, method="interval")
    mixed = network("m = ReduceMean <axes = [0]> (image)  h = Add (image, m)")
    with pytest.raises(og.errors.DifferentiationError, match="sum"):
        attacks.certify(mixed, 0.1)
    with pytest.raises(og.errors.ArgumentError, match="method"):
        attacks.certify(model, 0.1, method="exact")


def test_an_activation_that_falls_is_refused() -> None:
    """Below its threshold, -0.5, the result jumps down from 0."""
    model = network("a = Conv <pads = [1, 1, 1, 1]> (image, w, b)  h = ThresholdedRelu <alpha = -0.5> (a)")
    with pytest.raises(og.errors.DifferentiationError, match=r"ThresholdedRelu.*no interval of its result is known"):
        attacks.certify(model, 0.1, method="interval")
