"""Metrics of classes and labels: equal to scikit-learn's, over batches, ignored labels and resumed epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

import onnx_convgrad as og
from onnx_convgrad.metrics import AUROC, F1, Accuracy, ConfusionMatrix, Precision, Recall, scores
from tests.support.training_nets import Feeds, build, two_outputs

RNG = np.random.default_rng(0)
NAMES = ["accuracy", "top2", "precision", "recall", "f1", "iou", "auroc", "confusion", "perplexity"]


def samples(count: int, *, ignored: bool = False) -> Feeds:
    """Images of the network of `build` with five classes, of which the last never occurs."""
    target = RNG.integers(0, 4, count)
    if ignored:
        target[::5] = -100
    return {"x": RNG.standard_normal((count, 3, 8, 8)).astype("f"), "target": target}


def expected(logits: np.ndarray, target: np.ndarray) -> dict[str, Any]:
    """The metrics by scikit-learn; one-vs-rest of the classes that occur."""
    kept, y = logits[target >= 0].astype(np.float64), target[target >= 0]
    predicted, p = kept.argmax(1), torch.softmax(torch.tensor(kept), 1).numpy()
    macro: dict[str, Any] = {"average": "macro", "zero_division": 0.0}
    areas = [reference.roc_auc_score(y == c, p[:, c]) for c in np.unique(y)]
    return {
        "accuracy": reference.accuracy_score(y, predicted),
        "top2": reference.top_k_accuracy_score(y, kept, k=2, labels=np.arange(kept.shape[1])),
        "precision": reference.precision_score(y, predicted, **macro),
        "recall": reference.recall_score(y, predicted, **macro),
        "f1": reference.f1_score(y, predicted, **macro),
        "iou": reference.jaccard_score(y, predicted, **macro),
        "auroc": np.mean(areas),
        "confusion": reference.confusion_matrix(y, predicted, labels=np.arange(kept.shape[1])).tolist(),
        "perplexity": np.exp(reference.log_loss(y, p, labels=np.arange(kept.shape[1]))),
    }


@pytest.mark.parametrize("ignored", [False, True])
def test_classes(ignored: bool) -> None:
    trainer, data = og.Trainer(build()), samples(53, ignored=ignored)
    got = trainer.evaluate(data, NAMES, batch_size=8)
    assert list(got) == ["loss", *NAMES]
    want = expected(trainer.evaluate_batch(data)["y"], data["target"])
    for name, value in want.items():
        assert got[name] == (value if name == "confusion" else pytest.approx(value, abs=1e-6)), name


def test_labels() -> None:
    program = build(two_outputs(), loss={"b": "mse", "a": "bce_with_logits"})
    trainer = og.Trainer(program)
    x, b = RNG.standard_normal((40, 3)).astype("f"), np.zeros((40, 2), "f")
    data = {"x": x, "a_target": RNG.integers(0, 2, (40, 2)).astype("f"), "b_target": b}
    got = trainer.evaluate(data, [*NAMES[:1], *NAMES[2:-1]], batch_size=7)
    y, t = trainer.evaluate_batch(data)["a"], data["a_target"].astype(int)
    macro: dict[str, Any] = {"average": "macro", "zero_division": 0.0}
    assert got["accuracy"] == pytest.approx(((y > 0) == t).mean())
    assert got["precision"] == pytest.approx(reference.precision_score(t, y > 0, **macro))
    assert got["recall"] == pytest.approx(reference.recall_score(t, y > 0, **macro))
    assert got["f1"] == pytest.approx(reference.f1_score(t, y > 0, **macro))
    assert got["iou"] == pytest.approx(reference.jaccard_score(t, y > 0, **macro))
    assert got["auroc"] == pytest.approx(reference.roc_auc_score(t, y, average="macro"))
    assert got["confusion"] == reference.multilabel_confusion_matrix(t, y > 0).tolist()


def test_numbers() -> None:
    trainer = og.Trainer(build(two_outputs(), loss={"b": "mse", "a": "huber"}))
    data = {name: RNG.standard_normal((41, n)).astype("f") for name, n in (("x", 3), ("a_target", 2), ("b_target", 2))}
    got = trainer.evaluate(data, ["mae", "r2", og.metrics.MeanSquaredError(output="a")], batch_size=7)
    y = {name: np.float64(v) for name, v in trainer.evaluate_batch(data).items() if name in "ab"}
    assert got["mae"] == pytest.approx(reference.mean_absolute_error(data["b_target"], y["b"]))
    assert got["r2"] == pytest.approx(reference.r2_score(data["b_target"], y["b"]))
    assert got["mse_a"] == pytest.approx(reference.mean_squared_error(data["a_target"], y["a"]))


def test_r2_is_undefined_for_one_sample_and_metrics_name_the_losses_that_they_need() -> None:
    trainer = og.Trainer(build(two_outputs(), loss={"b": "mse"}, wrt="b.*"))
    one = {"x": np.ones((1, 3), "f"), "target": np.ones((1, 2), "f")}
    assert np.isnan(trainer.evaluate(one, ["r2"])["r2"])
    with pytest.raises(og.errors.ArgumentError, match="metric perplexity needs the loss cross_entropy or nll"):
        trainer.evaluate(one, ["perplexity"])
    with pytest.raises(og.errors.ArgumentError, match="metric mae needs the loss mse, l1 or huber"):
        og.Trainer(build()).evaluate(samples(8), ["mae"])


@pytest.mark.parametrize("form", ["probabilities", "log-probabilities"])
def test_perplexity_of_normalized_outputs(form: str) -> None:
    y, target = scores.softmax(RNG.standard_normal((9, 4)), 1), RNG.integers(0, 4, 9)
    given = y if form == "probabilities" else np.log(y)
    made = og.metrics.Perplexity(output="p", target="t", logits=False)
    want = np.exp(reference.log_loss(target, y, labels=range(4)))
    assert made({"p": given}, {"t": target})[0] == pytest.approx(want)


def test_one_label_for_each_sample_is_compared_with_its_own_output() -> None:
    made = Accuracy(output="p", target="t", binary=True)
    assert made({"p": np.array([[1.0], [-1.0], [2.0]])}, {"t": np.array([1, 1, 1])}) == (pytest.approx(2 / 3), 3.0)


def test_metrics_of_an_output_of_probabilities_use_one_half() -> None:
    made = Precision(output="p", target="t", binary=True, logits=False)
    assert made({"p": np.array([0.4, 0.6])}, {"t": np.array([0, 1])}) == (1.0, 1.0)


def test_class_axis_and_probabilities_as_targets() -> None:
    y, t = RNG.standard_normal((2, 3, 4)), RNG.integers(0, 3, (2, 4))
    rows = scores.class_rows(y, np.eye(3)[t].transpose(0, 2, 1))
    want = reference.confusion_matrix(t.reshape(-1), y.argmax(1).reshape(-1), labels=range(3))
    np.testing.assert_array_equal(scores.class_counts(rows), want)
    last = scores.class_rows(y.transpose(0, 2, 1), t, axis=-1)
    np.testing.assert_array_equal(scores.class_counts(last), want)
    with pytest.raises(og.errors.ArgumentError, match="A label is the class 3, and the output has 3 classes"):
        scores.class_rows(y, t + 1)


def test_auroc_with_ties_and_with_one_class() -> None:
    s, p = RNG.integers(0, 5, 60).astype(float), RNG.integers(0, 2, 60).astype(bool)
    assert scores.auroc(s, p) == pytest.approx(reference.roc_auc_score(p, s))
    assert np.isnan(scores.auroc(s, np.zeros(60, bool))) and np.isnan(scores.auroc(s * np.nan, p))


def test_probabilities_of_logits() -> None:
    y = np.array([[1000.0, 999.0, -1000.0], [0.0, -3.0, 2.0]])
    np.testing.assert_allclose(scores.softmax(y, 1), torch.softmax(torch.tensor(y), 1), atol=1e-12)
    np.testing.assert_allclose(scores.sigmoid(y), torch.sigmoid(torch.tensor(y)), atol=1e-12)


def test_an_interrupted_epoch_collects_on(tmp_path: Path) -> None:
    data = samples(40)
    options: dict[str, Any] = {"batch_size": 8, "progress": "none", "metrics": NAMES, "validation": samples(16)}
    whole, cut = og.Trainer(build()), og.Trainer(build())
    whole.fit(data, **options)

    class Stop(og.callbacks.Callback):
        def on_step(self, run: Any, results: Any) -> None:  # noqa: ARG002
            if run.trainer.progress.steps == 3:
                run.stop()

    cut.fit(data, **options, callbacks=[Stop()])
    assert not cut.progress.history and cut.progress.collected
    resumed = og.Trainer(build())
    resumed.restore(cut.save(tmp_path))
    resumed.fit(data, **options)
    rows = [{k: v for k, v in t.progress.history[0].items() if "second" not in k} for t in (whole, resumed)]
    assert rows[0] == rows[1] and set(NAMES) < set(rows[0]) and sum(map(sum, rows[0]["val_confusion"])) == 16


def test_metrics_by_name() -> None:
    iou, perplexity = og.metrics.IoU, og.metrics.Perplexity
    kinds = [Accuracy, Accuracy, Precision, Recall, F1, iou, AUROC, ConfusionMatrix, perplexity]
    program = build()
    for name, kind in zip(NAMES, kinds, strict=True):
        (made,) = og.metrics.named.resolve_metrics(name, program.manifest)
        assert type(made) is kind and made.name == name
    with pytest.raises(og.errors.ArgumentError, match=r"Unknown metric 'aurocs'\. Did you mean 'auroc'"):
        og.Trainer(program).evaluate(samples(8), "aurocs")
    options: dict[str, Any] = {"metrics": "confusion", "callbacks": [og.callbacks.EarlyStopping("val_confusion")]}
    trainer, data = og.Trainer(program), samples(8)
    with pytest.raises(og.errors.ArgumentError, match="monitored value 'val_confusion'"):
        trainer.fit(data, validation=data, progress="none", **options)
