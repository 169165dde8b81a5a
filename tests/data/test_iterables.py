"""Data of other packages: whatever gives the same batches trains the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import onnx_convgrad as og
from onnx_convgrad.data import Loader, as_batches
from tests.support.one_input import graph_of

X = np.random.default_rng(0).standard_normal((10, 3), np.float32)
LABELS = np.random.default_rng(1).integers(4, size=10)
BATCHES = [(X[i : i + 4], LABELS[i : i + 4]) for i in range(0, 10, 4)]
MODEL = graph_of(
    "(float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }",
    w=np.random.default_rng(2).standard_normal((3, 4), np.float32),
)
PROGRAM = og.build_training(MODEL, loss="cross_entropy", optimizer=og.optim.SGD(0.1))


def trained(data: Any, **options: Any) -> np.ndarray:
    """The parameter after two epochs."""
    trainer = og.Trainer(PROGRAM)
    trainer.fit(data, epochs=2, progress="none", **options)
    assert trainer.progress.steps == 6
    return trainer.parameters()["w"]


def check(data: Any, **options: Any) -> None:
    np.testing.assert_array_equal(trained(data, **options), trained(BATCHES))


class Samples(IterableDataset[tuple[np.ndarray, np.int64]]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.int64]]:
        return iter(zip(X, LABELS, strict=True))


class Pipeline:
    """Batches as those of `tf.data`: of no known length, and as NumPy arrays by an iterator."""

    def __init__(self, rounds: int = 1) -> None:
        self.rounds = rounds

    def __len__(self) -> int:
        raise TypeError("The dataset length is unknown.")

    def __iter__(self) -> Iterator[Any]:
        return ((torch.from_numpy(x), torch.from_numpy(labels)) for x, labels in BATCHES * self.rounds)

    def as_numpy_iterator(self) -> Iterator[Any]:
        return iter(BATCHES * self.rounds)


ROWS = [{"x": x, "target": label} for x, label in zip(X, LABELS, strict=True)]

ITERABLES: dict[str, Callable[[], Any]] = {
    "list": lambda: BATCHES,
    "function of the epoch": lambda: lambda _: iter(BATCHES),
    "DataLoader": lambda: DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(LABELS)), 4),
    "DataLoader of mappings": lambda: DataLoader(ROWS, 4),  # type: ignore[arg-type]
    "DataLoader without a length": lambda: DataLoader(Samples(), 4),
    "pipeline": Pipeline,
    "iterator of a pipeline": lambda: lambda _: Pipeline().as_numpy_iterator(),
}


@pytest.mark.parametrize("kind", ITERABLES)
def test_batches_of_any_iterable_train_alike(kind: str) -> None:
    check(ITERABLES[kind]())


def test_an_iterator_goes_on_in_the_next_epoch() -> None:
    check(Pipeline(rounds=5).as_numpy_iterator(), steps_per_epoch=3)


@pytest.mark.peers
def test_a_dataset_of_hugging_face_is_read_like_arrays() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": X, "label": LABELS})
    check(table, batch_size=4, shuffle=False)
    check(lambda _: table.with_format("numpy").iter(4))
    check(table.to_iterable_dataset().with_format("numpy").batch(4))
    by_name = {"x": X, "target": LABELS}
    np.testing.assert_array_equal(trained(table, batch_size=4), trained(by_name, batch_size=4))  # shuffled
    assert og.data.class_weights(table) == og.data.class_weights(LABELS)
    trainer = og.Trainer(PROGRAM)
    np.testing.assert_array_equal(trainer.predict(table)["y"], trainer.predict({"x": X})["y"])
    assert trainer.evaluate(table, "accuracy") == trainer.evaluate(by_name, "accuracy")
    assert og.evaluate(MODEL, table).metrics == og.evaluate(MODEL, by_name).metrics
    loader = as_batches(table, PROGRAM.manifest, batch_size=4)
    assert isinstance(loader, Loader)
    assert loader.describe()["columns"] == ["x", "label"]
    parts = loader.dataset.split(0.3), as_batches(by_name, PROGRAM.manifest).dataset.split(0.3)  # type: ignore[attr-defined]
    assert [part.rows.tolist() for part in parts[0]] == [part.rows.tolist() for part in parts[1]]


@pytest.mark.peers
def test_images_of_hugging_face_are_pixels() -> None:
    datasets = pytest.importorskip("datasets")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    table = datasets.Dataset.from_dict({"image": list(pixels), "label": [0, 1] * 3}, features=features)
    model = graph_of(
        "(float[N,3,8,8] image) => (float[N,2] y) { p = GlobalAveragePool (image) f = Flatten (p) y = MatMul (f, w) }",
        w=np.ones((3, 2), np.float32),
    )
    manifest = og.build_training(model, loss="cross_entropy", optimizer="sgd").manifest
    with pytest.warns(UserWarning, match="taken for pixels"):
        loader = as_batches(table, manifest, batch_size=6, shuffle=False)
    batch = next(iter(loader.epoch_iterator(0)))
    np.testing.assert_allclose(batch["image"], pixels.transpose(0, 3, 1, 2) / np.float32(255), rtol=1e-6)
    assert batch["target"].tolist() == [0, 1] * 3


@pytest.mark.peers
def test_rows_of_several_shapes_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": X, "label": LABELS}).batch(4)
    with pytest.raises(og.errors.ArgumentError, match=r"column 'x' have several shapes, such as \(4, 3\) and \(2, 3\)"):
        trained(table)


@pytest.mark.peers
def test_a_dataset_of_tensorflow_gives_its_batches() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    table = tensorflow.data.Dataset.from_tensor_slices((X, LABELS))
    check(table.batch(4))
    check(table.filter(lambda *_: True).batch(4))  # of unknown length
    check(lambda _: table.batch(4).as_numpy_iterator())
    check(tensorflow.data.Dataset.from_tensor_slices({"x": X, "target": LABELS}).batch(4))
    check(table.batch(4).repeat(5).as_numpy_iterator(), steps_per_epoch=3)
