"""Labels that are no class and numbers that are not finite are refused before a step, with name and sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.data import Arrays
from tests.training.run.test_trainer import linear


def data(**change: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((12, 3)).astype("f"), "target": rng.integers(0, 4, 12)} | change


def spoiled(sample: int, value: float) -> dict[str, np.ndarray]:
    found = data()
    found["x"][sample, 1] = value
    return found


def batches(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [{name: array[i : i + 4] for name, array in arrays.items()} for i in range(0, 12, 4)]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            data(target=np.arange(12) % 4 + 1),
            r"label 4 in 'target' \(sample 3, .* 0 to 3\. .*from 1: subtract",
        ),
        (data(target=np.where(np.arange(12) == 7, -1, 0)), r"The label -1 in 'target' \(sample 7, counted from 0\)"),
        (
            data(target=np.where(np.arange(12) == 9, 6, 0)),
            r"label 6 in 'target' \(sample 9, .* a head for 7 classes \(onnx_convgrad\.repl",
        ),
        (spoiled(6, np.nan), r"'x' holds nan in sample 6, counted from 0"),
        (spoiled(11, np.inf), r"'x' holds inf in sample 11, counted from 0"),
    ],
)
def test_wrong_values_are_refused_with_name_and_sample(arrays: dict[str, np.ndarray], message: str) -> None:
    trainer = og.Trainer(linear())
    with pytest.raises(og.ArgumentError, match=message):
        trainer.fit(arrays, batch_size=4, shuffle=False, progress="none")
    in_batch = message.split("sample", maxsplit=1)[0]
    for run in (trainer.step, trainer.evaluate):
        with pytest.raises(og.ArgumentError, match=in_batch):
            run(arrays)
    with pytest.raises(og.ArgumentError, match=in_batch + r"sample \d of batch [123]; samples count from 0"):
        trainer.fit(batches(arrays), progress="none")
    before = trainer.progress.steps
    with pytest.raises(og.ArgumentError, match=in_batch):
        trainer.fit(data(), validation=Arrays(arrays), batch_size=4, epochs=2, progress="none")
    assert trainer.progress.steps > before or "label" in message  # labels are checked before the first step


def test_ignored_labels_and_masks_are_data() -> None:
    trainer = og.Trainer(linear())
    ignored = data(target=np.where(np.arange(12) == 7, -100, 0))
    assert np.isfinite(trainer.fit(ignored, batch_size=4, progress="none")[0]["loss"])
    trainer.evaluate(spoiled(0, -np.inf))
