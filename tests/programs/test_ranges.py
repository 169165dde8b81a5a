"""Outputs that are probabilities, though no Sigmoid or Softmax computes them directly, are known as such."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad import losses
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.programs.ranges import excludes_classes, is_probability
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
STORED = {
    "w": RNG.standard_normal((2, 3)).astype(np.float32),
    "v": RNG.standard_normal((2, 1)).astype(np.float32),
    "one": np.float32(1),
    "half": np.float32(0.5),
    "ax": np.array([1]),
    "last": np.array([2]),
    "parts": np.array([1, 2]),
    "to": np.array([0, -1]),
    "first": np.array([0]),
    "tiny": np.float32(1e-7),
    "most": np.float32(0.999),
    "six": np.float32(6),
    "zero": np.float32(0),
    "step": np.float32(1 / 255),
    "point": np.uint8(0),
}

PROBABILITIES = {
    "the mean over frames": "s = Sigmoid (z)  y = ReduceMean <keepdims = 0> (s, ax)",
    "the largest over frames": "s = Sigmoid (z)  y = ReduceMax <keepdims = 0> (s, ax)",
    "a pool": "s = Sigmoid (z)  y = GlobalAveragePool (s)",
    "a slice": "s = Sigmoid (z)  y = Slice (s, first, ax, ax)",
    "one frame": "s = Sigmoid (z)  y = Gather <axis = 1> (s, first)",
    "a clip": "s = Sigmoid (z)  y = Clip (s, tiny, most)",
    "a clip of logits": "y = Clip (z, zero, one)",
    "the complement": "s = Sigmoid (z)  y = Sub (one, s)",
    "a product": "s = Sigmoid (z)  t = Sub (one, s)  y = Mul (s, t)",
    "noisy or": "s = Sigmoid (z)  t = Sub (one, s)  p = ReduceProd <keepdims = 0> (t, ax)  y = Sub (one, p)",
    "an average of two": "s = Sigmoid (z)  t = HardSigmoid (z)  a = Add (s, t)  y = Mul (a, half)",
    "a shifted tanh": "t = Tanh (z)  a = Add (t, one)  y = Mul (a, half)",
    "a written hard sigmoid": "r = Clip (z, zero, six)  y = Div (r, six)",
    "attention": "s = Sigmoid (z)  a = MatMul (x, v)  q = Softmax <axis = 1> (a)  m = Mul (q, s)"
    "  y = ReduceSum <keepdims = 0> (m, ax)",
    "linear pooling": "s = Sigmoid (z)  m = Mul (s, s)  a = ReduceSum <keepdims = 0> (m, ax)"
    "  b = ReduceSum <keepdims = 0> (s, ax)  y = Div (a, b)",
    "mixed by a matrix": "s = Sigmoid (z)  q = Softmax <axis = 2> (z)  t = Transpose <perm = [0, 2, 1]> (s)"
    "  y = MatMul (q, t)",
    "quantized": "s = Sigmoid (z)  q = QuantizeLinear (s, step, point)  y = DequantizeLinear (q, step, point)",
    "the exponential of logarithms": "l = LogSoftmax <axis = 2> (z)  y = Exp (l)",
    "a written sigmoid": "n = Neg (z)  e = Exp (n)  d = Add (e, one)  y = Div (one, d)",
    "a reciprocal": "n = Neg (z)  e = Exp (n)  d = Add (one, e)  y = Reciprocal (d)",
    "a written softmax": "e = Exp (z)  t = ReduceSum (e, last)  y = Div (e, t)",
    "shares of a sum": "r = Relu (z)  t = ReduceL1 (r, last)  d = Add (t, tiny)  y = Div (r, d)",
    "the second part": "s = Sigmoid (z)  a, y = Split <axis = 2> (s, parts)",
    "either": "r = ReduceSum <keepdims = 0> (z)  c = Greater (r, zero)  "
    "y = If (c) <then_branch = t () => (a) { a = Softmax (z) }, else_branch = e () => (b) { b = Sigmoid (z) }>",
}
NOT = {
    "logits": "y = Identity (z)",
    "a mean of logits": "y = ReduceMean <keepdims = 0> (z, ax)",
    "gated features": "s = Sigmoid (z)  y = Mul (z, s)",
    "a sum": "s = Sigmoid (z)  y = ReduceSum <keepdims = 0> (s, ax)",
    "a tanh": "y = Tanh (z)",
    "attention over features": "q = Softmax <axis = 2> (z)  t = Transpose <perm = [0, 2, 1]> (z)  y = MatMul (q, t)",
    "logits times a factor that begins at 0": "y = Mul (z, zero)",
    "a scaled sigmoid": "s = Sigmoid (z)  y = Mul (s, six)",
    "a logarithm": "s = Sigmoid (z)  y = Log (s)",
    "shares of numbers of any sign": "t = ReduceSum (z, last)  y = Div (z, t)",
    "an inverse": "e = Exp (z)  y = Reciprocal (e)",
    "one branch": "r = ReduceSum <keepdims = 0> (z)  c = Greater (r, zero)  "
    "y = If (c) <then_branch = t () => (a) { a = Softmax (z) }, else_branch = e () => (b) { b = Relu (z) }>",
}
CLASSES = {
    "softmax": "s = Softmax <axis = 2> (z)  y = ReduceMean <keepdims = 0> (s, ax)",
    "written": "e = Exp (z)  t = ReduceSum (e, last)  y = Div (e, t)",
    "clipped": "s = Softmax <axis = 2> (z)  y = Clip (s, tiny, most)",
    "two averaged": "s = Softmax <axis = 2> (z)  n = Neg (z)  t = Softmax <axis = 2> (n)  a = Add (s, t)  y = Mul (a, half)",
}


def model(tail: str) -> Any:
    names = {"w", *re.findall(r"\w+", tail)}
    used = {name: array for name, array in STORED.items() if name in names}
    return graph_of(f"(float[N,4,2] x) => (float y) {{ z = MatMul (x, w)  {tail} }}", opset=21, **used)


def output(tail: str) -> ir.Value:
    return canonicalize(ir.from_proto(model(tail))).graph.outputs[0]


@pytest.mark.parametrize("tail", [*PROBABILITIES.values(), *CLASSES.values()], ids=[*PROBABILITIES, *CLASSES])
def test_probabilities_are_known(tail: str) -> None:
    assert is_probability(output(tail))
    (y,) = run(model(tail), {"x": RNG.standard_normal((3, 4, 2)).astype(np.float32) * 9}).values()
    assert y.min() >= 0
    assert y.max() <= 1 + 1e-6


@pytest.mark.parametrize("tail", NOT.values(), ids=NOT)
def test_nothing_else_is_taken_for_one(tail: str) -> None:
    assert not is_probability(output(tail))


@pytest.mark.parametrize("tail", CLASSES.values(), ids=CLASSES)
def test_those_of_a_softmax_exclude_each_other(tail: str) -> None:
    assert excludes_classes(output(tail))
    assert not excludes_classes(output(PROBABILITIES["attention"]))


MEAN = PROBABILITIES["the mean over frames"]


@pytest.mark.parametrize("loss", ["bce_with_logits", "sigmoid_focal", "binary_dice", "cross_entropy", "focal", "dice"])
@pytest.mark.parametrize("tail", [MEAN, CLASSES["softmax"]], ids=["sigmoid", "softmax"])
def test_losses_of_logits_refuse_probabilities(loss: str, tail: str) -> None:
    use = "bce, which takes" if loss in ("bce_with_logits", "sigmoid_focal", "binary_dice") else "nll, which reads"
    with pytest.raises(
        og.errors.ArgumentError, match=rf"numbers of the output 'y' are between 0 and 1.*Use the loss {use}"
    ):
        og.build_training(model(tail), loss=loss, optimizer="sgd")


def test_the_remedies_work() -> None:
    x = RNG.standard_normal((5, 4, 2)).astype(np.float32)
    y = run(model(MEAN), {"x": x})["y"]
    trainer = og.Trainer(og.build_training(model(MEAN), loss="bce", optimizer="sgd"))
    target = (RNG.random(y.shape) < 0.5).astype(np.float32)
    want = -np.mean(target * np.log(y) + (1 - target) * np.log(1 - y))
    assert float(trainer.evaluate_batch({"x": x, "target": target})["loss"]) == pytest.approx(want, rel=1e-5)
    assert trainer.evaluate({"x": x, "target": target}, "accuracy")["accuracy"] == pytest.approx(
        np.mean((y > 0.5) == target)
    )
    classes = model(CLASSES["softmax"])
    with pytest.warns(UserWarning, match="it reads the logarithm of the output"):
        trainer = og.Trainer(og.build_training(classes, loss="nll", optimizer="sgd"))
    y, labels = run(classes, {"x": x})["y"], RNG.integers(0, 3, 5)
    want = -np.mean(np.log(y[np.arange(5), labels]))
    assert float(trainer.evaluate_batch({"x": x, "target": labels})["loss"]) == pytest.approx(want, rel=1e-5)
    assert np.isfinite(float(trainer.step({"x": x, "target": labels})["loss"]))


def test_bce_refuses_logits() -> None:
    for tail, use in (("y = Identity (z)", "bce_with_logits"), ("y = LogSoftmax (z)", "nll")):
        with pytest.raises(og.errors.ArgumentError, match=f"takes probabilities.*Use the loss {use}"):
            og.build_training(model(tail), loss=losses.BCE(), optimizer="sgd")


def test_predictions_of_pooled_probabilities_are_these(tmp_path: Any) -> None:
    onnx.save(model(MEAN), tmp_path / "m.onnx")
    x = RNG.standard_normal((5, 4, 2)).astype(np.float32)
    found = og.predict(tmp_path / "m.onnx", {"x": x})
    assert found.task == "labels"
    np.testing.assert_allclose(found.values, run(model(MEAN), {"x": x})["y"], rtol=1e-5)
