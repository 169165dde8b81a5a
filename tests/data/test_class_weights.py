"""Weights of classes of different sizes, beside scikit-learn's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.utils.class_weight import compute_class_weight

import onnx_convgrad as og
from tests.support.one_input import graph_of

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(4), [40, 7, 20, 3]))
WANTED = compute_class_weight("balanced", classes=np.arange(4), y=LABELS)


def test_weights_are_those_of_scikit_learn(tmp_path: Path) -> None:
    arrays = {"x": np.zeros((70, 2), np.float32), "target": LABELS}
    np.savez(tmp_path / "data.npz", **arrays)
    for data in (
        LABELS,
        LABELS.tolist(),
        LABELS.astype(np.uint8),
        arrays,
        tmp_path / "data.npz",
        og.data.Arrays(arrays),
    ):
        np.testing.assert_allclose(og.data.class_weights(data), WANTED)


def test_a_part_and_a_folder_have_those_of_their_samples(tmp_path: Path) -> None:
    train, _ = og.data.Arrays({"x": np.zeros(70), "label": LABELS}).split(0.5)
    numbers = train.class_numbers()
    assert numbers is not None
    np.testing.assert_allclose(og.data.class_weights(train), og.data.class_weights(numbers))
    for name, count in {"a": 3, "b": 1}.items():
        (tmp_path / name).mkdir()
        for i in range(count):
            Image.new("L", (4, 4)).save(tmp_path / name / f"{i}.png")
    np.testing.assert_allclose(og.data.class_weights(tmp_path), [4 / 6, 4 / 2])


def test_labels_that_do_not_count() -> None:
    np.testing.assert_allclose(og.data.class_weights([-100, 0, 0, 2, -100], classes=4), [0.75, 1, 1.5, 1])
    np.testing.assert_allclose(og.data.class_weights(np.array([[0, 1], [1, 1]])), [2, 2 / 3])


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([0.5, 1.0], {}, "Labels of classes are integers, not float64"),
        ([0, 3], {"classes": 3}, "labels are up to 3, which does not fit 3 classes"),
        ([-1, -1], {}, "which does not fit 0 classes"),
        (
            {"x": np.zeros(3), "z": np.arange(3)},
            {},
            r"not known which array holds the class .* class_weights\(labels\)",
        ),
        ([0, 1], {"classes": 0}, "classes must be at least 1"),
    ],
)
def test_refused_labels(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.data.class_weights(data, **options)


def test_a_loss_with_these_weights_equals_the_mean_over_classes() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((70, 4)).astype(np.float32)
    each = -(logits - np.log(np.exp(logits).sum(1, keepdims=True)))[np.arange(70), LABELS]
    model = graph_of("(float[N,4] x) => (float[N,4] y) { y = Mul (x, w) }", w=np.ones(4, np.float32))
    loss = og.losses.CrossEntropy(weight=og.data.class_weights(LABELS))
    trainer = og.Trainer(og.build_training(model, loss=loss, optimizer="sgd"))
    found = trainer.evaluate_batch({"x": logits, "target": LABELS})["loss"]
    assert found == pytest.approx(np.mean([each[c == LABELS].mean() for c in range(4)]), rel=1e-5)
