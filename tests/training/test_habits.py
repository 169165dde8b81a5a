"""Habits of other trainers: a share that is held out, the best parameters after early stopping."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad import optim
from onnx_convgrad.training import display
from tests.support.one_input import graph_of
from tests.support.thread_ranks import ThreadRank, on_ranks
from tests.support.training_nets import Feeds, same

RNG = np.random.default_rng(0)
LABELS = np.repeat(np.arange(3), [60, 30, 10])
DATA: Feeds = {"x": (RNG.standard_normal((100, 4)) + LABELS[:, None]).astype(np.float32), "target": LABELS}


def program(**options: Any) -> og.TrainingProgram:
    w, c = RNG.standard_normal((4, 3)).astype(np.float32), np.zeros(3, np.float32)
    model = graph_of("(float[N,4] x) => (float[N,3] y) { y = Gemm (x, w, c) }", w=w, c=c)
    return og.build_training(model, **{"loss": "cross_entropy", "optimizer": optim.Adam(0.05), **options})


# -- a share that is held out ------------------------------------------------------------------------------------------


def test_a_share_is_held_out_by_class_and_by_the_seed_of_the_trainer() -> None:
    built = program()
    train, held = og.data.Arrays(DATA).split(0.2, seed=3)
    share, given = og.Trainer(built, seed=3), og.Trainer(built, seed=3)
    rows = share.fit(DATA, validation=0.2, metrics="accuracy", epochs=2, progress="none")
    wanted = given.fit(train, validation=held, metrics="accuracy", epochs=2, progress="none")
    for row, other in zip(rows, wanted, strict=True):
        assert {k: v for k, v in row.items() if "second" not in k} == {
            k: v for k, v in other.items() if "second" not in k
        }
    summary = share.summary(DATA, validation=0.2)
    assert summary.train is not None
    assert summary.validation is not None
    assert list(summary.train.classes.values()) == [48, 24, 8]
    assert list(summary.validation.classes.values()) == [12, 6, 2]


def test_a_run_that_is_resumed_holds_out_the_same_samples(tmp_path: Path) -> None:
    built = program()
    whole = og.Trainer(built, seed=1)
    whole.fit(DATA, validation=0.25, epochs=4, progress="none")
    first = og.Trainer(built, seed=1)
    first.fit(DATA, validation=0.25, epochs=2, progress="none")
    first.save(tmp_path / "checkpoint")
    again = og.Trainer(built)
    again.restore(tmp_path / "checkpoint")
    again.fit(DATA, validation=0.25, epochs=4, progress="none")
    same(again.parameters(), whole.parameters())
    assert [row["val_loss"] for row in again.progress.history] == [row["val_loss"] for row in whole.progress.history]


# -- epochs of a number of steps ------------------------------------------------------------------------------------------


def _endless() -> Iterator[Feeds]:
    for number in itertools.count():
        yield {name: np.roll(array, number, 0)[:10] for name, array in DATA.items()}


def test_an_endless_iterator_goes_on_in_the_next_epoch() -> None:
    built = program()
    trainer, by_hand = og.Trainer(built), og.Trainer(built)
    history = trainer.fit(_endless(), epochs=3, steps_per_epoch=4, accumulate=2, progress="none")
    batches = _endless()
    for _ in range(12):
        by_hand.step(next(batches), next(batches))
    assert [row["step"] for row in history] == [4, 8, 12]
    same(trainer.parameters(), by_hand.parameters())


def test_an_epoch_ends_after_its_steps_or_with_the_data() -> None:
    for steps, expected in ((3, [3, 6]), (100, [10, 20])):
        history = og.Trainer(program()).fit(DATA, batch_size=10, epochs=2, steps_per_epoch=steps, progress="none")
        assert [row["step"] for row in history] == expected
    orders = []
    built = program()
    for epoch in range(2):
        seen: list[Any] = []
        trainer = og.Trainer(built)
        trainer.fit(
            DATA, batch_size=10, epochs=epoch + 1, steps_per_epoch=1, progress="none", callbacks=[_Losses(seen)]
        )
        orders.append(seen[-1])
    assert orders[0] != orders[1]


class _Losses(og.callbacks.Callback):
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def on_step(self, run: Any, results: Any) -> None:  # noqa: ARG002 - the signature of every callback
        self.seen.append(float(results["loss"]))


def test_a_run_that_is_resumed_within_an_epoch_of_steps_equals_a_whole_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 10, "steps_per_epoch": 3, "progress": "none"}
    built = program()
    whole = og.Trainer(built, seed=1)
    whole.fit(DATA, epochs=3, **options)
    first = og.Trainer(built, seed=1)
    first.fit(DATA, epochs=3, callbacks=[_Stop(5)], **options)
    first.save(tmp_path / "checkpoint")
    again = og.Trainer(built)
    again.restore(tmp_path / "checkpoint")
    again.fit(DATA, epochs=3, **options)
    same(again.parameters(), whole.parameters())


def test_a_resumed_epoch_that_is_longer_already_than_its_new_length_ends_at_once() -> None:
    trainer = og.Trainer(program())
    trainer.fit(DATA, batch_size=10, callbacks=[_Stop(2)], progress="none")
    history = trainer.fit(DATA, batch_size=10, epochs=2, steps_per_epoch=1, progress="none")
    assert [row["step"] for row in history] == [2, 3]


class _Stop(og.callbacks.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Any, results: Any) -> None:  # noqa: ARG002 - the signature of every callback
        if run.trainer.progress.steps == self.step:
            run.stop()


@pytest.mark.parametrize("steps", [0, 1.5, "3"])
def test_a_number_of_steps_is_whole(steps: Any) -> None:
    with pytest.raises(og.errors.ArgumentError, match="steps_per_epoch"):
        og.Trainer(program()).fit(DATA, steps_per_epoch=steps, progress="none")


@pytest.mark.parametrize(
    ("data", "share", "message"),
    [
        ([DATA], 0.2, r"validation=0.2 holds out samples, and the data are batches already: list\."),
        (DATA, 1.5, "A share of 1.5 of 100 samples leaves one part empty"),
        (DATA, 0.001, "A share of 0.001 of 100 samples leaves one part empty"),
        (DATA, -0.2, "share must be at least 0"),
    ],
)
def test_shares_that_cannot_be_held_out(data: Any, share: float, message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.Trainer(program()).fit(data, validation=share, progress="none")
    with pytest.raises(og.errors.ArgumentError, match="no data to hold a share out of"):
        og.Trainer(program()).summary(validation=share)


# -- the best parameters -----------------------------------------------------------------------------------------------


class Keep(og.callbacks.Callback):
    """Keeps the parameters and the averages of every epoch."""

    def __init__(self) -> None:
        self.epochs: list[Feeds] = []

    def on_epoch(self, run: Any, row: Any) -> None:
        assert row["epoch"] == len(self.epochs) + 1
        state = {name: array for name, array in run.trainer.state().items() if "ema" in name}
        self.epochs.append({**run.trainer.parameters(), **state})


def fit(trainer: og.Trainer, *callbacks: og.callbacks.Callback, **options: Any) -> og.Trainer:
    given = {"validation": 0.2, "batch_size": 8, "epochs": 8, "progress": "none", "callbacks": callbacks}
    trainer.fit(DATA, **{**given, **options})
    return trainer


def kept(trainer: og.Trainer) -> Feeds:
    return {**trainer.parameters(), **{name: array for name, array in trainer.state().items() if "ema" in name}}


RISING = {"optimizer": optim.SGD(3.0), "ema": 0.5}
"""Options with which the validation loss rises and falls."""


@pytest.mark.parametrize("epochs", [3, 30])
def test_early_stopping_puts_the_best_parameters_back(epochs: int) -> None:
    """Both where the run is stopped and where it has done all its epochs."""
    keep, stop = Keep(), og.callbacks.EarlyStopping(patience=3)
    trainer = fit(og.Trainer(program(**RISING)), keep, stop, epochs=epochs)
    losses = [row["val_loss"] for row in trainer.progress.history]
    best = int(np.argmin(losses))
    assert best < len(losses) - 1, losses
    assert (len(losses) < epochs) == (epochs == 30)
    same(kept(trainer), keep.epochs[best])
    assert trainer.evaluate(og.data.Arrays(DATA).split(0.2)[1])["loss"] == pytest.approx(losses[best], rel=1e-6)


def test_the_last_parameters_stay_on_request_and_after_an_interruption() -> None:
    class Interrupt(og.callbacks.Callback):
        def on_epoch(self, run: Any, row: Any) -> None:
            if row["epoch"] == 3:
                run.stop()

    for stop, more in (
        (og.callbacks.EarlyStopping(patience=3, restore_best_weights=False), ()),
        (og.callbacks.EarlyStopping(patience=5), (Interrupt(),)),
    ):
        keep = Keep()
        trainer = fit(og.Trainer(program(**RISING)), keep, stop, *more)
        assert stop.waited
        same(kept(trainer), keep.epochs[-1])


def test_a_run_that_is_resumed_ends_with_the_same_best_parameters(tmp_path: Path) -> None:
    built = program(**RISING)
    whole = fit(
        og.Trainer(built), og.callbacks.EarlyStopping(patience=3), og.callbacks.Checkpoints(tmp_path / "all", keep=99)
    )
    last = whole.progress.steps
    built.save(tmp_path / "program")
    for path in sorted((tmp_path / "all").iterdir()):
        again = og.Trainer(tmp_path / "program")
        again.restore(path)
        fit(again, og.callbacks.EarlyStopping(patience=3))
        assert again.progress.steps == last
        same(kept(again), kept(whole))


def test_ranks_get_the_best_parameters_of_a_checkpoint(tmp_path: Path) -> None:
    built = program(**RISING)
    fit(og.Trainer(built), og.callbacks.EarlyStopping(patience=3), og.callbacks.Checkpoints(tmp_path, keep=1))

    def work(own: ThreadRank) -> Feeds:
        trainer = og.Trainer(built, distributed=own, shard_optimizer=True)
        trainer.restore(tmp_path)
        return kept(fit(trainer, og.callbacks.EarlyStopping(patience=3)))

    alone = og.Trainer(built)
    alone.restore(tmp_path)
    wanted = kept(fit(alone, og.callbacks.EarlyStopping(patience=3)))
    for values in on_ranks(2, work):
        same(values, wanted)


# -- the time that is left ---------------------------------------------------------------------------------------------


def test_lines_tell_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Epochs take 40 seconds; those of an earlier run do not count, and a few seconds are not worth a word."""
    now = 0.0
    monkeypatch.setattr(display.time, "perf_counter", lambda: now)

    class Slow(og.callbacks.Callback):
        def on_epoch(self, run: Any, row: Any) -> None:  # noqa: ARG002
            nonlocal now
            now += 40

    trainer = fit(og.Trainer(program()), epochs=2)
    fit(trainer, Slow(), epochs=6, progress="text")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("  ")[2] for line in lines[:3]] == ["0:02:00 left", "0:01:20 left", "0:00:40 left"]
    assert lines[3].endswith("samples/s")
