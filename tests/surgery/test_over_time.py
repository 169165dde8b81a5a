"""A model of one frame over an axis of time: values, gradients and training beside PyTorch and the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import onnx_convgrad as og
from onnx_convgrad.errors import ArgumentError, ModelError
from tests.support.one_input import graph_of
from tests.support.streams import CELL, HIDDEN, SIZE, TorchCell

RNG = np.random.default_rng(0)
STEPS, N, T = 20, 4, 7
X, Y = (RNG.standard_normal((STEPS, N, T, size)).astype("f") for size in (SIZE, 1))
STATES = {"h": "hn"}


def wide(axis: int = 1) -> onnx.ModelProto:
    found = og.transforms.over_time(og.load(CELL, states=STATES), axis=axis)
    assert isinstance(found, onnx.ModelProto)
    return found


@pytest.mark.parametrize("axis", [0, 1])
def test_the_frames_and_the_last_state_are_those_of_one_call_after_the_other(axis: int) -> None:
    h = RNG.standard_normal((N, HIDDEN)).astype("f")
    y, last = og.session(wide(axis)).run(["y", "hn"], {"x": np.moveaxis(X[0], 1, axis), "h": h})
    session, found = og.session(CELL), []
    for t in range(T):
        one, h = session.run(["y", "hn"], {"x": X[0][:, t], "h": h})
        found.append(one)
    assert_allclose(y, np.stack(found, axis), rtol=1e-5, atol=1e-7)
    assert_allclose(last, h, rtol=1e-5, atol=1e-7)
    assert og.load(wide(axis)).states == STATES


def test_training_over_windows_is_that_of_pytorch() -> None:
    program = og.build_training(wide(), loss="mse", optimizer=og.optim.Adam(0.02))
    trainer, network = og.Trainer(program), TorchCell()
    optimizer, state, losses = torch.optim.Adam(network.parameters(), 0.02), torch.zeros(N, HIDDEN), []
    for x, y in zip(X, Y, strict=True):
        optimizer.zero_grad()
        found, state = network(torch.tensor(x), state.detach())
        loss = torch.nn.functional.mse_loss(found, torch.tensor(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = [trainer.step({"x": x, "target": y})["loss"] for x, y in zip(X, Y, strict=True)]
    assert_allclose(found, losses, rtol=1e-5)


def test_the_model_of_one_frame_takes_what_was_trained(tmp_path: Path) -> None:
    trainer = og.Trainer(og.build_training(wide(), loss="mse", optimizer="sgd"))
    trainer.step({"x": X[0], "target": Y[0]})
    own = og.Trainer(og.build_training(og.load(CELL, states=STATES), loss="mse", optimizer="sgd"))
    own.load(trainer)
    own.export(tmp_path / "frame.onnx")
    parts = og.data.Sequences({"x": list(X[1])}, 1)
    frames = og.predict(tmp_path / "frame.onnx", parts).outputs["y"].reshape(N, T, 1)
    assert_allclose(frames, trainer.predict({"x": X[1]})["y"], rtol=1e-5, atol=1e-7)


def test_inputs_that_all_frames_share_get_no_axis() -> None:
    model = graph_of(
        "(float[N,3] x, float[3] scale, float bias) => (float[N,3] y) { s = Mul (x, scale) y = Add (s, bias) }"
    )
    found = og.transforms.over_time(model, constant="scale")
    feeds = {"x": X[0], "scale": np.float32([1, 2, 3]), "bias": np.array(1, "f")}
    assert_array_equal(og.session(found).run(["y"], feeds)[0], X[0] * feeds["scale"] + 1)


def test_what_depends_on_no_frame_is_computed_once_and_an_input_may_be_an_output() -> None:
    model = graph_of(
        "(float[N,3] x, float[N,3] c) => (float[N,3] y, float[N,3] cn) { d = Mul (w, w) y = Mul (c, d) cn = Identity (x) }",
        w=np.full(3, 2, "f"),
    )
    found = og.transforms.over_time(og.load(model, states={"c": "cn"}))
    (scan,) = [node for node in found.graph.node if node.op_type == "Scan"]
    assert [n.op_type for n in scan.attribute[0].g.node].count("Mul") == 1
    y, last = og.session(found).run(["y", "cn"], {"x": X[0], "c": np.zeros((N, 3), "f")})
    assert_array_equal(y[:, 1:], 4 * X[0][:, :-1])
    assert_array_equal(last, X[0][:, -1])


def test_a_sigmoid_in_the_scan_still_gives_probabilities() -> None:
    model = graph_of("(float[N,3] x) => (float[N,1] y) { a = MatMul (x, w) y = Sigmoid (a) }", w=np.ones((3, 1), "f"))
    og.build_training(og.transforms.over_time(model), loss="bce", optimizer="sgd")  # a warning would be an error


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"constant": "x"}, ArgumentError, "No input has frames"),
        ({"constant": "h"}, ArgumentError, "input in constant: 'h'"),
        ({"axis": 3}, ModelError, "'x' has 2 axes"),
        ({"axis": -1}, ArgumentError, "axis must be at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        og.transforms.over_time(og.load(CELL, states=STATES), **options)


def test_an_input_that_is_an_output_is_refused() -> None:
    cell = graph_of("(float[N,3] x, float[N,3] h) => (float[N,3] y) { y = Add (x, h) }")
    cell.graph.output.append(cell.graph.input[0])
    with pytest.raises(ModelError, match=r"'x' is an input and an output.*Identity"):
        og.transforms.over_time(og.load(cell, states={"h": "x"}))
