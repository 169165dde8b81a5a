"""Learning rates that are set, reduced on a plateau or searched for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

import onnx_convgrad as og
from onnx_convgrad import callbacks, optim, schedules
from onnx_convgrad.programs.optim.schedules import schedule_from
from onnx_convgrad.training.checkpoint import Checkpoint, write
from onnx_convgrad.training.learning_rates import LearningRates, _valley
from tests.support.one_input import graph_of
from tests.support.training_nets import Feeds, arrays, build, exported, same

Options = dict[str, Any]


def linear(**options: Any) -> og.TrainingProgram:
    """y = x w, whose mean squared error diverges for large rates."""
    w = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    model = graph_of("(float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }", w=w)
    return og.build_training(model, loss="mse", **{"optimizer": optim.SGD(0.1), **options})


def data(samples: int = 64) -> Feeds:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((samples, 3)), rng.standard_normal((3, 4))
    return {"x": x.astype(np.float32), "target": (x @ w).astype(np.float32)}


# -- set ---------------------------------------------------------------------------------------------------------------


def test_a_rate_that_is_set_replaces_the_schedule_until_it_is_none() -> None:
    trainer, plain = (og.Trainer(linear(optimizer=optim.SGD(schedules.Step(0.1, 2)))) for _ in range(2))
    batch, moved = data(4), []
    for rate in (None, 0.025, 0.0, None):
        trainer.learning_rate = rate
        before = trainer.parameters()["w"]
        plain.load({"w": before})
        plain.schedule = lambda _, used=trainer.learning_rate: used
        trainer.step(batch), plain.step(batch)
        same(trainer.parameters(), plain.parameters())
        moved.append(float(np.abs(trainer.parameters()["w"] - before).max()))
    assert trainer.learning_rate == pytest.approx(0.001)  # after four steps of the schedule
    assert moved[0] > moved[1] > moved[3] > moved[2] == 0


@pytest.mark.parametrize("rate", [-1.0, float("nan"), "fast", float("inf")])
def test_rates_that_cannot_be(rate: Any) -> None:
    trainer = og.Trainer(linear())
    with pytest.raises(og.errors.ArgumentError, match="learning_rate must be"):
        trainer.learning_rate = rate
    assert trainer.learning_rate == 0.1


def test_a_resumed_run_keeps_the_rate(tmp_path: Path) -> None:
    trainer = og.Trainer(linear())
    trainer.learning_rate = 0.02
    (row,) = trainer.fit(data(), progress="none")
    assert row["learning_rate"] == 0.02
    trainer.save(tmp_path / "a.safetensors")
    resumed = og.Trainer(linear())
    resumed.restore(tmp_path / "a.safetensors")
    assert resumed.learning_rate == 0.02
    resumed.learning_rate = None
    assert resumed.learning_rate == 0.1


def test_checkpoints_of_earlier_releases_have_no_rate(tmp_path: Path) -> None:
    trainer = og.Trainer(linear())
    path = trainer.save(tmp_path / "a.safetensors")
    with safe_open(path, "numpy") as file:
        info = json.loads(file.metadata()["onnx_convgrad.checkpoint"])
    del info["progress"]["learning_rate"], info["version"]
    write(path, Checkpoint(load_file(path), info))
    trainer.restore(path)
    assert trainer.learning_rate == 0.1


# -- on a plateau ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"patience": 0},
        {"patience": 2, "factor": 0.5, "cooldown": 3},
        {"patience": 1, "mode": "max", "threshold": 0.05},
        {"patience": 1, "threshold": 0.1, "threshold_mode": "abs", "min_lr": 1e-3},
        {"patience": 1, "mode": "max", "threshold": 0.1, "threshold_mode": "abs", "eps": 1e-3},
    ],
    ids=str,
)
def test_plateau_equals_pytorch(options: Options) -> None:
    """Also if the schedule is made anew half way, as for a restored checkpoint."""
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, **options)
    plateau: schedules.Schedule = schedules.Plateau(0.1, **{"mode": "min", **options})
    values = np.abs(np.random.default_rng(0).standard_normal(60) + np.linspace(2, 0, 60))
    values[[7, 20]] = np.nan
    history: list[Options] = []
    rates = set()
    for i, value in enumerate(values.tolist()):
        scheduler.step(value)
        history.append({"val_loss": value})
        rate = plateau.after(history)(i)
        assert rate == theirs.param_groups[0]["lr"], i
        rates.add(rate)
        if i == 30:
            history = json.loads(json.dumps(history))
            again = schedule_from(json.loads(json.dumps(plateau.to_json())))
            assert again == plateau and again is not None
            plateau = again
    assert len(rates) > 1, "the rate never changed"


def stalling(lr: float = 0.1, **options: Any) -> schedules.Plateau:
    """A schedule to which nothing is an improvement."""
    return schedules.Plateau(lr, **{"monitor": "loss", "patience": 1, "factor": 0.5, "threshold": 1.0, **options})


def rates_of(trainer: og.Trainer, epochs: int, **options: Any) -> list[float]:
    rows = trainer.fit(data(), epochs=epochs, progress="none", **options)
    return [row["learning_rate"] for row in rows]


def test_a_plateau_in_a_run_that_is_resumed(tmp_path: Path) -> None:
    """The rate falls at the same epochs, whether the run was interrupted or not, and also from a saved program."""
    program = linear(optimizer=optim.SGD(stalling()))
    want = rates_of(og.Trainer(program), 7)
    assert want == [0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    rates_of(og.Trainer(program), 4, callbacks=[callbacks.Checkpoints(tmp_path / "run")])
    program.save(tmp_path / "program")
    resumed = og.Trainer(tmp_path / "program")
    assert resumed.schedule == stalling()
    resumed.restore(tmp_path / "run")
    assert resumed.learning_rate == 0.05
    assert rates_of(resumed, 7) == want


def test_a_plateau_with_another_first_rate_begins_where_it_is_restored(tmp_path: Path) -> None:
    program = linear(optimizer=optim.SGD(stalling()))
    trainer = og.Trainer(program)
    rates_of(trainer, 4)
    trainer.save(tmp_path / "a.safetensors")
    other, patient = (
        og.Trainer(program, schedule=stalling(*lr, **o)) for lr, o in (((0.02,), {}), ((), {"patience": 3}))
    )
    with pytest.warns(UserWarning, match="The learning rate now follows"):
        other.restore(tmp_path / "a.safetensors")
    assert other.learning_rate == 0.02
    assert rates_of(other, 8)[4:] == [0.02, 0.02, 0.02, 0.01]
    with pytest.warns(UserWarning, match="The learning rate now follows"):
        patient.restore(tmp_path / "a.safetensors")
    assert patient.learning_rate == 0.1  # the four epochs count


def test_a_plateau_after_a_warm_up() -> None:
    warm = schedules.Warmup(stalling(), 2)
    assert [warm(i) for i in range(4)] == [0.0, 0.05, 0.1, 0.1]
    assert [warm.after([{"loss": 1.0}] * 3)(i) for i in range(4)] == [0.0, 0.025, 0.05, 0.05]
    assert warm.after([]) == warm


def test_single_steps_keep_the_rate_of_a_plateau_until_one_is_set() -> None:
    plateau = stalling()
    trainer, rows = og.Trainer(linear(optimizer=optim.SGD(plateau))), []
    for _ in range(3):
        rows.append({"loss": float(trainer.step(data(4))["loss"])})
        assert trainer.learning_rate == 0.1
    trainer.learning_rate = plateau.after(rows)(trainer.progress.steps)
    assert trainer.learning_rate == 0.05


def test_a_monitored_value_that_is_not_measured_is_named_before_the_epoch_is_closed(tmp_path: Path) -> None:
    trainer = og.Trainer(linear(optimizer=optim.SGD(stalling(monitor="val_loss"))))
    with pytest.raises(og.errors.ArgumentError, match=r"Unknown monitored value 'val_loss'.*'loss'.*validation=\.\.\."):
        trainer.fit(data(), callbacks=[callbacks.Checkpoints(tmp_path)], progress="none")
    assert not list(tmp_path.iterdir()) and not trainer.progress.history
    assert rates_of(trainer, 4, validation=data()) == [0.1, 0.1, 0.1, 0.05]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 1.0}, "factor must be at least 0 and below 1"),
        ({"patience": -1}, "patience must be at least 0"),
        ({"threshold": -1e-3}, "threshold must be at least 0"),
        ({"threshold_mode": "relative"}, "threshold_mode"),
        ({"min_lr": -1}, "min_lr must be at least 0"),
        ({"cooldown": 0.5}, "cooldown must be a whole number"),
        ({"mode": "least"}, "Unknown mode 'least'"),
        ({"monitor": 3}, "monitor must be the name of a column of the history"),
    ],
)
def test_refused_plateaus(options: Options, message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        schedules.Plateau(0.1, **options)


def test_a_misspelt_option_of_a_plateau_is_named() -> None:
    with pytest.raises(TypeError, match="patience_"):
        schedules.Plateau(0.1, patience_=1)  # type: ignore[call-arg]


# -- searched for ------------------------------------------------------------------------------------------------------


def test_the_search_changes_nothing_and_suggests_a_rate_that_trains() -> None:
    """The rate is far below that at which the quadratic loss diverges."""
    trainer, held = og.Trainer(linear(optimizer=optim.SGD(0.1, momentum=0.9))), data()
    trainer.fit(held, batch_size=16, progress="none")
    before, progress = {**trainer.parameters(), **trainer.state()}, repr(trainer.progress)
    found = trainer.find_learning_rate(held, highest=1e3, batch_size=16, accumulate=2)
    same({**trainer.parameters(), **trainer.state()}, before)
    assert repr(trainer.progress) == progress
    assert found.rates[0] == 1e-7 and len(found.rates) == len(found.losses) == len(found.smoothed) < 100
    assert found.smoothed[-1] > 4 * min(found.smoothed)  # it ended because the loss had exploded
    steps = np.diff(np.log(found.rates))
    np.testing.assert_allclose(steps, np.log(1e3 / 1e-7) / 99)
    assert found.suggestion is not None
    diverging = (
        2 * 4 / np.linalg.eigvalsh(held["x"].T @ held["x"] / len(held["x"]) * 2)[-1]
    )  # of the mean over 4 outputs
    assert 1e-4 < found.suggestion < diverging
    fresh = og.Trainer(linear(), schedule=found.suggestion)
    rows = fresh.fit(held, epochs=5, batch_size=16, progress="none")
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_the_search_is_deterministic_with_dropout() -> None:
    """Running statistics and random state are put back, too."""
    trainer = og.Trainer(build(exported(training=True)))
    first, second = (trainer.find_learning_rate(arrays(0), steps=12, batch_size=3) for _ in range(2))
    assert first == second and isinstance(first, LearningRates)


def test_the_valley_is_the_middle_of_the_longest_falling_chain() -> None:
    """Against an exhaustive search over chains, as in fastai."""
    rng = np.random.default_rng(0)
    for size in (20, 30, 60):
        losses = (rng.standard_normal(size).cumsum() / 3).tolist()
        rates = np.arange(1.0, size + 1).tolist()
        part = losses[size // 10 : -5]
        chains = np.ones(len(part), int)
        for i in range(len(part)):
            for j in range(i):
                if part[i] < part[j]:
                    chains[i] = max(chains[i], chains[j] + 1)
        longest, end = chains.max(), int(chains.argmax())
        index = end - longest + int(longest / 3) + int(longest / 6)
        assert _valley(rates, losses, size) == rates[size // 10 + index]
    assert _valley(rates, list(range(60)), 60) is None
    assert _valley(rates, [1.0] * 5, 60) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lowest": 0}, "lowest must be above 0"),
        ({"lowest": 1.0, "highest": 0.1}, "highest must be above lowest"),
        ({"steps": 9}, "steps must be at least 10"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
    ],
)
def test_refused_searches(options: Options, message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.Trainer(linear()).find_learning_rate(data(), **options)


def test_a_search_with_data_that_are_not_finite() -> None:
    broken = {name: np.full_like(array, np.nan) for name, array in data().items()}
    trainer = og.Trainer(linear())
    with pytest.raises(og.errors.ArgumentError, match="holds nan in sample 0"):
        trainer.find_learning_rate(broken)
    assert np.isfinite(trainer.parameters()["w"]).all()
