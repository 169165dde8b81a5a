"""Weights of the terms of a loss that follow schedules, beside PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onnx_convgrad as og
from onnx_convgrad import losses, schedules
from onnx_convgrad.programs.manifest import Manifest
from tests.support.one_input import graph_of
from tests.support.thread_ranks import ThreadRank, on_ranks

RNG = np.random.default_rng(0)
W0 = RNG.standard_normal((3, 4)).astype("f")
NET = graph_of("(float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }", w=W0)
RISING, FALLING = schedules.Warmup(2.0, 4), schedules.Cosine(1.0, 6)
COUNT = 12
DATA = {
    "x": RNG.standard_normal((COUNT, 3)).astype("f"),
    "class": RNG.integers(0, 4, COUNT),
    "number": RNG.standard_normal((COUNT, 4)).astype("f"),
}
DATA["class"][:3] = -100
ENTROPY = losses.Term(losses.CrossEntropy(), "y", target="class")
SQUARE = losses.Term(losses.MSE(), "y", target="number")
TERMS: Any = [(FALLING, ENTROPY), (RISING, SQUARE)]


def program(loss: Any = TERMS, **options: Any) -> og.TrainingProgram:
    return og.build_training(NET, loss=loss, optimizer=og.optim.SGD(0.1), **options)


def torch_losses(steps: int, size: int, first: int = 0, w0: np.ndarray = W0) -> tuple[list[float], np.ndarray]:
    """The loss of each step on batches in turn, and the parameter."""
    w = torch.tensor(w0, requires_grad=True)
    found = []
    for step in range(first, steps):
        rows = slice(step * size % COUNT, step * size % COUNT + size)
        x, c, n = (torch.tensor(DATA[name][rows]) for name in ("x", "class", "number"))
        loss = FALLING(step) * F.cross_entropy(x @ w, c) + RISING(step) * F.mse_loss(x @ w, n)
        (gradient,) = torch.autograd.grad(loss, w)
        found.append(loss.item())
        with torch.no_grad():
            w -= 0.1 * gradient
    return found, w.detach().numpy()


def rows(start: int, size: int) -> dict[str, np.ndarray]:
    return {name: array[start : start + size] for name, array in DATA.items()}


def test_steps_and_history_equal_pytorch() -> None:
    trainer = og.Trainer(program())
    history = trainer.fit(DATA, epochs=2, batch_size=4, shuffle=False, progress="none")
    wanted, w = torch_losses(6, 4)
    np.testing.assert_allclose(trainer.parameters()["w"], w, atol=1e-6)
    assert trainer.evaluate(DATA)["loss"] == pytest.approx(
        0 * 1 + 2 * np.square(DATA["x"] @ w - DATA["number"]).mean(), rel=1e-5
    )
    again = og.Trainer(program())
    steps = [float(again.step(rows(i % 3 * 4, 4))["loss"]) for i in range(6)]
    np.testing.assert_allclose(steps, wanted, rtol=1e-5)
    # A mean over entries that count is joined by their number: 1, 4 and 4 of the batches
    shares, epoch = np.array([1, 4, 4]) / 9, range(3, 6)
    parts = [losses_of(trainer_at(step), step) for step in epoch]
    entropy = sum(FALLING(s) * share * part[0] for s, share, part in zip(epoch, shares, parts, strict=True))
    square = sum(RISING(s) * part[1] / 3 for s, part in zip(epoch, parts, strict=True))
    assert history[1]["loss"] == pytest.approx(entropy + square, rel=1e-5)


def trainer_at(step: int) -> np.ndarray:
    return torch_losses(step, 4)[1]


def losses_of(w: np.ndarray, step: int) -> tuple[float, float]:
    batch = rows(step % 3 * 4, 4)
    y = torch.tensor(batch["x"] @ w)
    return F.cross_entropy(y, torch.tensor(batch["class"])).item(), F.mse_loss(y, torch.tensor(batch["number"])).item()


def test_accumulated_batches_are_those_of_the_union() -> None:
    one, several = og.Trainer(program()), og.Trainer(program())
    for _ in range(3):
        want, got = one.step(rows(0, 12)), several.step(rows(0, 5), rows(5, 7))
        assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-5)
    np.testing.assert_allclose(several.parameters()["w"], one.parameters()["w"], atol=1e-6)
    gradients = several.gradients(rows(0, 5), rows(5, 7))["w"]
    np.testing.assert_allclose(gradients, one.gradients(rows(0, 12))["w"], atol=1e-6)


def test_ranks_have_the_loss_of_the_union() -> None:
    wanted = og.Trainer(program()).fit(DATA, epochs=3, batch_size=6, progress="none")

    def work(own: ThreadRank) -> list[dict[str, Any]]:
        return og.Trainer(program(), distributed=own).fit(DATA, epochs=3, batch_size=6, progress="none")

    for history in on_ranks(2, work):
        assert [row["loss"] for row in history] == pytest.approx([row["loss"] for row in wanted], rel=1e-5)


@pytest.mark.parametrize("loss", [[(RISING, "mse")], {"y": (RISING, "mse")}, losses.Term(losses.MSE(), "y", RISING)])
def test_a_single_term(loss: Any) -> None:
    trainer = og.Trainer(program(loss))
    batch = {"x": DATA["x"], "target": DATA["number"]}
    found = [float(trainer.step(batch)["loss"]) for _ in range(3)]
    assert found[0] == 0 and found[1] == pytest.approx(
        0.5 * np.square(DATA["x"] @ W0 - DATA["number"]).mean(), rel=1e-5
    )
    assert trainer.evaluate(batch, batch_size=5)["loss"] == pytest.approx(float(trainer.evaluate_batch(batch)["loss"]))


def test_a_scalar_of_the_model() -> None:
    net = graph_of(
        """(float[N,3] x) => (float[N,4] y, float penalty) {
            y = MatMul (x, w)
            penalty = ReduceSumSquare <keepdims = 0> (w)
        }""",
        w=W0,
    )
    program = og.build_training(net, loss={"y": "mse", "penalty": RISING}, optimizer=og.optim.SGD(0.1))
    trainer = og.Trainer(program)
    batch = {"x": DATA["x"], "target": DATA["number"]}
    trainer.progress.steps = 3
    wanted = np.square(DATA["x"] @ W0 - DATA["number"]).mean() + 1.5 * np.square(W0).sum()
    assert float(trainer.step(batch)["loss"]) == pytest.approx(wanted, rel=1e-5)


def test_a_schedule_of_what_epochs_measured() -> None:
    plateau = schedules.Plateau(1.0, monitor="loss", mode="max", factor=0.5, patience=0)
    loss = [(plateau, losses.Term(losses.MSE(), "y", target="number"))]
    trainer = og.Trainer(program(loss))
    data = {"x": DATA["x"], "target": DATA["number"]}
    history = trainer.fit(data, epochs=3, batch_size=12, progress="none")
    w, wanted = W0.astype(np.float64), []
    for factor in (1.0, 1.0, 0.5):
        error = DATA["x"] @ w - DATA["number"]
        wanted.append(factor * np.square(error).mean())
        w = w - 0.1 * factor * 2 * DATA["x"].T @ error / error.size
    assert [row["loss"] for row in history] == pytest.approx(wanted, rel=1e-5)


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    first = og.Trainer(program())
    first.fit(DATA, epochs=1, batch_size=4, shuffle=False, progress="none")
    first.save(tmp_path / "a.safetensors")
    program().save(tmp_path / "program")
    again = og.Trainer(tmp_path / "program")
    again.restore(tmp_path / "a.safetensors")
    again.fit(DATA, epochs=2, batch_size=4, shuffle=False, progress="none")
    np.testing.assert_allclose(again.parameters()["w"], torch_losses(6, 4)[1], atol=1e-6)


def test_the_manifest_and_the_summary(tmp_path: Path) -> None:
    made = program()
    m = made.manifest
    assert list(m.term_weights) == ["weight_y", "weight_y_1"]
    assert [term["weight"] for term in m.losses] == [1.0, 0.0]
    assert [i.name for i in made.step.graph.input][:5] == ["x", "class", "number", "weight_y", "weight_y_1"]
    assert "weight_y" not in {i.name for i in made.update.graph.input}
    read = Manifest.from_json(m.to_json())
    assert read.term_weights == m.term_weights and og.Trainer(made).summary().losses == m.losses
    assert "Cosine(lr=1, steps=6, minimum=0) times CrossEntropy" in str(og.Trainer(made).summary())


@pytest.mark.parametrize("change", [{"weight_input": ""}, {"weight_input": "x"}, {"schedule": None}, {"schedule": {}}])
def test_damaged_manifests_are_refused(change: dict[str, Any]) -> None:
    values = json.loads(program().manifest.to_json())
    values["losses"][0] |= change
    with pytest.raises(og.errors.ModelError, match="incomplete or damaged"):
        Manifest.from_json(json.dumps(values))


def test_private_training() -> None:
    loss = [(RISING, losses.Term(losses.MSE(reduction="sum"), "y", target="number"))]
    trainer = og.Trainer(program(loss, privacy=og.Privacy(noise=0.0, max_norm=1e6)))
    for _ in range(2):
        trainer.step({"x": DATA["x"], "target": DATA["number"]})
    error = DATA["x"] @ W0 - DATA["number"]
    wanted = W0 - 0.1 * 0.5 * 2 * DATA["x"].T @ error / COUNT
    np.testing.assert_allclose(trainer.parameters()["w"], wanted, atol=1e-5)


class Mine(schedules.Schedule):
    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, step: int) -> float:
        return self.number if step else 1.0


def test_schedules_of_callers(tmp_path: Path) -> None:
    made = program([(Mine(3.0), SQUARE)])
    batch = {"x": DATA["x"], "target": DATA["number"]}
    trainer = og.Trainer(made)
    first = float(trainer.evaluate_batch(batch)["loss"])
    trainer.progress.steps = 1
    assert float(trainer.evaluate_batch(batch)["loss"]) == pytest.approx(3 * first, rel=1e-6)
    made.save(tmp_path / "program")
    with pytest.raises(og.errors.ArgumentError, match="'weight_y' of a term follows a schedule of a custom class"):
        og.Trainer(tmp_path / "program")
    trainer = og.Trainer(program([(Mine(np.inf), SQUARE)]))
    trainer.progress.steps = 1
    with pytest.raises(og.errors.ArgumentError, match="'weight_y' of a term must be finite"):
        trainer.step(batch)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(og.errors.ArgumentError, match="follows a schedule, and is multiplied by another"):
        program([(2.0, losses.Term(losses.MSE(), "y", RISING))])
