"""Mixup and CutMix are those of the papers, repeat with seed and epoch, and train like PyTorch on the same mixtures."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

import onnx_convgrad as og
from onnx_convgrad.data import Arrays, ImageFolder, Loader
from tests.support.command_line import invoke
from tests.support.one_input import graph_of

SIZES = {"NCHW": "N,3,6,8", "NHWC": "N,6,8,3"}


def classifier(layout: str = "NCHW", dtype: str = "float") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    kind = np.float64 if dtype == "double" else np.float32
    w = rng.standard_normal((144, 4)).astype(kind)
    return graph_of(f"({dtype}[{SIZES[layout]}] x) => ({dtype}[N,4] y) {{ f = Flatten (x) y = MatMul (f, w) }}", w=w)


@cache
def program(layout: str = "NCHW") -> og.TrainingProgram:
    loss = og.losses.CrossEntropy(probabilities=True)
    return og.build_training(classifier(layout), loss=loss, optimizer=og.optim.SGD(0.1))


def data(layout: str = "NCHW", count: int = 12) -> dict[str, np.ndarray]:
    """Images each of whose numbers says from which sample it is, and classes."""
    shape = (6, 8, 3) if layout == "NHWC" else (3, 6, 8)
    x = np.broadcast_to(np.arange(count, dtype=np.float32).reshape(-1, 1, 1, 1), (count, *shape))
    return {"x": x.copy(), "label": np.arange(count) % 4}


def batches(augment: Any, epoch: int = 0, layout: str = "NCHW", start: int = 0, **options: Any) -> list[Any]:
    loader = Loader(
        Arrays(data(layout), augment=augment), program(layout).manifest, batch_size=6, augment=True, **options
    )
    return list(loader.epoch_iterator(epoch, start))


def test_mixup_adds_samples_and_their_targets() -> None:
    shares = []
    for epoch in range(40):
        for batch in batches("mixup", epoch, shuffle=False):
            x, target = batch["x"][:, 0, 0, 0].astype(np.float64), batch["target"]
            np.testing.assert_allclose(batch["x"], np.broadcast_to(batch["x"][:, :1, :1, :1], batch["x"].shape))
            np.testing.assert_allclose(target.sum(1), 1, rtol=1e-6)
            first = round(float(x.sum()) / 6 - 2.5)  # a mixture keeps the sum over the batch
            own = np.arange(first, first + 6)
            wide = [(abs(x[i] - own[i]), i) for i in range(6)]
            gap, i = max(wide)
            if gap < 1e-3:
                continue
            kept = [target[k, own[k] % 4] for k in range(6)]
            share = min(kept)  # of a sample that met another class
            partner = (x[i] - share * own[i]) / (1 - share)
            assert partner == pytest.approx(round(partner), abs=1e-3)
            shares.append(share)
    assert len(shares) > 40 and np.mean(np.minimum(shares, 1 - np.array(shares)) < 0.1) > 0.5  # Beta(0.2, 0.2)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_cutmix_pastes_a_rectangle_and_counts_its_area(layout: str) -> None:
    seen = set()
    for epoch in range(30):
        for number, batch in enumerate(batches("cutmix", epoch, layout, shuffle=False)):
            x = batch["x"] if layout == "NCHW" else np.moveaxis(batch["x"], -1, 1)
            assert (x == x[:, :1]).all()
            for i, own in enumerate(range(6 * number, 6 * number + 6)):
                pasted = x[i, 0] != own
                if pasted.any():
                    rows, columns = np.nonzero(pasted)
                    assert pasted[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
                    (other,) = np.unique(x[i, 0][pasted])
                    want = np.bincount([own % 4, int(other) % 4], [1 - pasted.mean(), pasted.mean()], minlength=4)
                    np.testing.assert_allclose(batch["target"][i], want, rtol=1e-5, atol=1e-7)
                    seen.add(round(float(pasted.mean()), 2))
    assert len(seen) > 10 and max(seen) > 0.4 and min(seen) < 0.2


def test_both_are_drawn_by_seed_and_epoch_alone() -> None:
    kinds = set()
    for epoch in range(8):
        first, second = batches(["mixup", "cutmix"], epoch, seed=3)
        np.testing.assert_array_equal(batches("mixup,cutmix".split(","), epoch, seed=3, start=1)[0]["x"], second["x"])
        kinds.add(bool((first["x"] == np.round(first["x"])).all()))
    assert kinds == {True, False}
    one, other = (batches("mixup", 0, seed=seed, shuffle=False)[0]["target"] for seed in (0, 1))
    assert not np.array_equal(one, other)
    whole = Loader(Arrays(data(), augment="mixup"), program().manifest)
    np.testing.assert_array_equal(next(iter(whole.epoch_iterator(0)))["x"].ravel()[:1] % 1, 0)  # not to train on


def test_a_resumed_run_sees_the_same_mixtures(tmp_path: Path) -> None:
    source, options = Arrays(data(), augment=["mixup", "cutmix"]), {"batch_size": 4, "progress": "none"}
    whole, half, resumed = (og.Trainer(program()) for _ in range(3))
    whole.fit(source, epochs=4, **options)  # type: ignore[arg-type]
    half.fit(source, epochs=2, **options)  # type: ignore[arg-type]
    resumed.restore(half.save(tmp_path / "half.safetensors"))
    resumed.fit(source, epochs=4, validation=data(), **options)  # type: ignore[arg-type]
    np.testing.assert_array_equal(whole.parameters()["w"], resumed.parameters()["w"])
    assert resumed.progress.data["augment"] == ["mixup", "cutmix"]  # type: ignore[index]
    found = og.Trainer(program())
    found.load(whole.parameters())
    assert resumed.progress.history[-1]["val_loss"] == pytest.approx(found.evaluate(data())["loss"], rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_on_mixtures_equals_pytorch(smoothing: float) -> None:
    loss = og.losses.CrossEntropy(probabilities=True, label_smoothing=smoothing)
    made = og.build_training(classifier(dtype="double"), loss=loss, optimizer=og.optim.SGD(0.125))
    trainer = og.Trainer(made)
    loader = Loader(Arrays(data(), augment="mixup"), made.manifest, batch_size=6, augment=True)
    w = torch.tensor(trainer.parameters()["w"], requires_grad=True)
    for batch in loader.epoch_iterator(1):
        x, target = torch.tensor(batch["x"]), torch.tensor(batch["target"])
        assert x.dtype == torch.float64 and target.dtype == torch.float64
        value = torch.nn.functional.cross_entropy(x.flatten(1) @ w, target, label_smoothing=smoothing)
        (slope,) = torch.autograd.grad(value, [w])
        w = (w - 0.125 * slope).detach().requires_grad_()
        assert trainer.step(batch)["loss"] == pytest.approx(value.item(), rel=1e-9)
    np.testing.assert_allclose(trainer.parameters()["w"], w.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_numbers_of_classes_become_probabilities() -> None:
    trainer, arrays = og.Trainer(program()), data()
    want = trainer.evaluate_batch({"x": arrays["x"], "target": np.eye(4)[arrays["label"]]})
    got = trainer.evaluate_batch(arrays)
    assert got["loss"] == want["loss"]
    pixels = og.build_training(
        graph_of("(float[N,4,2] x) => (float[N,4,2] y) { y = Mul (x, w) }", w=np.ones((4, 2), np.float32)),
        loss=og.losses.CrossEntropy(probabilities=True),
        optimizer="sgd",
        wrt="w",
    )
    x, label = np.random.default_rng(0).standard_normal((3, 4, 2)), np.array([[0, 1], [2, 3], [1, 1]])
    found = og.Trainer(pixels).evaluate_batch((x.astype(np.float32), label))["loss"]
    assert found == pytest.approx(torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(label)).item())
    with pytest.raises(og.errors.ArgumentError, match="holds the class 4, and the model has 4, numbered 0 to 3"):
        trainer.step({**arrays, "label": arrays["label"] + 1})


def test_what_cannot_be_mixed_is_refused() -> None:
    numbers = og.build_training(classifier(), loss="cross_entropy", optimizer="sgd")
    with pytest.raises(og.errors.ArgumentError, match=r"mixup mixes labels, and those of the input 'target' are int64"):
        Loader(Arrays(data(), augment="mixup"), numbers.manifest, augment=True)
    flat = graph_of("(float[N,5] x) => (float[N,4] y) { y = MatMul (x, w) }", w=np.ones((5, 4), np.float32))
    made = og.build_training(flat, loss=og.losses.CrossEntropy(probabilities=True), optimizer="sgd")
    arrays = {"x": np.ones((8, 5), np.float32), "y": np.arange(8) % 4}
    with pytest.raises(og.errors.ArgumentError, match="cutmix pastes rectangles of images; the inputs are 'x'"):
        Loader(Arrays(arrays, augment="cutmix"), made.manifest, augment=True)
    assert len(Loader(Arrays(arrays, augment="mixup"), made.manifest, augment=True)) == 1
    with pytest.raises(og.errors.ArgumentError, match="Unknown augmentation of arrays: 'flip'"):
        Arrays(data(), augment="flip")


def test_the_command_mixes_images_and_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in "abcd":
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).save(
                tmp_path / "images" / name / f"{i}.png"
            )
    onnx.save(classifier(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **data())  # type: ignore[arg-type]
    options = ["--epochs", 1, "--batch-size", 4, "-q"]
    model, teacher = tmp_path / "model.onnx", ["--teacher", tmp_path / "model.onnx"]
    images = ["--data", tmp_path / "images", "--augment", "flip,mixup,cutmix", "--validation", 0.25]
    arrays = ["--data", tmp_path / "data.npz", "--loss", "cross_entropy"]
    for name, arguments in (
        ("images", images),
        ("taught", [*images, *teacher]),
        ("arrays", [*arrays, "--augment", "mixup"]),
    ):
        invoke("train", model, *arguments, *options, "--out", tmp_path / f"{name}.train")
        assert (tmp_path / f"{name}.train" / "trained.onnx").exists()
    invoke("train", "--resume", tmp_path / "images.train", "-q")
    found = json.loads(invoke("evaluate", tmp_path / "images.train", tmp_path / "images", "--json").stdout)
    assert found["task"] == "classes" and np.isfinite(found["metrics"]["loss"])
    wrong = invoke("train", model, *arrays, "--augment", "flip", "--out", tmp_path / "wrong", status=2)
    assert "--augment flip changes images in folders, and the data are arrays. Use mixup or cutmix" in wrong.stderr
    wrong = invoke(
        "train", model, *arrays[:2], "--loss", "focal", "--augment", "mixup", "--out", tmp_path / "w", status=2
    )
    assert "on the command line --loss cross_entropy" in wrong.stderr


def test_a_teacher_sees_the_mixtures(tmp_path: Path) -> None:
    onnx.save(classifier(), tmp_path / "teacher.onnx")
    loss = og.losses.distillation(og.losses.CrossEntropy(probabilities=True))
    made = og.build_training(classifier(), loss=loss, optimizer="sgd")
    taught = og.data.with_teacher(Arrays(data(), augment="mixup"), tmp_path / "teacher.onnx")
    loader = Loader(taught, made.manifest, batch_size=6, augment=True)
    w = onnx.numpy_helper.to_array(classifier().graph.initializer[0])
    for batch in loader.epoch_iterator(0):
        np.testing.assert_allclose(batch["teacher"], batch["x"].reshape(6, -1) @ w, rtol=1e-4, atol=1e-3)
        assert (batch["x"] % 1).any()
    assert not isinstance(loader.dataset, ImageFolder)
