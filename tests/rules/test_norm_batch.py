"""BatchNormalization: given and batch statistics, large means, stored statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run, session
from onnx_convgrad.testing import Case, rand
from tests.support.operators import autograd, one_node, rule_test, text_model


def _positive(*shape: int) -> object:
    return rand(*shape, low=0.3, high=2)


def _batch(*shape: int, channels: int | None = None, name: str = "", **fields: object) -> Case:
    c = channels or shape[1]
    attributes = {"epsilon": 1e-3, **fields.pop("attributes", {})}  # type: ignore[dict-item]
    operands = [rand(*shape), rand(c), rand(c), rand(c), _positive(c)]
    return Case("BatchNormalization", operands, attributes, name=name, **fields)  # type: ignore[arg-type]


def _training(*shape: int, **fields: object) -> Case:
    return _batch(*shape, attributes={"training_mode": 1, "momentum": 0.7}, outputs=3, **fields)  # type: ignore[arg-type]


CASES = [
    _batch(2, 3),
    _batch(2, 3, 4),
    _batch(2, 3, 2, 4),
    _batch(2, 3, 2, 2, 2),
    _batch(3, channels=1, dynamic=False, name="vector"),
    _batch(2, 3, 2, 4, constants=[1, 2, 3, 4], name="stored"),
    _batch(2, 3, 4, dtype=np.float64),
    _batch(2, 3, 4, dtype=np.float16),
    _batch(0, 3, 4, name="empty batch"),
    _batch(1, 1, 1),
    _batch(2, 3, 4, opset=9),
    _batch(2, 3, 4, opset=14),
    _training(4, 3),
    _training(2, 3, 4),
    _training(2, 3, 2, 4),
    _training(2, 3, 2, 2, 2),
    _training(2, 3, 2, 4, of=[0], name="of y"),
    _training(2, 3, 2, 4, of=[1], name="of mean"),
    _training(2, 3, 2, 4, of=[2], name="of variance"),
    _training(2, 3, 2, 4, constants=[1, 2, 3, 4], wrt=[0, 1, 2], of=[0], name="stored"),
    _training(2, 3, 4, dtype=np.float64),
    _training(2, 3, 4, dtype=np.float16),
]

test_rule = rule_test(CASES)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_batch_normalization_with_a_large_mean(training: bool) -> None:
    """A mean of a thousand deviations costs no digits: 1e-5 of a float64 computation with the same numbers."""
    generator = np.random.default_rng(0)
    x = (1000 + generator.normal(size=(8, 3, 5, 5))).astype(np.float32)
    g = generator.normal(size=x.shape).astype(np.float32)
    scale, bias = np.array([0.5, 1, -2], np.float32), np.zeros(3, np.float32)
    mean, var = np.full(3, 1000.3, np.float32), np.array([1, 2, 0.5], np.float32)
    names = ["X", "scale", "B", "mean", "var"]
    results = ["Y", "m", "v"] if training else ["Y"]
    node = helper.make_node("BatchNormalization", names, results, training_mode=int(training))
    arrays = dict(zip(names, (x, scale, bias, mean, var), strict=True))
    gradient = og.vjp(one_node(node, {k: v.shape for k, v in arrays.items()}), wrt=["X", "scale", "B"], of=["Y"])
    feeds = {**arrays, "Y_grad": g}
    got = run(gradient, {i.name: feeds[i.name] for i in gradient.graph.input})
    statistics = [torch.tensor(v, dtype=torch.float64) for v in (mean, var)]

    def normalized(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, *statistics, scale, bias, training, 0.1, 1e-5)

    for name, want in zip(("X", "scale", "B"), autograd(normalized, x, scale, bias, seed=g), strict=True):
        assert np.linalg.norm(got[f"{name}_grad"] - want) <= 1e-5 * np.linalg.norm(want), name


def test_batch_statistics_are_computed_once_and_blended_in_order() -> None:
    """The gradient uses the statistics that the node returns; the stored ones survive the run."""
    model = text_model("""(float[4,3,5,5] x) => (y)
        <float[3] scale = {2, 2, 2}, float[3] B = {1, 1, 1}, float[3] mean = {5, 5, 5}, float[3] var = {4, 4, 4}> {
        z = BatchNormalization <momentum = 0.75> (x, scale, B, mean, var) s = Mul (z, z)
        y = BatchNormalization <momentum = 0.75> (s, scale, B, mean, var) }""")
    augmented = og.augment(model, wrt=["x", "scale", "B"], training=True)
    assert not [n for n in augmented.graph.node if n.op_type == "ReduceMean"]
    generator = np.random.default_rng(0)
    x = generator.normal(3, 2, (4, 3, 5, 5)).astype(np.float32)
    g = generator.normal(size=x.shape).astype(np.float32)
    stepper = session(augmented)
    names = [o.name for o in augmented.graph.output]
    for _ in range(2):  # ONNX Runtime must not overwrite the operands of the second run
        got = dict(zip(names, stepper.run(None, {"x": x, "y_grad": g}), strict=True))
        arrays = {"x": x, "scale": np.full(3, 2.0), "B": np.ones(3)}
        leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in arrays.items()}
        z = torch.nn.functional.batch_norm(leaves["x"], None, None, leaves["scale"], leaves["B"], True, 0.1, 1e-5)
        s = z.square()
        y = torch.nn.functional.batch_norm(s, None, None, leaves["scale"], leaves["B"], True, 0.1, 1e-5)
        y.backward(torch.tensor(g, dtype=torch.float64))
        np.testing.assert_allclose(got["y"], y.detach().numpy(), rtol=1e-4, atol=1e-5)
        for name, leaf in leaves.items():
            np.testing.assert_allclose(got[f"{name}_grad"], leaf.grad.numpy(), rtol=1e-4, atol=1e-4)
        mean, var = 5, 4
        for batch in (x.astype(np.float64), s.detach().numpy()):
            mean, var = 0.75 * mean + 0.25 * batch.mean((0, 2, 3)), 0.75 * var + 0.25 * batch.var((0, 2, 3))
        np.testing.assert_allclose(got["mean_next"], mean, rtol=1e-5)
        np.testing.assert_allclose(got["var_next"], var, rtol=1e-5)
        assert not [name for name in names if name.endswith("_1")]


def test_statistics_stored_as_copies() -> None:
    """PyTorch's older exporter stores equal tensors once: initial statistics are copies of the scale and the shift."""
    text = """(float[4,2,3] x) => (float[4,2,3] y) <float[2] scale = {1.0, 1.0}, float[2] shift = {0.0, 0.0}> {
        mean = Identity (shift) var = Identity (scale) y = BatchNormalization (x, scale, shift, mean, var) }"""
    model = text_model(text, opset=17, ir_version=8)
    x = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)
    got = run(og.augment(model, wrt=["x"], training=True, cotangents="ones"), {"x": x})
    np.testing.assert_allclose(got["mean_next"], 0.1 * x.mean((0, 2)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got["var_next"], 0.9 + 0.1 * x.var((0, 2)), rtol=1e-5)


def test_frozen_batch_normalization() -> None:
    """With stored statistics dX is a product with a number per channel; they are not parameters."""
    stored = {k: np.ones(3, np.float32) for k in ("scale", "B", "mean", "var")}
    model = one_node(helper.make_node("BatchNormalization", ["X", *stored], ["Y"]), {"X": (2, 3, 8, 8)}, stored)
    nodes = og.vjp(model, wrt=["X"]).graph.node
    assert [n.op_type for n in nodes] == ["Add", "Sqrt", "Reciprocal", "Mul", "Unsqueeze", "Mul"]
    augmented = og.augment(model)
    assert [o.name for o in augmented.graph.output] == ["Y", "scale_grad", "B_grad"]


@pytest.mark.parametrize("sizes", [(0, 2, 3), (4, 2, 0)], ids=str)
@pytest.mark.parametrize("shape", ["known", "N,2,H"])
@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize(
    "node", ["y, m, v = BatchNormalization <training_mode = 1> (x, s, b, z, o)", "y = InstanceNormalization (x, s, b)"]
)
def test_the_gradients_of_nothing_are_zero(node: str, kind: str, shape: str, sizes: tuple[int, ...]) -> None:
    """As in PyTorch. The statistics of no entries are NaN."""
    shape = ",".join(map(str, sizes)) if shape == "known" else shape
    stored = f"<{kind}[2] z = {{0, 0}}, {kind}[2] o = {{1, 1}}>"
    text = f"({kind}[{shape}] x, {kind}[2] s, {kind}[2] b) => ({kind}[{shape}] y) {stored} {{ {node} }}"
    first = og.vjp(text_model(text), wrt=["x", "s", "b"], of="y")
    second = og.vjp(first, wrt=["s"], of=["x_grad", "s_grad"])
    dtype = np.float16 if kind == "float16" else np.float32
    feed = {name: np.ones(sizes, dtype) for name in ("x", "y_grad", "x_grad_grad")}
    feed |= {name: np.ones(2, dtype) for name in ("s", "b", "s_grad_grad")}
    for built in (first, second):
        got = run(built, {i.name: feed[i.name] for i in built.graph.input})
        assert not any(value.any() for name, value in got.items() if name[0] in "sb")
