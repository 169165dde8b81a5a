"""`fit(sample_weight=, class_weight=)`, and arrays of weights in data and batches, beside PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.utils.class_weight import compute_class_weight

import onnx_convgrad as og
from tests.support.command_line import invoke
from tests.support.one_input import graph_of
from tests.support.thread_ranks import ThreadRank, on_ranks

RNG = np.random.default_rng(0)
X, LABELS = RNG.standard_normal((12, 3)).astype("f"), np.array([0, 0, 0, 1, 0, 2, 0, 1, 0, 0, 2, 0])
WEIGHT = RNG.uniform(0, 2, 12).astype("f")
W0 = RNG.standard_normal((3, 4)).astype("f")
NET = graph_of("(float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }", w=W0)
DATA = {"x": X, "target": LABELS}


def trainer(*, weighted: bool = True) -> og.Trainer:
    loss = og.losses.CrossEntropy(sample_weight=weighted)
    return og.Trainer(og.build_training(NET, loss=loss, optimizer=og.optim.SGD(0.1)))


def torch_run(weights: np.ndarray, epochs: int = 2, size: int = 5) -> tuple[np.ndarray, float]:
    """The parameter after some epochs in order, and the mean of the last one."""
    w = torch.tensor(W0, requires_grad=True)
    for _ in range(epochs):
        total = 0.0
        for start in range(0, len(X), size):
            rows = slice(start, start + size)
            entries = F.cross_entropy(torch.tensor(X[rows]) @ w, torch.tensor(LABELS[rows]), reduction="none")
            loss = (torch.tensor(weights[rows]) * entries).mean()
            (gradient,) = torch.autograd.grad(loss, w)
            total += loss.item() * len(entries) / len(X)
            with torch.no_grad():
                w -= 0.1 * gradient
    return w.detach().numpy(), total


BALANCED = compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
CLASSES = {0: 0.5, 2: 3.0}
TABLE = np.array([0.5, 1.0, 3.0])
CALLS: dict[str, tuple[Any, dict[str, Any], np.ndarray]] = {
    "sample_weight": (DATA, {"sample_weight": WEIGHT}, WEIGHT),
    "a list": (DATA, {"sample_weight": WEIGHT.tolist()}, WEIGHT),
    "an array of the data": ({**DATA, "sample_weight": WEIGHT}, {}, WEIGHT),
    "balanced": (DATA, {"class_weight": "balanced"}, BALANCED[LABELS]),
    "classes": (DATA, {"class_weight": CLASSES}, TABLE[LABELS]),
    "a sequence": (DATA, {"class_weight": TABLE}, TABLE[LABELS]),
    "a product": (DATA, {"sample_weight": WEIGHT, "class_weight": CLASSES}, WEIGHT * TABLE[LABELS]),
    "all": (
        {**DATA, "sample_weight": WEIGHT},
        {"sample_weight": WEIGHT, "class_weight": CLASSES},
        WEIGHT**2 * TABLE[LABELS],
    ),
    "without": (DATA, {}, np.ones(12)),
}


@pytest.mark.parametrize("name", CALLS)
def test_training_equals_pytorch(name: str) -> None:
    data, options, weights = CALLS[name]
    own = trainer()
    history = own.fit(data, epochs=2, batch_size=5, shuffle=False, progress="none", **options)
    wanted, loss = torch_run(weights.astype("f"))
    np.testing.assert_allclose(own.parameters()["w"], wanted, atol=1e-6)
    assert history[-1]["loss"] == pytest.approx(loss, rel=1e-5)


def test_batches_with_weights() -> None:
    def rows(start: int) -> slice:
        return slice(start, start + 5)

    for batches in (
        [{"x": X[rows(i)], "target": LABELS[rows(i)], "sample_weight": WEIGHT[rows(i)]} for i in (0, 5, 10)],
        [(X[rows(i)], LABELS[rows(i)], WEIGHT[rows(i)]) for i in (0, 5, 10)],
    ):
        own = trainer()
        own.fit(batches, epochs=2, progress="none")
        np.testing.assert_allclose(own.parameters()["w"], torch_run(WEIGHT)[0], atol=1e-6)
    own = trainer()
    own.fit([(X[rows(i)], LABELS[rows(i)]) for i in (0, 5, 10)], epochs=2, progress="none")
    np.testing.assert_allclose(own.parameters()["w"], torch_run(np.ones(12, "f"))[0], atol=1e-6)


def test_predictions_leave_labels_and_weights_out() -> None:
    wanted = trainer().predict(DATA)["y"]
    for batches in ([(X, LABELS)], [(X, LABELS, WEIGHT)], [X], {**DATA, "sample_weight": WEIGHT}):
        np.testing.assert_array_equal(trainer().predict(batches)["y"], wanted)


def test_a_held_out_share_has_its_own_weights() -> None:
    own = trainer()
    history = own.fit(DATA, sample_weight=WEIGHT, validation=0.5, class_weight={0: 9.0}, batch_size=4, progress="none")
    held = og.data.as_dataset(DATA).split(0.5, own.seed)[1]
    y = torch.tensor(X[held.rows]) @ torch.tensor(own.parameters()["w"])
    entries = F.cross_entropy(y, torch.tensor(LABELS[held.rows]), reduction="none")
    wanted = float((torch.tensor(WEIGHT[held.rows]) * entries).mean())
    assert history[-1]["val_loss"] == pytest.approx(wanted, rel=1e-5)


def test_accumulated_batches_are_those_of_the_union() -> None:
    one, several = trainer(), trainer()
    whole = one.fit(DATA, sample_weight=WEIGHT, batch_size=12, shuffle=False, progress="none")
    parts = several.fit(DATA, sample_weight=WEIGHT, batch_size=5, accumulate=3, shuffle=False, progress="none")
    np.testing.assert_allclose(several.parameters()["w"], one.parameters()["w"], atol=1e-6)
    assert parts[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5)


def test_ranks_have_the_weights_of_their_own_samples() -> None:
    wanted = trainer()
    wanted.fit(DATA, sample_weight=WEIGHT, epochs=2, batch_size=5, progress="none")

    def work(own: ThreadRank) -> np.ndarray:
        loss = og.losses.CrossEntropy(sample_weight=True)
        program = og.build_training(NET, loss=loss, optimizer=og.optim.SGD(0.1))
        ranked = og.Trainer(program, distributed=own)
        ranked.fit(DATA, sample_weight=WEIGHT, epochs=2, batch_size=5, progress="none")
        return ranked.parameters()["w"]

    for w in on_ranks(2, work):
        np.testing.assert_allclose(w, wanted.parameters()["w"], atol=1e-6)


@pytest.mark.parametrize("augment", ["", "mixup"])
def test_a_teacher_and_mixed_samples(augment: str) -> None:
    loss = og.losses.distillation(og.losses.CrossEntropy(probabilities=True, sample_weight=True))
    own = og.Trainer(og.build_training(NET, loss=loss, optimizer="sgd"))
    data = og.data.with_teacher(og.data.Arrays(DATA, augment=augment or ()), NET)
    options: dict[str, Any] = {"batch_size": 12, "shuffle": False, "progress": "none"}
    history = own.fit(data, sample_weight=WEIGHT, class_weight=CLASSES, **options)
    y = torch.tensor(X) @ torch.tensor(W0)
    entries = F.cross_entropy(y, torch.tensor(LABELS), reduction="none")
    wanted = float((torch.tensor(WEIGHT * TABLE[LABELS]) * entries).mean()) / 2  # the teacher is the network itself
    if augment:
        assert np.isfinite(history[0]["loss"]) and history[0]["loss"] != pytest.approx(wanted)
    else:
        assert history[0]["loss"] == pytest.approx(wanted, rel=1e-4)


def test_private_training_clips_weighted_losses() -> None:
    loss = og.losses.CrossEntropy(sample_weight=True, reduction="sum")
    private = og.Privacy(noise=0.0, max_norm=1e6)
    own = og.Trainer(og.build_training(NET, loss=loss, optimizer=og.optim.SGD(0.1), privacy=private))
    own.step({**DATA, "sample_weight": WEIGHT})
    w = torch.tensor(W0, requires_grad=True)
    entries = F.cross_entropy(torch.tensor(X) @ w, torch.tensor(LABELS), reduction="none")
    (gradient,) = torch.autograd.grad((torch.tensor(WEIGHT) * entries).mean(), w)
    np.testing.assert_allclose(own.parameters()["w"], W0 - 0.1 * gradient.numpy(), atol=1e-6)


def test_a_folder_of_images_has_weights_of_classes(tmp_path: Path) -> None:
    for name, count in (("cat", 3), ("dog", 1)):
        for i in range(count):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("RGB", (2, 2), (40 * i, 9, 9)).save(tmp_path / name / f"{i}.png")
    net = graph_of(
        "(float[N,3,2,2] x) => (float[N,2] y) { f = Flatten (x)  y = MatMul (f, w) }", w=np.zeros((12, 2), "f")
    )
    loss = og.losses.CrossEntropy(sample_weight=True)
    loader = og.data.as_batches(
        og.data.ImageFolder(tmp_path, preprocessing="unit"),
        og.build_training(net, loss=loss, optimizer="sgd").manifest,
        class_weight="balanced",
        shuffle=False,
    )
    (batch,) = loader.epoch_iterator(0)
    np.testing.assert_allclose(batch["sample_weight"], [2 / 3, 2 / 3, 2 / 3, 2])


def test_other_names_of_the_array() -> None:
    own = trainer()
    whole = own.evaluate({**DATA, "importance": WEIGHT}, names={"sample_weight": "importance"})["loss"]
    assert whole == pytest.approx(own.evaluate({**DATA, "sample_weight": WEIGHT})["loss"])
    assert whole != pytest.approx(own.evaluate(DATA)["loss"])


def test_the_command_and_the_trained_file(tmp_path: Path) -> None:
    onnx.save(NET, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", **DATA, sample_weight=WEIGHT)
    common = [
        "--optimizer",
        "sgd",
        "--lr",
        "0.1",
        "--epochs",
        "2",
        "--batch-size",
        "5",
        "--no-shuffle",
        "--classes",
        "4",
    ]
    result = invoke(
        "train", tmp_path / "m.onnx", "--data", tmp_path / "data.npz", "--loss", "cross_entropy",
        "--loss-option", "sample_weight=true", *common, "--out", tmp_path / "run",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    stored = {
        t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "run" / "trained.onnx").graph.initializer
    }
    np.testing.assert_allclose(stored["w"], torch_run(WEIGHT)[0], atol=1e-6)
    found = og.evaluate(tmp_path / "run", tmp_path / "data.npz")
    y = torch.tensor(X) @ torch.tensor(stored["w"])
    entries = F.cross_entropy(y, torch.tensor(LABELS), reduction="none")
    assert found.metrics["loss"] == pytest.approx(float((torch.tensor(WEIGHT) * entries).mean()), rel=1e-4)
    alone = og.evaluate(tmp_path / "run" / "trained.onnx", tmp_path / "data.npz")
    assert alone.metrics["accuracy"] == found.metrics["accuracy"]
    assert og.evaluate(tmp_path / "run", DATA).metrics["loss"] == pytest.approx(float(entries.mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_weight": WEIGHT[:5]}, r"sample_weight holds float32 of the shape \(5,\), and there are 12 samples"),
        ({"sample_weight": np.ones((12, 2))}, r"the shape \(12, 2\).*one number for each"),
        ({"class_weight": "equal"}, "class_weight.*balanced"),
        ({"class_weight": {7: 1.0}}, "names the class 7, and classes are numbered 0 to 3"),
        ({"class_weight": {"cat": 1.0}}, "names the class 'cat'"),
        ({"class_weight": {0: np.nan}}, "class_weight must be finite"),
        ({"data": [DATA], "class_weight": "balanced"}, "not for list.*an array 'sample_weight'"),
        ({"data": {"x": X, "wanted": LABELS}, "class_weight": "balanced"}, "not known which array holds it"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        trainer().fit(**{"data": DATA, "progress": "none", **options})


@pytest.mark.parametrize("options", [{"sample_weight": WEIGHT}, {"class_weight": "balanced"}])
def test_a_program_without_the_input_says_how_to_build_it(options: dict[str, Any]) -> None:
    with pytest.raises(
        og.errors.ArgumentError, match=rf"{next(iter(options))} needs.*CrossEntropy\(sample_weight=True\)"
    ):
        trainer(weighted=False).fit(DATA, progress="none", **options)
