"""Habits of other trainers: a share that is held out, the best parameters after early stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad import optim
from tests.support.one_input import graph_of
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
